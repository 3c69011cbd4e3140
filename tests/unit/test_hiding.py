"""Hiding secrets of the workspace from a program: what comes between two looks, and what is held back meanwhile."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from tests.fixtures.specs import SPEC

from glovebox_sandboxes.hidden.index import SecretFileGuard, SecretFileIndex
from glovebox_sandboxes.host import mounts
from glovebox_server.guards.secret_files.hiding import MAX_HELD, Hidden, Hiding

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
    index = SecretFileIndex(str(tmp_path))
    index.rebuild()
    monkeypatch.setattr(index._mounts, "changed", lambda: True)
    settled = [index.settled]
    monkeypatch.setattr(mounts, "inside", lambda _root: ("here",))  # the control
    settled.append(index.settled)
    index.drain()
    assert [*settled, index.settled] == [True, False, True]
    index.close()


class Doubt:
    def __init__(self) -> None:
        self.holds = False


def test_what_is_printed_is_held_back_while_that_is_in_doubt_and_no_more_than_the_bound_is_kept() -> None:
    """Within the bound it is shown once that is sure; what went beyond it is not, and neither is what comes after."""
    for size, shown in ((MAX_HELD - 1, ["x" * (MAX_HELD - 1) + "y"]), (MAX_HELD + 1, [])):
        guard, heard = Doubt(), list[str]()
        hidden = Hidden(
            spec=SPEC, index=cast("SecretFileIndex", None), guard=cast("SecretFileGuard", guard),
            scope=cast("anyio.CancelScope", None),
        )  # fmt: skip
        printed = hidden.printed(heard.append)
        printed("x" * size)
        assert heard == []
        guard.holds = True
        printed("y")
        assert heard == shown
