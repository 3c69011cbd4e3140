"""Profiles that are changed while a server runs: a valid change is taken, any other changes nothing and is told."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.fixtures.audit_logs import log_lines
from tests.unit.test_lock import Scene as Locked

from glovebox_audit import chain
from glovebox_audit.place import AuditError
from glovebox_profiles.errors import ProfileError
from glovebox_profiles.load.loader import SHIPPED
from glovebox_server import app as apps
from glovebox_server.app import App, opened
from glovebox_server.calls import Principal
from glovebox_server.settings import Settings
from glovebox_server.upkeep.readiness import ReadinessProbe

ME = Principal(id="local:7", transport="cli")
TOOL = "list_workspace_files"
SECONDS = "wall_seconds = 10"


class Scene(Locked):
    """A server whose profiles are changed."""

    app: App

    @asynccontextmanager
    async def serving(self, **given: Any) -> AsyncIterator[App]:
        """Run one."""
        state, data = self.place / "state", self.place / "data"
        settings = Settings(profiles_dir=self.profiles, state_dir=state, data_dir=data, **given)
        async with opened(settings, "cli") as self.app:
            await self.look()
            yield self.app

    async def look(self, times: int = 2) -> None:
        """Let the server look at its files."""
        for _ in range(times):
            await self.app.in_force.look(self.app.audit, lambda _: None)

    @property
    def seconds(self) -> float:
        """What the next call may take."""
        return self.app.guards.rights_of(ME).profiles[TOOL].limits.wall_seconds

    def records(self) -> list[dict[str, Any]]:
        """What was recorded of changes."""
        found = map(chain.parse, log_lines(self.place / "state" / "audit"))
        kinds = ("profiles.", "policy.")
        return [
            {"kind": each.kind, **each.data} for each in found if each.kind.startswith(kinds) or "changed" in each.data
        ]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    tmp_path.chmod(0o700)
    monkeypatch.chdir(workspace)
    found = Scene(tmp_path)
    found.policy.unlink()
    return found


async def test_a_change_is_in_force_for_the_next_call_and_its_difference_on_record(scene: Scene) -> None:
    """What a call was decided with stays as it was; a comment, and a draft beside it, are no change (the control)."""
    async with scene.serving() as app:
        before = app.guards.rights_of(ME)
        scene.put(scene.profile, "# a comment\n" + scene.profile.read_text())
        await scene.look()
        assert (scene.records(), app.guards.rights_of(ME)) == ([], before)
        scene.replace(scene.profile, SECONDS, "wall_seconds = 20")
        await scene.look(1)  # a write may be under way
        assert scene.seconds == 10
        await scene.look(1)
        assert (scene.seconds, before.profiles[TOOL].limits.wall_seconds) == (20, 10)
        scene.put(scene.profiles / "read_workspace_file.toml", (SHIPPED / "read_workspace_file.toml").read_text())
        scene.replace(scene.profiles / "read_workspace_file.toml", SECONDS, "wall_seconds = 9")
        scene.replace(scene.profile, "wall_seconds = 20", "wall_seconds = 5")
        await scene.look()
        first, *others = scene.records()
        assert first["changed"] == {"limits.wall_seconds": "widening"}
        assert others == [
            {
                "kind": "profile.loaded", "tool": tool, "digest": app.profiles.digests[tool], "source": "operator",
                "unsafe": [], "changed": {"limits.wall_seconds": "narrowing"},
            }
            for tool in (TOOL, "read_workspace_file")
        ]  # fmt: skip
        assert app.guards.rights_of(ME).key != before.key  # lists of tools are cached by it


def _gone(scene: Scene) -> None:
    scene.profile.unlink()


def _write(old: str, new: str) -> Callable[[Scene], None]:
    return lambda scene: scene.replace(scene.profile, old, new)


BROKEN: dict[str, tuple[Callable[[Scene], None], str, str]] = {
    "no TOML": (_write(SECONDS, "wall_seconds ="), "", ""),
    "unknown key": (_write(SECONDS, f"{SECONDS}\nwall = 1"), "limits.wall", "unknown key"),
    "an example": (_write('expect = "allow"', 'expect = "deny"'), "example[0]", "but"),
    "of others": (lambda scene: scene.profile.chmod(0o666), "", "is writable by every user"),
    "misspelt": (lambda scene: scene.put(scene.profiles / "run-python.tml", ""), "", "is not in effect, and may be"),
    "an environment": (
        lambda scene: scene.put(
            scene.profiles / "run_python.toml",
            (SHIPPED / "run_python.toml").read_text() + '\n[python]\nenvironment = "nowhere"\n',
        ),
        "",
        "",
    ),
    "removed": (_gone, "", f"was removed, and calls of {TOOL} would be decided otherwise. Put it back, or restart"),
}


@pytest.mark.parametrize("kind", BROKEN)
async def test_a_broken_change_changes_nothing_and_is_told(scene: Scene, kind: str) -> None:
    """On record once, in /health and /ready, without a word of the reason; put right, it is in effect (the control)."""
    breaks, where, reason = BROKEN[kind]
    text = scene.profile.read_text()
    async with scene.serving() as app:
        now, state = app.in_force.now, scene.place / "state"
        probe = ReadinessProbe(scene.place / "data", state / "audit", app.audit, app.in_force)
        breaks(scene)
        await scene.look(4)
        assert app.in_force.now is now
        (record,) = scene.records()
        assert record == {
            "kind": "profiles.refused", "where": record["where"], "profiles_digest": app.profiles.digest,
        }  # fmt: skip
        assert where in record["where"]
        assert reason in (app.in_force.problem or ""), app.in_force.problem
        ready = await probe.look()
        assert (ready.profiles, ready.policy, ready.ready) == (False, True, False)
        for each in scene.profiles.iterdir():
            each.unlink()
        scene.put(scene.profile, text.replace(SECONDS, "wall_seconds = 7"))
        await scene.look()
        assert (scene.seconds, app.in_force.problem, app.in_force.unusable) == (7, None, None)
        assert (await probe.look()).profiles


async def test_a_policy_is_checked_with_the_profiles_that_are_to_be(scene: Scene) -> None:
    """Either is told as what is wrong; both may change at once, and are then one change."""
    scene.put(scene.policy, POLICY_OF.format(20))
    scene.replace(scene.profile, SECONDS, "wall_seconds = 30")
    async with scene.serving() as app:
        assert scene.seconds == 20
        scene.replace(scene.profile, "wall_seconds = 30", "wall_seconds = 15")  # now the role would widen it
        await scene.look()
        assert (scene.seconds, app.in_force.unusable) == (20, "policy")
        scene.put(scene.policy, POLICY_OF.format(12))
        await scene.look()
        assert (scene.seconds, app.in_force.unusable) == (12, None)
        assert [each["kind"] for each in scene.records()] == ["policy.refused", "profile.loaded", "policy.changed"]


POLICY_OF = f"""\
version = 1
default = "one"
[roles.one]
tools = ["{TOOL}"]
[roles.one.narrow.{TOOL}]
limits = {{{{ wall_seconds = {{}} }}}}
[[example]]
principal = "token:a"
call = {{{{ tool = "fetch_url", arguments = {{{{ url = "https://a.org" }}}} }}}}
expect = "deny"
"""


async def test_what_was_locked_and_signed_changes_with_its_lock_and_signature_alone(scene: Scene) -> None:
    """A lock without a new signature, or a signature without its lock, changes nothing; the control has both."""
    private, public = scene.key("operator")
    scene.locked()
    sign = ("profiles", "sign", scene.lock, "--key", private)
    assert scene.run(*sign, places=False).exit_code == 0
    async with scene.serving(locked=scene.lock, require_signed=public) as app:
        first = app.in_force.now.lock_digest
        scene.replace(scene.profile, SECONDS, "wall_seconds = 20")
        await scene.look()
        assert (scene.seconds, app.in_force.unusable) == (10, "profiles")
        assert "is 20.0, and 10.0 in" in (app.in_force.problem or "")
        assert (await anyio.to_thread.run_sync(scene.run, "profiles", "lock", scene.lock, "--force")).exit_code == 0
        await scene.look()
        assert (scene.seconds, "it is of another lock" in (app.in_force.problem or "")) == (10, True)
        assert scene.run(*sign, "--force", places=False).exit_code in (0, 2)
        scene.lock.with_name(f"{scene.lock.name}.sig").unlink(missing_ok=True)
        assert scene.run(*sign, places=False).exit_code == 0
        await scene.look()
        assert (scene.seconds, app.in_force.problem) == (20, None)
        (changed,) = [each for each in scene.records() if "changed" in each]
        assert changed["lock_digest"] == app.in_force.now.lock_digest != first


async def test_what_cannot_be_tried_or_recorded_is_not_in_force(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that cannot be imported are found before; the control is the same change once both can be done."""

    async def fails(_: object) -> None:
        raise ProfileError(scene.profile, None, "python.preload", "a module cannot be imported", "Take it out.")

    async with scene.serving() as app:
        append_all, works = app.audit.append_all, app.in_force.check
        app.in_force.check = fails
        scene.replace(scene.profile, SECONDS, "wall_seconds = 20")
        await scene.look()
        assert (scene.seconds, app.in_force.unusable, scene.records()[0]["where"]) == (10, "profiles", "python.preload")
        app.in_force.check = works

        async def full(*_: object) -> None:
            raise AuditError("record", "the disk is full", "Free space.")

        monkeypatch.setattr(app.audit, "append_all", full)
        scene.put(scene.profile, f"# again\n{scene.profile.read_text()}")
        await scene.look()
        assert (scene.seconds, "the disk is full" in (app.in_force.problem or "")) == (10, True)
        monkeypatch.setattr(app.audit, "append_all", append_all)
        await scene.look(1)
        assert (scene.seconds, app.in_force.problem) == (20, None)


async def test_without_profiles_of_its_own_a_server_looks_at_nothing(scene: Scene, monkeypatch: Any) -> None:
    """Nor says that its lists may change; the control is the server of the other tests."""
    async with scene.serving() as app:
        assert app.in_force.follows
    scene.profile.unlink()
    scene.profiles.rmdir()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(scene.place / "nothing"))
    async with opened(Settings(state_dir=scene.place / "state", data_dir=scene.place / "data"), "cli") as app:
        assert not app.in_force.follows
        with anyio.fail_after(5):
            await app.in_force.follow(app.audit, lambda _: None)  # it ends at once
        assert apps.profile_directories(app.settings) == [SHIPPED]
