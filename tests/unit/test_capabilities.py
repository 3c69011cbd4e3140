"""The capability manifest: true of this server, documented field by field, and the source of the words of refusals."""

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from click.testing import CliRunner
from tests.interaction.served import served
from tests.repo.files import ROOT

from glovebox_profiles.errors import ProfileError
from glovebox_profiles.features import FEATURES, Feature
from glovebox_profiles.load.loader import load, parse
from glovebox_sandboxes.contract.base import DEFAULT, Capabilities, Missing
from glovebox_sandboxes.contract.errors import UnsupportedSpecError
from glovebox_sandboxes.drivers import registry
from glovebox_sandboxes.runtime import environments
from glovebox_server import app as apps
from glovebox_server.cli.main import main
from glovebox_server.core.rights import Rights
from glovebox_server.mcp import catalogue
from glovebox_server.mcp import catalogue as capabilities
from glovebox_server.settings import Settings
from glovebox_server.tools import TOOLS

UNSUPPORTED = [each for each in FEATURES if each.status == "unsupported" and each.key != "approval"]


TABLE = ROOT / "docs/use/capabilities.csv"


def documented() -> list[str]:
    with TABLE.open(newline="") as table:
        rows = list(csv.DictReader(table))
    assert all(row["type"] and row["what"] for row in rows)
    return [row["field"] for row in rows]


def paths(value: Any, prefix: str = "") -> Iterator[str]:
    for name, inner in value.items():
        path = f"{prefix}{name}"
        if path == "tools[].limits":
            yield from paths(next(iter(inner.values())), f"{path}.*.")
        elif isinstance(inner, list):
            yield from paths(inner[0], f"{path}[].")
        elif isinstance(inner, Mapping) and path not in {"network_modes", "drivers[].limits"}:
            yield from paths(inner, f"{path}.")
        else:
            yield path


def _profile(feature: Feature) -> str:
    section, _, key = feature.key.rpartition(".")
    head = ['tool = "run_python"', 'description = "x"', 'risk = "low"']
    isolation = f'["{feature.value}"]' if feature.key == "isolation" else '["bubblewrap"]'
    head.append(f"isolation = {isolation}")
    return "\n".join([*head, *([f"[{section}]", f'{key} = "{feature.value}"'] if section else [])]) + "\n"


def found_feature(key: str, value: str) -> Feature:
    return next(each for each in FEATURES if (each.key, each.value) == (key, value))


@pytest.mark.parametrize("feature", UNSUPPORTED, ids=lambda each: f"{each.key}={each.value}")
def test_a_profile_that_asks_for_what_is_not_there_is_refused_in_the_manifests_words(feature: Feature) -> None:
    """Reason and way out are the manifest's, word for word."""
    with pytest.raises(ProfileError) as caught:
        parse(_profile(feature).encode(), Path("run_python.toml"))
    assert caught.value.key.startswith(feature.key)
    assert feature.reason in str(caught.value)
    assert feature.instead.rstrip(".") in str(caught.value)


def test_what_is_experimental_loads() -> None:
    """The control: the same profile with a value that is there."""
    assert parse(_profile(found_feature("isolation", "gvisor")).encode(), Path("run_python.toml"))


def _loaded(directory: Path, **texts: str) -> Any:
    for tool, text in texts.items():
        (directory / f"{tool}.toml").write_text(text)
    return load([directory], check_example=apps.check_example)


class Nothing(registry.Drivers):
    def __init__(self) -> None:
        pass

    async def get(self, _name: str) -> Any:
        class Driver:
            capabilities = CAPABILITIES

        return Driver()

    async def choose(self, _names: tuple[str, ...], _spec: Any, _waits: Any = None) -> Any:
        raise UnsupportedSpecError("isolation", "nothing works, see /etc/secret-place", "Fix it.")


MISSING = (Missing(what="no /usr/bin/bwrap", fix="apt-get install bubblewrap", fatal=True),)
CAPABILITIES = Capabilities(
    driver="bubblewrap", level="namespaces", version="", limits={"pids": "rlimit"}, missing=MISSING
)


async def test_a_host_where_nothing_works_says_so_for_each_tool(tmp_path: Path) -> None:
    """Refused beforehand in the words a call gets; nothing is said to be enforced; no path of the host is named."""
    asking = 'tool = "fetch_url"\ndescription = "x"\nrisk = "low"\nisolation = ["docker"]\n'
    allowed = asking.replace("fetch_url", "run_python") + 'approval = "none"\n'
    profiles = _loaded(tmp_path, fetch_url=asking, run_python=allowed)
    found = await capabilities.build_manifest(
        tools=TOOLS,
        rights=Rights(profiles=profiles, workspace=tmp_path),
        environments={tool: environments.load(DEFAULT, tmp_path) for tool in profiles},
        drivers=Nothing(),
        version="0",
    )
    tools = {tool["name"]: tool for tool in found["tools"]}
    assert not any(tool["runs"] for tool in found["tools"])
    assert tools["fetch_url"]["refused"].startswith("isolation: nothing works, see [host path]")
    assert tools["run_python"]["refused"].startswith("isolation: nothing works, see [host path]")
    assert tools["search_workspace"]["refused"].startswith("There is no profile")
    assert tools["search_workspace"]["profile_digest"] == ""
    assert {limit["by"] for limit in tools["run_python"]["limits"].values()} == {""}
    assert all(driver["limits"] == {} for driver in found["drivers"])
    assert "/usr/bin" not in json.dumps(found)
    assert list(paths(found)) == documented()
    assert found["tools_digest"] == catalogue.digest_tools(catalogue.list_tools(TOOLS.values(), profiles))


@pytest.mark.driver("bubblewrap")
def test_the_command_tells_what_calls_get_here(tmp_path: Path) -> None:
    """Every shipped tool runs, and each of its limits has a mechanism; the JSON has exactly the fields there are."""
    result = CliRunner().invoke(main, ["capabilities", "--json", "--workspace", str(tmp_path)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert list(found) == list(dict.fromkeys(path.partition(".")[0].removesuffix("[]") for path in documented()))
    assert {each["name"] for each in found["tools"]} == set(TOOLS) - {"propose_changes"}
    assert all(each["runs"] and each["driver"] == "bubblewrap" for each in found["tools"])
    assert all(limit["by"] and limit["value"] for each in found["tools"] for limit in each["limits"].values())
    assert str(tmp_path) not in result.stdout
    assert str(Settings().data_dir) not in result.stdout


def test_a_wrong_profile_ends_the_command_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "run_python.toml").write_text(_profile(found_feature("network.mode", "proxied")))
    result = CliRunner().invoke(main, ["capabilities", "--profiles-dir", str(tmp_path)])
    assert result.exit_code == 2
    assert "run_python.toml:6: network.mode" in result.output


@pytest.mark.parametrize("era", ["legacy", "modern"])
async def test_the_manifest_is_a_resource(era: Any, tmp_path: Path) -> None:
    async with served(tmp_path, "stdio") as server, server.client("stdio", era) as client:
        listed = (await client.list_resources()).resources
        assert [str(each.uri) for each in listed] == [capabilities.CAPABILITIES_URI, "glovebox://budget"]
        (content,) = (await client.read_resource(capabilities.CAPABILITIES_URI)).contents
    assert isinstance(content, types.TextResourceContents)
    assert json.loads(content.text)["format"] == capabilities.FORMAT
