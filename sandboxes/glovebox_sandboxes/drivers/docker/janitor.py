"""Removes a server's containers when the server is killed with SIGKILL and cannot do it itself.

A running container ends by itself then, because its input closes; one that was created and not yet started would stay.
The janitor is a process of its own that waits for its standard input to close, which the kernel does for a dead server.
Nothing here may import a profile or the server.
"""

import sys
from pathlib import Path

import anyio
import anyio.abc

_STOP_SECONDS = 10
"""How long closing waits for the last sweep, which takes a few ms when everything is gone already."""

# Three sweeps, half a second apart: the Engine may still be busy with the dead server's last request.
_PROGRAM = """
import http.client, json, shutil, socket, sys, time, urllib.parse
path, label, directory = sys.argv[1:]

def ask(method, target):
    connection = http.client.HTTPConnection("localhost", timeout=10)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(10)
    connection.sock.connect(path)
    connection.request(method, target)
    answer = connection.getresponse().read()
    connection.close()
    return answer

regular = sys.stdin.buffer.read() == b"bye"
shutil.rmtree(directory, ignore_errors=True)
wanted = urllib.parse.quote(json.dumps({"label": [label]}))
for sweep in range(1 if regular else 3):
    time.sleep(0.5 * bool(sweep))
    try:
        for container in json.loads(ask("GET", "/containers/json?all=1&filters=" + wanted)):
            ask("DELETE", "/containers/" + container["Id"] + "?force=1&v=1")
    except (OSError, ValueError, http.client.HTTPException):
        pass
"""


class Janitor:
    """One waiting process per server, started with its first container."""

    def __init__(self, socket: str, label: str, directory: Path) -> None:
        """Name the Engine's socket, the label (``key=value``) of this server's containers, and a directory of its."""
        self._arguments = (socket, label, str(directory))
        self._process: anyio.abc.Process | None = None
        self._starting = anyio.Lock()

    async def start(self) -> None:
        """Start it, once. Raises OSError."""
        async with self._starting:
            if self._process is None:
                # A session of its own: a Ctrl-C for the server must not reach it before the server is gone.
                self._process = await anyio.open_process(
                    [sys.executable, "-I", "-S", "-c", _PROGRAM, *self._arguments],
                    stdout=None,
                    stderr=None,
                    env={},
                    start_new_session=True,
                )

    async def stop(self) -> None:
        """Let it look once more, and wait for it, at most 10 s."""
        if self._process is None or self._process.stdin is None:
            return
        with anyio.CancelScope(shield=True), anyio.move_on_after(_STOP_SECONDS):
            await self._process.stdin.send(b"bye")
            await self._process.aclose()
