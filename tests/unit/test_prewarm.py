"""What is prepared before the first call: the shipped profiles, a pool that only listens."""

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from glovebox_profiles.load.loader import SHIPPED, load
from glovebox_sandboxes.contract.base import SandboxSpec
from glovebox_sandboxes.contract.errors import UnsupportedSpecError
from glovebox_sandboxes.pool.pool import SandboxProvider
from glovebox_sandboxes.worker.queue import IDLE_SECONDS
from glovebox_server import startup
from glovebox_server.app import check_example, prepare_in_force, prepare_masked
from glovebox_server.core.rights import ActivePolicy, Governed, Rights, same_rights
from glovebox_server.guards.registry import GuardSet
from glovebox_server.guards.secret_files.hiding import Hiding


class Host:
    """Drivers and pool in one: one driver, whose plans are their specs."""

    def __init__(self, *, usable: bool) -> None:
        self.usable = usable
        self.prepared: list[SandboxSpec] = []
        self.kept: set[str] | None = None

    async def choose(self, _names: tuple[str, ...], spec: SandboxSpec) -> tuple[str, SandboxSpec]:
        """The driver."""
        if not self.usable:
            raise UnsupportedSpecError("isolation", "none of this test's", "")
        return "driver", spec

    def keep_only(self, specs: Iterable[SandboxSpec]) -> None:
        """Remember the workspaces of those that are kept."""
        self.kept = {each.mounts[0].source for each in specs if each.mounts}

    async def keep(self, _driver: str, plan: SandboxSpec) -> None:
        """Remember it."""
        self.prepared.append(plan)


PROFILES = load([SHIPPED], check_example=check_example)


def guards(host: Host) -> GuardSet:
    """Return what is asked of guards here."""
    sandboxes = SandboxProvider(drivers=cast("Any", host), pool=cast("Any", host))
    return cast("GuardSet", SimpleNamespace(sandboxes=sandboxes, watch=None, hiding=Hiding()))


@pytest.mark.parametrize("usable", [True, False])
async def test_those_without_modules_come_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, usable: bool
) -> None:
    """Of the profiles that preload, each of both kinds. Where a profile cannot be enforced, its calls hear of it."""
    host = Host(usable=usable)
    before: list[bool] = []

    async def slept(seconds: float) -> None:
        assert seconds == startup.IMPORTS_AFTER_SECONDS
        before.extend(bool(each.preload) for each in host.prepared)

    monkeypatch.setattr(anyio, "sleep", slept)
    await startup.prepare_sandboxes([Rights(profiles=PROFILES, workspace=tmp_path)], guards(host))
    modules = PROFILES.get("run_python")
    assert modules is not None
    assert [each.preload for each in host.prepared] == ([(), modules.python.preload] if usable else [])
    assert before == ([False] if usable else [])
    assert len({each.without_preload() for each in host.prepared}) == usable


async def test_sandboxes_of_the_first_roles_are_prepared_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A role with another workspace needs another sandbox, the same one twice none; of many only the first have any."""

    async def slept(_seconds: float) -> None:
        return

    monkeypatch.setattr(anyio, "sleep", slept)
    host = Host(usable=True)
    places = [tmp_path, tmp_path, *(tmp_path / str(number) for number in range(2 * startup.MAX_PREPARED))]
    await startup.prepare_sandboxes([Rights(profiles=PROFILES, workspace=place) for place in places], guards(host))
    sources = [each.mounts[0].source for each in host.prepared if each.preload]
    assert sources == [str(place) for place in places[1 : startup.MAX_PREPARED + 1]]


async def test_what_a_changed_policy_leaves_is_prepared_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a call, and what is ready for others is dropped; the control is what was prepared before the change."""
    monkeypatch.setattr(startup, "IMPORTS_AFTER_SECONDS", 0)
    host = Host(usable=True)

    def leaves(name: str) -> Governed:
        rights = Rights(profiles=PROFILES, workspace=tmp_path / name)
        return same_rights(rights)

    def sources() -> list[str]:
        return [each.mounts[0].source for each in host.prepared if each.preload]

    in_force = ActivePolicy(None, lambda: leaves("one"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(prepare_in_force, in_force, guards(host))
        while len(sources()) < 1:  # noqa: ASYNC110 - a thread looks at the workspace meanwhile
            await anyio.sleep(0.01)
        assert (sources(), host.kept) == ([str(tmp_path / "one")], None)
        in_force._take(leaves("two"))
        while len(sources()) < 2:  # noqa: ASYNC110 - as above
            await anyio.sleep(0.01)
        assert sources() == [str(tmp_path / "one"), str(tmp_path / "two")]
        assert host.kept == {str(tmp_path / "two")}
        tasks.cancel_scope.cancel()


async def test_what_is_hidden_by_now_is_prepared_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a call, as long as any were made lately; the controls: an ordinary file, and a server nobody calls."""
    monkeypatch.setattr(startup, "IMPORTS_AFTER_SECONDS", 0)
    host = Host(usable=True)
    parts = guards(host)
    rights = Rights(profiles=PROFILES, workspace=tmp_path)
    in_force = ActivePolicy(None, lambda: same_rights(rights))

    async def prepared(*masks: str) -> None:
        while not host.prepared or host.prepared[-1].masks != masks:  # noqa: ASYNC110 - a thread looks meanwhile
            await anyio.sleep(0.01)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(prepare_in_force, in_force, parts)
        tasks.start_soon(prepare_masked, in_force, parts)
        await prepared()
        (tmp_path / "a.txt").touch()
        (tmp_path / ".env").touch()
        await prepared(".env")
        assert {each.masks for each in host.prepared} == {(), (".env",)}
        parts.hiding.used_at -= 2 * IDLE_SECONDS
        changed = parts.hiding.changed
        (tmp_path / ".netrc").touch()
        await changed.wait()
        await anyio.sleep(0.1)
        # Not by their number: what was prepared for the change before may come once more.
        assert {spec.masks for spec in host.prepared} == {(), (".env",)}
        tasks.cancel_scope.cancel()
    parts.hiding.close()
