"""The list of tools every model pays for."""

import json
from collections.abc import Mapping
from pathlib import Path

from glovebox_profiles.load.loader import SHIPPED, load
from glovebox_profiles.model import Profile
from glovebox_sandboxes.runtime import environments
from glovebox_server.mcp import catalogue
from glovebox_server.tools import TOOLS

#: What issue-sized models are promised: bytes of JSON, and tokens by the usual four bytes each.
MAX_BYTES = 6_000
MAX_TOKENS = 1_500
PROFILES = load([SHIPPED], check_example=None)


def _json() -> str:
    tools = [
        tool.model_dump(by_alias=True, mode="json", exclude_none=True)
        for tool in catalogue.listed(TOOLS.values(), PROFILES)
    ]
    return json.dumps({"tools": tools}, separators=(",", ":"))


def test_the_whole_list_is_small() -> None:
    """Every schema, description and hint of every tool together."""
    size = len(_json().encode())
    assert size < MAX_BYTES
    assert size / 4 < MAX_TOKENS


def test_the_list_is_the_same_every_time() -> None:
    """M9: same order and same digest, whatever order the tools come in."""
    forwards = catalogue.listed(TOOLS.values(), PROFILES)
    backwards = catalogue.listed(reversed(list(TOOLS.values())), PROFILES)
    assert forwards == backwards
    assert catalogue.digest(forwards) == catalogue.digest(backwards)
    assert [tool.name for tool in forwards] == sorted(PROFILES)
    if len(forwards) > 1:
        assert catalogue.digest(forwards[1:]) != catalogue.digest(forwards)


def test_every_tool_refuses_what_it_does_not_know_and_says_what_it_is() -> None:
    """M4: no schema is open; every tool has a title, a description, hints and an output schema."""
    for tool in catalogue.listed(TOOLS.values(), PROFILES):
        assert tool.input_schema["additionalProperties"] is False
        assert tool.output_schema is not None
        assert tool.title
        assert tool.description
        assert tool.annotations is not None
        assert tool.annotations.read_only_hint is True
        assert tool.annotations.destructive_hint is False


def test_what_changes_files_is_shown_where_it_has_a_profile_and_says_so() -> None:
    """No list has it without one; no hint calls it harmless."""
    assert catalogue.listed([TOOLS["propose_changes"]], PROFILES) == []
    (shown,) = catalogue.listed([TOOLS["propose_changes"]], {"propose_changes": PROFILES["run_python"]})
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
        (tool,) = catalogue.listed([TOOLS["run_python"]], profiles)
        found.append(tool.input_schema["properties"]["timeout_seconds"].get("maximum"))
    assert found == [30, 45, None]


def test_a_role_that_narrows_the_packages_is_told_those_it_has() -> None:
    """The default's, where its profile names that; else what the tool has for everybody (control)."""
    science = environments.load("science", environments.SHIPPED)
    wide = PROFILES["run_python"].model_copy(
        update={"python": PROFILES["run_python"].python.model_copy(update={"environment": "science"})}
    )
    for profile, name in ((wide, "science"), (PROFILES["run_python"], "default")):
        found = catalogue.of_profiles({"run_python": profile}, {"run_python": science})
        assert found["run_python"].name == name
