"""``python -m tests.perf.stalls``: how long one hostile input keeps everybody else waiting; table, or ``--json``.

A real server is sent each input in turn, and measures its own event loop (``glovebox_server.event_loop``). Words on the
command line choose inputs whose names hold one of them. Ends with 1 where an input took longer than ``BOUND_MS``.
"""

import json
import os
import signal
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
from tests.perf import stalls_guest, stalls_inputs
from tests.perf.clients import Listening, Setup, over_http

from glovebox_server import event_loop
from glovebox_server.cli.main import main as serve_main

BOUND_MS = 50.0  # longest stall that is promised on an idle machine, in nine of ten runs
ANSWER_SECONDS = 45.0  # for the answers to one input, after which it counts as it is
_TAKEN = 1 << 20


class _Restarting(Setup):
    """A server whose measure begins anew on SIGWINCH."""

    def command(self, *more: str) -> list[str]:
        """See ``Setup``."""
        plain = super().command(*more)
        return [self.side.python, "-m", "tests.perf.stalls", "--server", *plain[plain.index("serve") :]]


def _server() -> None:
    sys.argv.remove("--server")
    signal.signal(signal.SIGWINCH, lambda *_: event_loop.restart())
    serve_main()


async def _sent(server: Listening, data: bytes) -> None:
    """Send on a connection of its own, and read until it ends."""
    with suppress(OSError, anyio.EndOfStream, anyio.BrokenResourceError):
        async with await anyio.connect_tcp("127.0.0.1", server.port) as stream, anyio.create_task_group() as tasks:

            async def write() -> None:
                with suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
                    await stream.send(data)

            tasks.start_soon(write)
            with suppress(OSError, anyio.EndOfStream, anyio.BrokenResourceError):
                while True:
                    await stream.receive(_TAKEN)
            tasks.cancel_scope.cancel()


async def _stall(server: Listening) -> float:
    """What the server says of itself."""
    async with server.connected() as caller:
        request = stalls_inputs.get(server.port, server.token, "/health")
        body = await caller.call(request)
    found: float = json.loads(body)["longest_stall_ms"]
    return found


async def _hostile(server: Listening, requests: list[bytes]) -> float:
    await anyio.sleep(0.5)  # what the input before left behind is no part of this one
    os.kill(server.pid, signal.SIGWINCH)
    await _stall(server)
    with anyio.move_on_after(ANSWER_SECONDS):
        async with anyio.create_task_group() as tasks:
            for request in requests:
                tasks.start_soon(_sent, server, request)
    return await _stall(server)


async def _served(directory: Path, words: list[str], tell: Callable[[str, float], None]) -> None:
    workspace = directory / "workspace"
    workspace.mkdir()
    setup = _Restarting(directory=directory, workspace=workspace)
    async with over_http(replace(setup)) as server:
        make = partial(stalls_inputs.post, server.port, server.token)
        await _hostile(server, [make(stalls_inputs.call("run_python", {"code": "print(1)"}))] * 2)
        for name, requests in stalls_inputs.over_http(make, server.port, server.token):
            if _chosen(name, words):
                tell(name, await _hostile(server, requests()))


def _chosen(name: str, words: list[str]) -> bool:
    return not words or any(word in name for word in words)


def main() -> None:
    """Print one line for each input."""
    if "--server" in sys.argv:
        _server()
        return
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("words", nargs="*")
    given = parser.parse_args()
    found: dict[str, float] = {}

    def tell(name: str, stall: float) -> None:
        found[name] = stall
        if not given.json:
            mark = "" if stall <= BOUND_MS else "  above the bound"
            sys.stdout.write(f"{name:60s} {stall:8.1f} ms{mark}\n")
            sys.stdout.flush()

    for name, stall in stalls_guest.each(partial(_chosen, words=given.words)):
        tell(name, stall)
    with TemporaryDirectory() as scratch:
        anyio.run(_served, Path(scratch), given.words, tell)
    if given.json:
        sys.stdout.write(json.dumps({"bound_ms": BOUND_MS, "longest_stall_ms": found}, indent=1) + "\n")
    sys.exit(any(stall > BOUND_MS for stall in found.values()))


if __name__ == "__main__":
    main()
