"""Walks one call and notes the files of ours that it enters: ``python -m tests.perf.walk`` lists those of a warm call.

How files and moves are counted:

- *Ours* is what lies below ``server``, ``sandboxes`` and ``profiles``. Client and server are one process; the guest in
  its sandbox is another and is not seen.
- A file is *entered* where Python calls or resumes one of its functions.
- A *move* is such an entry where the function entered before it, in the same task or thread, lies in another file.
- A *return* is counted apart: a function ends or waits, and the nearest function of ours that waits for it lies in
  another file.
- Tasks of ours that ran before the call are left out, with all they start, except the transport's: the pool attests the
  next sandbox, and stops are polled. When they run is a matter of time; it made the number vary by ten files.
- An idle event loop first waits ``PATIENCE_SECONDS``, so that a result comes in one read. Otherwise the machine decides
  how many reads there are, at 15 to 20 moves each. The smallest of ``CALLS`` calls counts.
- A guest's connection lets others have a turn after half a millisecond of work. A call that is not counted never works
  that long. Counting makes each step many times as long, and a busy machine more so: here a turn takes a second.
- The *egress part* of a call is what is entered in the context of ``CONNECTION``: by it, and by tasks and threads that
  work for it.
"""

import asyncio
import os
import re
import selectors
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
from mcp import Client
from tests.fixtures.brokered import glovebox, profile
from tests.fixtures.internet import SITE, answering, cable, internet, ok

from glovebox_sandboxes.session import connection
from glovebox_server import app as apps
from glovebox_server.settings import Settings
from glovebox_server.transport import serve, stdio

ROOT = Path(__file__).parents[2]
OURS = tuple(f"{ROOT / folder}{os.sep}" for folder in ("server", "sandboxes", "profiles"))
WARM_UP = 2
CALLS = 4
PAUSE_SECONDS = 0.4
PATIENCE_SECONDS = 0.005
BACKGROUND = re.compile(r"glovebox_(?!server\.transport\.)")
CONNECTION = ("server/glovebox_server/egress/serve.py", "serve_stream")
"""The function that is called for each connection that a program opens."""
_API = "api.example.org"
_KEY = "b7Qx2Lm9Wc4Zk1Vt8Rn5Hy3Df6Gs0Pj2Aa1E"
_CREDENTIAL = f'{{ name = "me", host = "{_API}", paths = ["/*"], header = "Authorization", source = "env:WALK_KEY" }}'
_in_background = ContextVar("_in_background", default=False)
_in_connection = ContextVar("_in_connection", default=False)


@dataclass(slots=True)
class Footprint:
    """The files and functions that one call entered."""

    files: dict[str, set[str]] = field(default_factory=dict)
    egress: set[str] = field(default_factory=set)
    last: dict[object, str] = field(default_factory=dict)  # by task or thread
    moves: int = 0
    returns: int = 0


class Walk:
    """A profiler that fills in the footprint of the call under way."""

    def __init__(self) -> None:
        self._footprint: Footprint | None = None
        self._background = set[asyncio.Task[Any]]()

    @asynccontextmanager
    async def call(self, footprints: list[Footprint]) -> AsyncIterator[None]:
        """Record one call, for the length of the block."""
        self._background = {task for task in asyncio.all_tasks() if BACKGROUND.match(task.get_name())}
        self._footprint = Footprint()
        yield
        footprints.append(self._footprint)
        self._footprint = None

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        """Handle one event of ``sys.setprofile``."""
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(OURS):
            return
        try:
            task = asyncio.current_task()
        except RuntimeError:  # a worker thread; it runs in the context of the task that waits for it
            task = None
        if task in self._background:
            _in_background.set(True)
        file = code.co_filename[len(str(ROOT)) + 1 :]
        if (file, code.co_qualname) == CONNECTION:
            _in_connection.set(True)
        seen = self._footprint
        if seen is None or _in_background.get():
            return
        if event == "return":
            caller = frame.f_back
            while caller is not None and not caller.f_code.co_filename.startswith(OURS):
                caller = caller.f_back
            seen.returns += caller is not None and caller.f_code.co_filename != code.co_filename
            return
        key = task or threading.get_ident()
        seen.moves += seen.last.get(key, file) != file
        seen.last[key] = file
        seen.files.setdefault(file, set()).add(code.co_name)
        if _in_connection.get():
            seen.egress.add(file)


