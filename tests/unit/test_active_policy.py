"""A policy that is changed while a server runs: a valid change is taken, and any other changes nothing."""

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tests.fixtures.audit_logs import log_lines

from glovebox_audit.event import Event
from glovebox_audit.events import PolicyChanged, PolicyRefused
from glovebox_audit.log import AuditLog
from glovebox_audit.place import AuditError
from glovebox_profiles.errors import ProfileError
from glovebox_profiles.load.loader import SHIPPED, load
from glovebox_profiles.policy.model import WatchAction
from glovebox_sandboxes.contract.errors import MisnamedError
from glovebox_sandboxes.runtime import environments
from glovebox_server.calls import Principal
from glovebox_server.core.rights import ActivePolicy
from glovebox_server.settings import Settings
from glovebox_server.startup import governed
from glovebox_server.workspace import Workspace

ME = Principal(id="token:a", transport="http")
TEXT = """\
version = 1
default = "one"
[roles.one]
tools = ["list_workspace_files"]
[scopes]
"read" = "one"
[workflows]
nightly = "one"
[[example]]
principal = "token:a"
call = { tool = "fetch_url", arguments = { url = "https://a.org" } }
expect = "deny"
"""
WIDER = TEXT.replace("tools = [", 'tools = ["run_python", ')
BUDGET = '[[roles.one.budget]]\nname = "b"\nper = "principal"\nevery = "day"\ncalls = {}\n[scopes]'


class Scene:
    def __init__(self, place: Path, text: str = TEXT) -> None:
        self.path = place / "policy.toml"
        self.path.write_text(text)
        self.path.chmod(0o600)
        places: dict[str, Any] = {f"{name}_dir": place / name for name in ("profiles", "state", "data")}
        settings = Settings(policy=self.path, **places)
        profiles = load([SHIPPED], check_example=None)
        self.in_force = ActivePolicy(self.path, partial(governed, settings, profiles, Workspace(path=place)))
        self.events: list[Event] = []
        self.watched: list[Mapping[str, WatchAction]] = []
        self.fails = False
        self.tools_when_recorded: list[list[str]] = []

    async def append(self, event: Event) -> None:
        if self.fails:
            raise AuditError("record", "the disk is full", "Free space.")
        self.tools_when_recorded.append(self.tools)
        self.events.append(event)

    async def append_all(self, events: list[Event]) -> None:
        for each in events:
            await self.append(each)

    async def look(self, times: int = 2) -> None:
        for _ in range(times):
            await self.in_force.look(self, self.watched.append)  # type: ignore[arg-type]  # all it needs of a log

    def rename(self, text: str) -> None:
        new = self.path.with_name("new")
        new.write_text(text)
        new.chmod(0o600)
        new.replace(self.path)

    @property
    def tools(self) -> list[str]:
        return list(self.in_force.rights_of(ME).profiles)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    found = environments.load("default", environments.SHIPPED)
    required = "glovebox_server.startup.required"
    monkeypatch.setattr(required, lambda _, profiles: dict.fromkeys(profiles, found))
    tmp_path.chmod(0o700)
    return Scene(tmp_path)


@pytest.mark.parametrize("way", ["rename", "in place"])
async def test_what_widens_and_what_narrows_is_in_force_for_the_next_call(scene: Scene, way: str) -> None:
    """On record before; rights that a call has already stay as they were. The control is a change of a comment."""
    write = scene.rename if way == "rename" else scene.path.write_text
    await scene.look()
    assert (scene.events, scene.tools) == ([], ["list_workspace_files"])
    write(f"# the same\n{TEXT}")
    await scene.look()
    assert scene.events == []
    first = scene.in_force.rights_of(ME)
    write(WIDER.replace('"read" = "one"', '"write" = "one"'))
    await scene.look()
    wide = scene.in_force.rights_of(ME)
    assert scene.tools == ["list_workspace_files", "run_python"]
    assert scene.in_force.scopes == {"write": "one"}
    write(TEXT.replace("[workflows]", '[watch]\nsecrets = "stop"\n[workflows]'))
    await scene.look()
    assert scene.tools == ["list_workspace_files"]
    assert scene.watched == [{}, {"secrets": "stop"}]
    changed = [each for each in scene.events if isinstance(each, PolicyChanged)]
    assert [each.before for each in changed] == [first.policy_digest, wide.policy_digest]
    assert changed[0].policy_digest == wide.policy_digest
    assert changed[1].policy_digest == scene.in_force.rights_of(ME).policy_digest
    assert scene.tools_when_recorded == [["list_workspace_files"], ["list_workspace_files", "run_python"]]
    assert "run_python" in wide.profiles
    assert scene.in_force.problem is None


async def test_scopes_stand_for_what_the_policy_in_force_says(scene: Scene) -> None:
    """A call that waited since it came in is decided by the scopes of its token, not by the roles they gave then."""
    text = TEXT.replace('default = "one"\n', "").replace("[scopes]", '[roles.two]\ntools = ["run_python"]\n[scopes]')
    waiting = Principal(id="oauth:https://i.org#a", transport="http", roles=("two",), scopes=("more",))
    for scopes, tools in (('"more" = "two"', ["run_python"]), ('"read" = "two"', [])):
        scene.rename(text.replace('"read" = "one"', scopes))
        await scene.look()
        assert scene.in_force.problem is None
        assert list(scene.in_force.rights_of(waiting).profiles) == tools


