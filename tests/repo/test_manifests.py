"""What registries and clients read of this repository says the same everywhere, as pyproject.toml says it.

Whether each is valid, and what it starts works: tests/packaging/test_found.py.
"""

import json
import tomllib
from typing import Any

from tests.repo.files import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _read(name: str) -> dict[str, Any]:
    return dict(json.loads((ROOT / name).read_text()))


def test_every_manifest_has_the_version_and_names_of_the_project() -> None:
    """Also the package in server.json, whose name must be a command, for uvx, and the one line of text they share."""
    project, server, plugin = PROJECT["project"], _read("server.json"), _read(".claude-plugin/plugin.json")
    (package,), (listed,) = server["packages"], _read(".claude-plugin/marketplace.json")["plugins"]
    assert {each["version"] for each in (server, package, plugin)} == {project["version"]}
    assert package["identifier"] == project["name"]
    assert project["name"] in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["shared-scripts"].values()
    assert listed["name"] == plugin["name"]
    assert {server["description"], plugin["description"], listed["description"]} == {project["description"]}
    assert plugin["license"] == project["license"]
    assert plugin["author"] in project["authors"]


def test_the_readme_names_the_server_in_the_registry() -> None:
    """The registry looks for this in the package's description, which shows that both are of the same people."""
    assert PROJECT["project"]["readme"] == "README.md"
    assert f"<!-- mcp-name: {_read('server.json')['name']} -->" in (ROOT / "README.md").read_text()
