"""A program that the server runs, and is cancelled while it starts it: it is waited for before the event loop ends."""

import gc
import warnings
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import pytest

from glovebox_audit.segments.anchors import give
from glovebox_sandboxes.contract.errors import DiagnosedError
from glovebox_sandboxes.drivers.bubblewrap import wall
from glovebox_server.guards.credentials.sources import read


async def _lend() -> None:
    with suppress(DiagnosedError):
        await read("exec:/bin/true")


async def _cancel(run: Callable[[], Coroutine[Any, Any, None]], after: int) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(run)
        for _ in range(after):
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()


def _left(run: Callable[[], Coroutine[Any, Any, None]]) -> list[str]:
    """What is said of programs that nobody waited for, cancelled at each of the first steps of a start."""
    with warnings.catch_warnings(record=True, action="always", category=ResourceWarning) as found:
        for after in [*range(20)] * 4:
            anyio.run(_cancel, run, after)
            gc.collect()
    return [str(each.message) for each in found if "still running" in str(each.message)]


@pytest.mark.parametrize("run", [partial(wall.run, ["/bin/true"]), _lend, partial(give, ["/bin/true"], b"", [])])
def test_a_program_is_waited_for_whenever_its_start_is_cancelled(run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Of a driver's probe, of a lent key, of an anchor. Without a shield some ten of the eighty are left."""
    assert _left(run) == []