@pytest.mark.parametrize(
    ("broken", "where", "reason"),
    [
        (WIDER.replace('default = "one"', 'default = "on"'), "2: default", 'there is no role "on"'),
        (
            WIDER.replace('"deny"', '"allow"'),
            "9: example[0]",
            "expects allow, but the policy answers deny by role.tools",
        ),
        (WIDER[: WIDER.index("[[example]]")], "example", "there is none, so the file may have lost its end"),
        ("\0", "1", ""),
        ("[" * 50_000, "1", ""),
        (WIDER.replace("nightly", "weekly"), "", 'the policy has no workflow "nightly"'),
        (WIDER.replace("[scopes]", BUDGET.format(1)), "roles", "has the first budget or rate"),
        (
            WIDER.replace("[roles.one]", '[roles.one]\nworkspace = "/nowhere"'),
            "roles.one.workspace",
            "/nowhere is not a directory",
        ),
        (None, "", "No such file"),
    ],
)
async def test_a_change_that_is_not_valid_changes_nothing_and_is_told(
    scene: Scene, broken: str | None, where: str, reason: str
) -> None:
    """Once on record and in /health; with the file put right it is in effect, and nothing is told (control)."""
    scene.in_force.require("nightly")
    before = scene.in_force.now
    if broken is None:
        scene.path.unlink()
    else:
        scene.rename(broken)
    await scene.look(5)
    (refused,) = scene.events
    assert isinstance(refused, PolicyRefused)
    assert refused.where == where
    assert scene.in_force.now is before
    assert scene.in_force.scopes == {"read": "one"}
    assert reason in (scene.in_force.problem or "")
    assert scene.in_force.problem
    scene.rename(WIDER)
    await scene.look()
    assert len(scene.events) == 2
    assert "run_python" in scene.tools
    assert not scene.in_force.problem


async def test_a_file_that_others_could_write_is_not_taken(scene: Scene) -> None:
    """As on start; the control is the same file closed."""
    scene.rename(WIDER)
    scene.path.chmod(0o666)
    await scene.look()
    assert [type(each) for each in scene.events] == [PolicyRefused]
    assert "run_python" not in scene.tools
    scene.path.chmod(0o600)
    await scene.look()
    assert "run_python" in scene.tools


async def test_a_file_that_is_being_written_is_not_read(scene: Scene) -> None:
    """Whatever stands there between two looks: nothing is taken, nor refused, until it rests."""
    halves = [WIDER[:length] for length in range(len(WIDER) // 2, len(WIDER), 20)]
    with scene.path.open("w") as file:
        file.truncate()
        for half in halves:
            file.seek(0)
            file.write(half)
            file.flush()
            await scene.look(1)
            assert (scene.events, scene.tools) == ([], ["list_workspace_files"])
        file.seek(0)
        file.write(WIDER)
    await scene.look()
    assert [type(each) for each in scene.events] == [PolicyChanged]
    assert "run_python" in scene.tools


async def test_what_cannot_be_recorded_is_not_in_force(scene: Scene) -> None:
    scene.fails = True
    scene.rename(WIDER)
    await scene.look(3)
    assert (scene.events, scene.tools) == ([], ["list_workspace_files"])
    assert "the disk is full" in (scene.in_force.problem or "")
    scene.fails = False
    await scene.look(1)
    assert "run_python" in scene.tools
    assert scene.in_force.problem is None


async def test_whatever_fails_in_reading_it_is_told_also_where_that_cannot_be_recorded(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """Only what nobody foresaw is logged with its traceback; the one before stays."""
    for problem in (MisnamedError("serve /", "it is not a workspace", "Name another."), RuntimeError("odd")):
        read, scene.in_force._read = scene.in_force._read, Mock(side_effect=problem)
        scene.fails = True
        scene.rename(f"# {problem}\n{TEXT}")
        await scene.look()
        assert (scene.in_force.problem, scene.tools) == (str(problem), ["list_workspace_files"])
        assert "That is not recorded: record: the disk is full." in caplog.messages[-1]
        scene.in_force._read, scene.fails = read, False
    assert [bool(each.exc_info) for each in caplog.records] == [False, False, True, False, False]
    scene.rename(TEXT.replace("[scopes]", '[roles.two]\ntools = []\n[scopes]\n"all" = "two"'))
    await scene.look()
    assert '[scopes] has "all" before "read"' in caplog.messages[-1]


async def test_budgets_change_where_there_were_some(tmp_path: Path, scene: Scene) -> None:
    budgeted = Scene(tmp_path, TEXT.replace("[scopes]", BUDGET.format(1)))
    budgeted.rename(TEXT.replace("[scopes]", BUDGET.format(2)))
    await budgeted.look()
    assert [each.calls for each in budgeted.in_force.rights_of(ME).budgets] == [2]
    budgeted.rename(TEXT)
    await budgeted.look()
    assert budgeted.in_force.rights_of(ME).budgets == ()
    budgeted.rename(TEXT.replace("[scopes]", BUDGET.format(3)))
    await budgeted.look()
    assert [each.calls for each in budgeted.in_force.rights_of(ME).budgets] == [3]
    assert scene.in_force.problem is None


async def test_the_servers_workflow_has_to_be_known_from_the_start(scene: Scene) -> None:
    """And later, as above; the control is none."""
    with pytest.raises(ProfileError, match='the policy has no workflow "weekly"'):
        scene.in_force.require("weekly")
    scene.in_force.require(None)
    scene.rename(WIDER.replace("nightly", "weekly"))
    await scene.look()
    assert "run_python" in scene.tools


async def test_a_change_is_in_a_real_log(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    async with AuditLog.open(tmp_path / "state" / "audit", "s1") as audit:
        scene.rename(WIDER)
        for _ in range(2):
            await scene.in_force.look(audit, scene.watched.append)
    (record,) = [json.loads(line) for line in log_lines(tmp_path / "state" / "audit")][-1:]
    assert record["kind"] == "policy.changed"
    assert record["data"]["policy_digest"] == scene.in_force.now.digest
    assert os.path.lexists(scene.path)
