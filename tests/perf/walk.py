"""Lists the files of ours that one warm call enters, in the order of their first step: ``python -m tests.perf.walk``.

A whole call of ``run_python`` over stdio, client and server in one process, with a sandbox that stands ready. What the
guest does inside is not seen from here. docs/internals/design.md keeps what it found.
"""

import os
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import anyio
from mcp import Client
from rich.console import Console
from rich.table import Table

from glovebox_server import app as apps
from glovebox_server.settings import Settings
from glovebox_server.transport import serve, stdio

ROOT = Path(__file__).parents[2]
OURS = tuple(f"{ROOT / folder}{os.sep}" for folder in ("server", "sandboxes", "profiles"))
WARM_UP = 3
"""Calls before the one that is looked at, and a pause in which the next sandbox gets ready."""
PAUSE_SECONDS = 1.0


class Walk:
    """Notes each function of ours that is entered while it is on."""

    def __init__(self) -> None:
        """Begin switched off."""
        self.on = False
        self.entered: dict[str, set[CodeType]] = {}

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        """See ``sys.setprofile``."""
        if self.on and event == "call" and frame.f_code.co_filename.startswith(OURS):
            self.entered.setdefault(frame.f_code.co_filename, set()).add(frame.f_code)


async def _one_call(walk: Walk, directory: Path) -> None:
    workspace = directory / "workspace"
    workspace.mkdir(mode=0o755)
    settings = Settings(workspace=workspace, state_dir=directory / "state")
    to_server, to_client = os.pipe(), os.pipe()
    async with apps.opened(settings, "stdio") as app, anyio.create_task_group() as tasks:
        served: Any = serve.serve_stdio
        tasks.start_soon(served, app, stdio.StdioFds(read=to_server[0], write=to_client[1]))
        wire = stdio.streams(stdio.StdioFds(read=to_client[0], write=to_server[1]), stdio.Unanswered())
        async with Client(wire) as client:
            for _ in range(WARM_UP):
                await client.call_tool("run_python", {"code": "print(1)"})
                await anyio.sleep(PAUSE_SECONDS)
            walk.on = True
            result = await client.call_tool("run_python", {"code": "print(1)"})
            walk.on = False
            if result.is_error:
                raise RuntimeError(str(result.content))
        tasks.cancel_scope.cancel()


def main() -> None:
    """Print them."""
    walk = Walk()
    threading.setprofile(walk)
    sys.setprofile(walk)
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch).chmod(0o755)
        anyio.run(_one_call, walk, Path(scratch))
    sys.setprofile(None)
    table = Table("", "file", "functions entered", title=f"{len(walk.entered)} files of ours in one warm call")
    for number, (name, codes) in enumerate(walk.entered.items(), 1):
        table.add_row(str(number), str(Path(name).relative_to(ROOT)), ", ".join(sorted({c.co_name for c in codes})))
    Console().print(table)


if __name__ == "__main__":
    main()