def walk_warm_call() -> Footprint:
    """Walk ``print(1)`` over stdio, in a sandbox that stands ready."""
    return _least(_call_warm)


def walk_fetch() -> Footprint:
    """Walk ``fetch_url`` of a page that gets a credential, over TLS; needs root, for network namespaces."""
    os.environ["WALK_KEY"] = _KEY
    with cable() as wires:

        async def fetch(walk: Walk, directory: Path, footprints: list[Footprint]) -> None:
            text = profile("fetch_url", "bubblewrap", f'{{ host = "{_API}" }}')
            text = text.replace("[limits]", f"credential = [{_CREDENTIAL}]\n[limits]")
            async with internet(wires) as net, glovebox(net, directory, text) as box:
                net.zone[_API] = [[SITE]]
                requests: list[bytes] = []
                await net.serve(SITE, 443, answering(ok(b"me", "Content-Type: text/plain"), requests), name=_API)
                for _ in range(1 + CALLS):
                    async with walk.call(footprints):
                        called = await box.call("fetch_url", url=f"https://{_API}/v1/me")
                    if called.result.failed or _KEY.encode() not in requests[-1]:
                        raise RuntimeError(called.text)
            del footprints[0]  # it read the credential and the authorities

        footprint = _least(fetch)
    if not footprint.egress:
        raise RuntimeError("CONNECTION names no function that was called.")
    return footprint


async def _call_warm(walk: Walk, directory: Path, footprints: list[Footprint]) -> None:
    workspace = directory / "workspace"
    workspace.mkdir(mode=0o755)
    settings = Settings(workspace=workspace, state_dir=directory / "state")
    to_server, to_client = os.pipe(), os.pipe()
    async with apps.opened(settings, "stdio", worker=True) as app, anyio.create_task_group() as tasks:
        served: Any = serve.serve_stdio
        tasks.start_soon(served, app, stdio.StdioFds(read=to_server[0], write=to_client[1]))
        wire = stdio.StdioWire(stdio.StdioFds(read=to_client[0], write=to_server[1])).streams()
        async with Client(wire) as client:
            for _ in range(WARM_UP + CALLS):
                async with walk.call(footprints):
                    result = await client.call_tool("run_python", {"code": "print(1)"})
                if result.is_error:
                    raise RuntimeError(str(result.content))
                await anyio.sleep(PAUSE_SECONDS)
        tasks.cancel_scope.cancel()
    del footprints[:WARM_UP]


def _least(walk_calls: Callable[[Walk, Path, list[Footprint]], Awaitable[None]]) -> Footprint:
    walk, footprints = Walk(), list[Footprint]()
    connection._TURN_SECONDS = 1.0  # of this process, which only counts
    threading.setprofile(walk)
    sys.setprofile(walk)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            Path(scratch).chmod(0o755)
            options = {"loop_factory": lambda: asyncio.SelectorEventLoop(_PatientSelector())}
            anyio.run(walk_calls, walk, Path(scratch), footprints, backend_options=options)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return min(footprints, key=lambda footprint: (len(footprint.files), footprint.moves, footprint.returns))


class _PatientSelector(selectors.DefaultSelector):
    """Lets what is under way arrive before it looks."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            time.sleep(PATIENCE_SECONDS)
        return super().select(timeout)


def main() -> None:
    """Print the files of a warm call in the order of their first entry, with the functions entered."""
    for number, (file, functions) in enumerate(walk_warm_call().files.items(), 1):
        print(f"{number:3} {file}: {', '.join(sorted(functions))}")  # noqa: T201 - for people


if __name__ == "__main__":
    main()
