"""The ways in: stdio here; HTTP with SSE in ``serve_http``. Signals and the end of a client end calls; nothing is left.

Public: ``serve_stdio(app)``. Returns when the client is gone or on SIGTERM or SIGINT; the caller then closes the app
and exits with 0. Knows no tool; must not be imported by the broker or below.
"""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from server import stdio
from server.calls import Principal
from server.delivery import Context
from server.mcp import App, Surface, build, client_of

#: Signals that end a server in good order.
_ENDING = (signal.SIGTERM, signal.SIGINT)


async def serve_stdio(app: App, wire: stdio.Wire | None = None) -> str:
    """Serve one client over stdin and stdout, in whichever protocol era it opens.

    Calls under way when the client or a signal ends the connection are cancelled, and their sandboxes are gone, before
    this returns.

    Args:
        app: the composition root, entered.
        wire: descriptors to use instead of the process's own; for tests.

    Returns:
        Why it ended, for the audit log: ``stdin closed`` or the signal's name.
    """
    if wire is None:
        with stdio.claimed_wire() as own:
            return await serve_stdio(app, own)
    uid = f"local:{os.getuid()}"

    def identify(ctx: Context) -> Principal:
        return Principal(id=uid, transport="stdio", client=client_of(ctx))

    surface = build(app, identify)
    async with _until_signal(surface) as reason, stdio.streams(wire) as (incoming, outgoing):
        await surface.server.run(incoming, outgoing, surface.server.create_initialization_options())
    return reason[0] if reason else "stdin closed"


@asynccontextmanager
async def _until_signal(surface: Surface) -> AsyncIterator[list[str]]:
    """Run the body until it ends or an ending signal arrives; the list then holds the signal's name."""
    reason: list[str] = []

    async def watch(scope: anyio.CancelScope, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(*_ENDING) as signals:
            task_status.started()
            async for number in signals:
                reason.append(signal.Signals(number).name)
                surface.stop()
                scope.cancel()
                return

    async with anyio.create_task_group() as tasks:
        await tasks.start(watch, tasks.cancel_scope)
        yield reason
        tasks.cancel_scope.cancel()
