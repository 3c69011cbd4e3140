"""What policy says before anything starts: each rule with the nearest call it lets through, and their order."""

from typing import Any

import pytest

from glovebox_profiles.load.loader import SHIPPED, load
from glovebox_profiles.model import FileRules, Network, Profile, digest
from glovebox_server.app import check_example
from glovebox_server.core.call import decide
from glovebox_server.tools import TOOLS
from glovebox_server.tools.base import Tool

PROFILES = load([SHIPPED], check_example=check_example)
PYTHON: dict[str, Any] = {"code": "1", "inputs": (), "timeout_seconds": None}
FETCH: dict[str, Any] = {"url": "https://docs.python.org/3/", "method": "GET"}


def profile(tool: str) -> Profile:
    """The shipped profile of a tool."""
    found = PROFILES.get(tool)
    assert found is not None
    return found


def rule(tool: str, arguments: dict[str, Any], changed: Profile | None = None) -> tuple[str, str]:
    """Effect and rule for one call."""
    decision = decide(TOOLS[tool], arguments, changed or profile(tool))
    assert decision.reason
    assert (decision.hint == "") == (decision.effect == "allow")
    return decision.effect, decision.rule


def test_without_a_profile_nothing_is_allowed() -> None:
    """Whatever the tool and the arguments; else a decision names the profile, by digest."""
    for tool in TOOLS.values():
        decision = decide(tool, {}, None)
        assert (decision.effect, decision.rule, decision.profile_digest) == ("deny", "profile.missing", "")
        assert tool.name in decision.reason
    assert decide(TOOLS["run_python"], PYTHON, profile("run_python")).profile_digest == digest(profile("run_python"))
    assert decide(TOOLS["run_python"], PYTHON, profile("run_python"), "sha256:known").profile_digest == "sha256:known"


@pytest.mark.parametrize(("seconds", "wanted"), [(None, "allow"), (0.1, "allow"), (30.0, "allow"), (30.001, "deny")])
def test_a_call_may_ask_for_less_time_and_not_for_more(seconds: float | None, wanted: str) -> None:
    """M4: an argument can only narrow."""
    effect, name = rule("run_python", {**PYTHON, "timeout_seconds": seconds})
    assert effect == wanted
    assert name == ("limits.wall_seconds" if wanted == "deny" else "allow")


def test_inputs_need_a_profile_that_takes_them() -> None:
    """The same call, with and without the grant."""
    python = profile("run_python")
    closed = python.model_copy(update={"files": python.files.model_copy(update={"inputs": False})})
    arguments = {**PYTHON, "inputs": ("artifact://x",)}
    assert rule("run_python", arguments) == ("allow", "allow")
    assert rule("run_python", arguments, closed) == ("deny", "files.inputs")
    assert rule("run_python", PYTHON, closed) == ("allow", "allow")


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, ("allow", "allow")),
        ({"url": "https://docs.python.org.evil.example/"}, ("deny", "network.allow")),
        ({"url": "https://127.0.0.1/"}, ("deny", "network.allow")),
        ({"url": "http://docs.python.org:81/"}, ("deny", "network.allow")),
        ({"url": "not a url"}, ("deny", "network.allow")),
        ({"url": "https://docs.python.org@evil.example/"}, ("deny", "network.allow")),
        ({"method": "POST"}, ("deny", "network.allow")),
    ],
)
def test_a_fetch_is_held_against_the_profiles_list(changes: dict[str, Any], wanted: tuple[str, str]) -> None:
    """Before anything starts; the gate decides each connection again."""
    assert rule("fetch_url", {**FETCH, **changes}) == wanted


def test_a_profile_without_network_denies_every_fetch() -> None:
    """Also where a list was forgotten in it."""
    fetch = profile("fetch_url")
    closed = fetch.model_copy(update={"network": fetch.network.model_copy(update={"mode": "none"})})
    assert rule("fetch_url", FETCH, closed) == ("deny", "network.mode")
    empty = fetch.model_copy(update={"network": fetch.network.model_copy(update={"allow": ()})})
    assert rule("fetch_url", FETCH, empty) == ("deny", "network.allow")


@pytest.mark.parametrize("tool", [tool for tool in TOOLS.values() if tool.needs], ids=lambda tool: tool.name)
def test_what_a_tool_needs_must_be_granted(tool: Tool) -> None:
    """With nothing granted the first need is the reason; a tool without needs is let through (control)."""
    least = profile(tool.name).model_copy(update={"files": FileRules(), "network": Network()})
    decision = decide(tool, FETCH, least)
    key = {"network": "network.mode", "workspace": "files.workspace"}[tool.needs[0]]
    assert (decision.effect, decision.rule) == ("deny", key)
    assert decision.reason == f"This tool's profile grants no {tool.needs[0]}."
    assert rule("run_python", PYTHON, profile("run_python").model_copy(update={"files": FileRules()})) == (
        "allow",
        "allow",
    )


def test_asking_is_not_allowing_and_never_hides_a_denial() -> None:
    """Approval is the last question: what is denied is not asked."""
    asking = profile("run_python").model_copy(update={"approval": "ask"})
    assert rule("run_python", PYTHON, asking) == ("ask", "approval.ask")
    assert rule("run_python", {**PYTHON, "timeout_seconds": 31.0}, asking) == ("deny", "limits.wall_seconds")


def test_workspace_tools_are_allowed_by_their_profiles() -> None:
    """The mount is their boundary, so no path is judged here."""
    for name in ("read_workspace_file", "list_workspace_files", "search_workspace"):
        assert rule(name, {"path": "../../etc/shadow", "pattern": "x"}) == ("allow", "allow")
