"""What the MCP registry, Claude Code and clients that open bundles read: each valid to its own checker, and started.

Needs a package index for the registry's part, uv for the bundle, and Node's packages (tests/interaction/node.py).
"""

import json
import os
import re
import shlex
import shutil
import subprocess  # noqa: TID251 - types the commands a person would
import sys
from pathlib import Path

import pytest
from mcp import Client, StdioServerParameters
from mcp_types import TextContent
from tests.fixtures.brokered import write_shipped
from tests.fixtures.installing import Place
from tests.interaction import node
from tests.repo.files import ROOT, committed

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The committed files alone, as who clones the repository has them."""
    copy = tmp_path_factory.mktemp("clone") / "glovebox"
    for name in committed():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    return copy


def _linted(tools: Path, repository: Path) -> subprocess.CompletedProcess[str]:
    command = [
        str(tools / "skillsaw"),
        "lint",
        "--strict",
        "--type",
        "mcp-registry",
        "--no-custom-rules",
        str(repository),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_registry_would_take_server_json(tools: Path, tmp_path: Path) -> None:
    """By the schema that the file names and the registry's rules; the control has no exact version."""
    text = (ROOT / "server.json").read_text()
    (tmp_path / "server.json").write_text(text)
    good = _linted(tools, tmp_path)
    assert good.returncode == 0, good.stdout
    assert "Repo type: mcp-registry" in good.stdout
    (tmp_path / "server.json").write_text(text.replace(f'"{json.loads(text)["version"]}"', '"latest"'))
    bad = _linted(tools, tmp_path)
    assert bad.returncode == 1
    assert "'version' must identify one exact release" in bad.stdout


@pytest.mark.driver("bubblewrap")
async def test_a_bundle_is_packed_and_what_its_manifest_names_serves(place: Place, tmp_path: Path) -> None:
    """Anthropic's packer takes it and opens it; a client starts what it says, and finds the tools it lists."""
    packages = node.directory()
    node.run(packages, sys.executable, str(ROOT / "scripts/bundle.py"), str(tmp_path), seconds=120)
    (bundle,) = tmp_path.glob("*.mcpb")
    opened = place.root / "extensions/glovebox"
    for needed in ("extensions", "project", "profiles"):
        (place.root / needed).mkdir(parents=True)
    write_shipped(place.root / "profiles", "bubblewrap")  # an Engine whose image was built for others would do as well
    node.run(packages, "mcpb", "unpack", str(bundle), str(opened))
    manifest = json.loads((opened / "manifest.json").read_text())
    started = manifest["server"]["mcp_config"]
    assert started["command"] == "uv"
    stands_for = {"${__dirname}": str(opened), "${user_config.workspace}": str(place.root / "project")}
    arguments = [_filled(word, stands_for) for word in started["args"]]
    environment = place.env() | {"PATH": f"{place.tools}{os.pathsep}{os.environ['PATH']}"}
    empty = {"GLOVEBOX_DATA_DIR": str(place.root / "empty")}
    server = StdioServerParameters(command="uv", args=arguments, env=environment | empty, cwd=str(place.root))
    async with Client(server, read_timeout_seconds=200) as client:
        (said,) = (await client.call_tool("run_python", {"code": "6 * 7"})).content
    assert isinstance(said, TextContent)
    command = re.search(r"Run `(.+/glovebox) setup`", said.text)
    assert command is not None, said.text
    assert place.run(*shlex.split(command[1]), "--version").startswith("glovebox, version")
    assert not (place.root / "empty").exists()  # nothing was set up unasked
    assert started["args"][3].removeprefix("${__dirname}/") in manifest["long_description"]
    server = StdioServerParameters(command="uv", args=arguments, env=environment, cwd=str(place.root))
    async with Client(server, read_timeout_seconds=200) as client:
        offered = (await client.list_tools()).tools
        answered = await client.call_tool("run_python", {"code": "6 * 7"})
    assert {(tool.name, tool.title) for tool in offered} == {
        (tool["name"], tool["description"]) for tool in manifest["tools"]
    }
    assert (answered.structured_content or {})["value"] == "42"


def _filled(word: str, stands_for: dict[str, str]) -> str:
    for name, value in stands_for.items():
        word = word.replace(name, value)
    assert "${" not in word
    return word


@pytest.mark.driver("bubblewrap")
def test_claude_code_takes_the_plugin_and_connects(checkout: Path, runtime_dir: Path, tmp_path: Path) -> None:
    """Validated strictly, installed from the marketplace beside it; the control has no ``glovebox`` on its PATH."""
    packages = node.directory()
    project = tmp_path / "project"
    project.mkdir()

    elsewhere = [each for each in os.environ["PATH"].split(os.pathsep) if not (Path(each) / "glovebox").exists()]

    def claude(*arguments: str, path: str | None = None, here: Path = project) -> str:
        first = [str(packages / "node_modules/.bin"), *([] if path is None else [path])]
        return node.run(
            packages, "sh", "-c", 'cd "$1" && PATH=$2 && shift 2 && exec claude "$@"', "sh", str(here),
            os.pathsep.join([*first, *elsewhere]), *arguments,
            HOME=str(tmp_path), GLOVEBOX_DATA_DIR=str(runtime_dir), PYTHONPATH="",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1", DISABLE_AUTOUPDATER="1",
        )  # fmt: skip

    for manifest in (checkout, checkout / ".claude-plugin/plugin.json"):
        assert "Validation passed" in claude("plugin", "validate", "--strict", str(manifest))
    (add,) = re.findall(r"^claude (plugin marketplace add \S+)", (checkout / "README.md").read_text(), re.MULTILINE)
    claude(*add.split(), here=checkout)
    claude("plugin", "install", "glovebox@glovebox")
    (line,) = _servers(claude("mcp", "list", path=str(Path(sys.executable).parent)))
    assert line.endswith("✔ Connected"), line
    assert f"glovebox serve --workspace {project}" in line
    (line,) = _servers(claude("mcp", "list"))
    assert "Failed to connect" in line, line


def _servers(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("plugin:glovebox:")]
