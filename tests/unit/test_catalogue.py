"""The list of tools every model pays for."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from glovebox_profiles.load.loader import SHIPPED, load, parse
from glovebox_profiles.load.reading import set_value
from glovebox_profiles.model import Profile
from glovebox_sandboxes.runtime import environments
from glovebox_server.mcp import catalogue
from glovebox_server.tools import TOOLS

#: What issue-sized models are promised: bytes of JSON, and tokens by the usual four bytes each.
MAX_BYTES = 6_000
MAX_TOKENS = 1_500
PROFILES = load([SHIPPED], check_example=None)


def _json() -> str:
    listed = catalogue.list_tools(TOOLS.values(), PROFILES)
    tools = [tool.model_dump(by_alias=True, mode="json", exclude_none=True) for tool in listed]
    return json.dumps({"tools": tools}, separators=(",", ":"))


def test_the_list_is_small_and_the_same_every_time() -> None:
    """M9: same order and same digest, whatever order the tools come in."""
    forwards = catalogue.list_tools(TOOLS.values(), PROFILES)
    backwards = catalogue.list_tools(reversed(list(TOOLS.values())), PROFILES)
    assert forwards == backwards
    assert catalogue.digest_tools(forwards) == catalogue.digest_tools(backwards)
    assert [tool.name for tool in forwards] == sorted(PROFILES)
    if len(forwards) > 1:
        assert catalogue.digest_tools(forwards[1:]) != catalogue.digest_tools(forwards)
    size = len(_json().encode())
    assert size < MAX_BYTES
    assert size / 4 < MAX_TOKENS


def test_every_tool_refuses_what_it_does_not_know_and_says_what_it_is() -> None:
    """M4: no schema is open. What changes files is in no list without a profile, and no hint calls it harmless."""
    for tool in catalogue.list_tools(TOOLS.values(), PROFILES):
        assert tool.input_schema["additionalProperties"] is False
        assert tool.output_schema is not None
        assert tool.title
        assert tool.description
        assert tool.annotations is not None
        assert tool.annotations.read_only_hint is True
        assert tool.annotations.destructive_hint is False
    assert catalogue.list_tools([TOOLS["propose_changes"]], PROFILES) == []
    (shown,) = catalogue.list_tools([TOOLS["propose_changes"]], {"propose_changes": PROFILES["run_python"]})
    hints = shown.annotations
    assert hints is not None
    assert (hints.read_only_hint, hints.destructive_hint, hints.idempotent_hint) == (False, True, False)


def test_the_longest_time_is_the_one_of_the_profile_in_force(tmp_path: Path) -> None:
    """The shipped one, an operator's that replaces it, and none at all; a client refuses what is longer by itself."""
    (tmp_path / "run_python.toml").write_text(
        (SHIPPED / "run_python.toml").read_text().replace("wall_seconds = 30", "wall_seconds = 45")
    )
    own = load([SHIPPED, tmp_path], check_example=None)
    found = []
    in_force: tuple[Mapping[str, Profile], ...] = (PROFILES, own, {})
    for profiles in in_force:
        (tool,) = catalogue.list_tools([TOOLS["run_python"]], profiles)
        found.append(tool.input_schema["properties"]["timeout_seconds"].get("maximum"))
    assert found == [30, 45, None]


def test_a_role_that_narrows_the_packages_is_told_those_it_has() -> None:
    """The default's, where its profile names that; else what the tool has for everybody (control)."""
    science = environments.load("science", environments.SHIPPED)
    wide = PROFILES["run_python"].model_copy(
        update={"python": PROFILES["run_python"].python.model_copy(update={"environment": "science"})}
    )
    for profile, name in ((wide, "science"), (PROFILES["run_python"], "default")):
        found = catalogue.environments_of({"run_python": profile}, {"run_python": science})
        assert found["run_python"].name == name


def test_what_needs_a_network_is_named_where_a_profile_has_one() -> None:
    """The control is what needs none, which is named both times."""
    shipped = PROFILES["run_python"]
    online = shipped.model_copy(update={"network": shipped.network.model_copy(update={"mode": "egress"})})
    has = {"run_python": environments.load("science", environments.SHIPPED)}
    for profile, names in ((shipped, False), (online, True)):
        (tool,) = catalogue.list_tools([TOOLS["run_python"]], {"run_python": profile}, has)
        assert ("requests" in (tool.description or "")) == names
        assert "pypdf" in (tool.description or "")


def described(tool: str, *more: str) -> str:
    data = (SHIPPED / f"{tool}.toml").read_bytes()
    for change in more:
        key, _, value = change.partition("=")
        data = set_value(data, Path(f"{tool}.toml"), tuple(key.split(".")), value)
    (entry,) = catalogue.list_tools([TOOLS[tool]], {tool: parse(data, Path(f"{tool}.toml"))})
    return entry.description or ""


@pytest.mark.parametrize(
    ("tool", "changes", "said", "instead_of"),
    [
        ("run_python", ["limits.wall_seconds=120"], "At most 120 s, 1 GiB of memory.", "At most 30 s, 1 GiB"),
        ("run_python", ["limits.memory=2 GiB"], "At most 30 s, 2 GiB of memory.", "At most 30 s, 1 GiB"),
        ("run_python", ["files.workspace=overlay"], "its changes come back as a patch.", "read-only."),
        ("run_python", ["files.workspace=none"], "No workspace.", "in /workspace"),
        ("run_python", ["files.output=false"], "No files come back.", "Files in /output come back"),
        ("run_python", ["files.inputs=false"], "It takes no inputs.", ""),
        ("run_python", ["approval=ask"], "A person must approve each call.", ""),
        ("run_python", ["network.mode=egress", 'network.allow=[{ host = "*.a.org" }, { host = "b.org" }]'],
         "Network: *.a.org, b.org.", "No network."),
        ("fetch_url", ['network.allow=[{ host = "a.org", paths = ["/x"] }, { host = "a.org", paths = ["/y"] }]'],
         "Network: a.org.", "Network: docs.python.org"),
        ("read_workspace_file", ["files.workspace=none"], "Its profile grants no workspace.", ""),
    ],
)  # fmt: skip
def test_a_description_says_what_the_profile_grants(tool: str, changes: list[str], said: str, instead_of: str) -> None:
    """The sentence of the changed key replaces the one of the shipped profile, which is the control."""
    before, after = described(tool), described(tool, *changes)
    assert (said in before, said in after) == (False, True)
    assert (instead_of in before, instead_of in after) == (True, not instead_of)


def test_a_description_is_short_whatever_the_profile_allows() -> None:
    hosts = ", ".join(f'{{ host = "host-{number}.example.org" }}' for number in range(100))
    network = "network.mode=egress", f"network.allow=[{hosts}]"
    text = described("run_python", *network, "approval=ask", "files.workspace=overlay")
    hosts = ", ".join(f"host-{number}.example.org" for number in range(4))
    assert f"Network: {hosts} and 96 more." in text
    assert len(text) < 800
