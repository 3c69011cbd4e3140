"""Hiding secrets of the workspace from a program: what comes between two looks, and what is held back meanwhile."""

import threading
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from tests.escape.test_hidden_from_programs import indexed
from tests.fixtures.specs import SPEC

from glovebox_sandboxes.contract.base import WORKSPACE, Mount, SandboxSpec
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_sandboxes.hidden.index import SecretFileGuard, SecretFileIndex
from glovebox_sandboxes.host import mounts
from glovebox_server.guards.secret_files.hiding import MAX_HELD, Hidden, Hiding, _masks

TOOL: Any = SimpleNamespace(imports=True)


async def test_what_is_taken_in_while_a_guard_is_made_is_covered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is heard of by no guard that is made later, and not yet said: so whoever guards waits for it."""
    index = SecretFileIndex(str(tmp_path))
    index.rebuild()
    taking, go_on = threading.Event(), threading.Event()
    publish = index._publish

    def slowly() -> None:
        taking.set()
        go_on.wait(10)
        publish()

    async def of(*_: object) -> SecretFileIndex:
        assert index.settled
        (tmp_path / ".env").write_text("KEY=1")
        threading.Thread(target=index.drain).start()
        taking.wait(10)
        threading.Timer(0.2, go_on.set).start()  # once the guard is there
        return index

    hiding = Hiding()
    monkeypatch.setattr(index, "_publish", slowly)
    monkeypatch.setattr(hiding, "_index", of)
    async with hiding.guarding(SPEC, TOOL, ()) as hidden:
        assert hidden is not None
        assert hidden.spec.masks == (".env",)
        await hidden.require()  # the control: what is covered is no reason to refuse
    index.close()


def test_mounts_elsewhere_are_no_reason_to_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An Engine mounts for every container, and what programs print waits for what is not taken in."""
    with indexed(tmp_path) as index:
        monkeypatch.setattr(index._mounts, "changed", lambda: True)
        settled = [index.settled]
        monkeypatch.setattr(mounts, "inside", lambda _root: ("here",))  # the control
        settled.append(index.settled)
        index.drain()
        assert [*settled, index.settled] == [True, False, True]


@pytest.fixture
def spec(tmp_path: Path) -> SandboxSpec:
    """A sandbox that sees a workspace with two secrets in it."""
    (tmp_path / "X").mkdir()
    for name in (".env", "X/.env", "a.txt"):
        (tmp_path / name).touch()
    return replace(SPEC, mounts=(Mount(source=str(tmp_path), target=WORKSPACE),))


def call_of(spec: SandboxSpec | None, tool: Any = TOOL) -> Any:
    """A call to whose program one of them is shown."""
    now = SimpleNamespace(spec=spec, reveal=["/X/.env"], wrap_live=[], around_program=[])
    return SimpleNamespace(now=now, tool=tool, stack=AsyncExitStack(), request=SimpleNamespace(id="c_1"))


async def test_a_program_is_kept_from_secrets_and_ended_with_its_output_withheld_when_one_appears(
    tmp_path: Path, spec: SandboxSpec
) -> None:
    """What is shown to it is not covered; what is prepared for such calls covers the same."""
    hiding, call, heard = Hiding(), call_of(spec), list[str]()
    covered = replace(spec, masks=(".env",))
    assert await hiding.masked(spec, TOOL, call.now.reveal) == covered
    async with call.stack:
        await hiding.mask(call)
        assert call.now.spec == covered
        (wrap,), (watching,) = call.now.wrap_live, call.now.around_program
        wrap(heard.append)("shown")

        async def run() -> None:
            async with watching:
                (tmp_path / ".netrc").touch()
                await anyio.sleep_forever()

        with anyio.fail_after(10), pytest.raises(RefusedError) as refused:
            await run()
        told = refused.value
        assert (heard, told.rule, bool(told.reason), bool(told.hint)) == (["shown"], "workspace.secret", True, True)
    hiding.close()


async def test_what_sees_no_workspace_is_left_alone(spec: SandboxSpec) -> None:
    """A job of our own, which hides them itself, and a sandbox without a folder; one not made yet is a fault."""
    hiding = Hiding()
    for alone, tool in ((spec, cast("Any", SimpleNamespace(imports=False))), (replace(spec, mounts=()), TOOL)):
        call = call_of(alone, tool)
        await hiding.mask(call)
        assert call.now == call_of(alone).now
        assert await hiding.masked(alone, tool, ()) is alone
    with pytest.raises(AssertionError, match="c_1"):
        await hiding.mask(call_of(None))
    hiding.close()


def test_a_change_that_is_heard_of_when_the_server_has_ended_fails_nothing(tmp_path: Path, spec: SandboxSpec) -> None:
    """Its thread may come late, when no loop is there to be told."""

    async def serve() -> SecretFileIndex:
        async with Hiding().guarding(spec, TOOL, ()) as hidden:
            assert hidden is not None
            return hidden.index

    index = anyio.run(serve)
    (tmp_path / ".netrc").touch()
    index.drain()
    assert index.count == 3
    index.close()


async def test_in_doubt_it_is_looked_at_before_an_output_is_believed(tmp_path: Path, spec: SandboxSpec) -> None:
    """What waits in the kernel's queue when a program has ended may be a secret."""
    with indexed(tmp_path) as index, index.guarding(frozenset(), lambda: None) as guard:
        hidden = Hidden(spec=spec, index=index, guard=guard, scope=anyio.CancelScope())
        (tmp_path / "b.txt").touch()
        await hidden.require()
        (tmp_path / ".netrc").touch()
        with pytest.raises(RefusedError):
            await hidden.require()


@pytest.mark.parametrize("count", [1000, 1001])
async def test_many_covers_are_made_in_a_thread(count: int) -> None:
    """They would hold up every other call; of the others none waits for a thread."""

    def masks(revealed: frozenset[str]) -> tuple[str, ...]:
        return *revealed, str(threading.current_thread() is threading.main_thread())

    index: Any = SimpleNamespace(count=count, masks=masks)
    assert await _masks(index, frozenset({"a"})) == ("a", str(count == 1000))


@pytest.mark.parametrize(
    ("held", "shown"),
    [
        (["x" * (MAX_HELD - 1), "y"], ["x" * (MAX_HELD - 1) + "y"]),
        (["x" * MAX_HELD, "y"], []),
        (["x" * (MAX_HELD - 1), "yy", "z"], []),
        (["x" * (MAX_HELD + 1), "y"], []),
    ],
)
def test_what_is_printed_is_held_back_while_in_doubt_and_no_more_than_the_bound_is_kept(
    held: list[str], shown: list[str]
) -> None:
    """Within the bound it is shown once that is sure, and it counts anew; what goes beyond is not, nor what follows."""
    guard, heard = SimpleNamespace(holds=True), list[str]()
    unused: Any = None
    hidden = Hidden(spec=SPEC, index=unused, guard=cast("SecretFileGuard", guard), scope=unused)
    printed = hidden.printed(heard.append)
    printed("at once")
    guard.holds = False
    for text in held[:-1]:
        printed(text)
    assert heard == ["at once"]
    guard.holds = True
    printed(held[-1])
    assert heard == ["at once", *shown]
