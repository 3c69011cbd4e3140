"""Remove a server's containers if SIGKILL keeps it from doing so itself: a program, see ``host.process.Janitor``.

A running container then ends by itself, because its input closes; one created but not yet started would stay. It must
import nothing but the standard library.
"""

import http.client
import json
import shutil
import socket
import sys
import time
import urllib.parse
from contextlib import suppress

_SECONDS = 10
"""For one answer of the Engine."""


def ask(path: str, method: str, target: str) -> bytes:
    """Return the Engine's answer; ``path`` is its socket."""
    connection = http.client.HTTPConnection("localhost", timeout=_SECONDS)
    with socket.socket(socket.AF_UNIX) as connection.sock:
        connection.sock.settimeout(_SECONDS)
        connection.sock.connect(path)
        connection.request(method, target)
        return connection.getresponse().read()


def sweep(path: str, label: str) -> None:
    """Remove all containers with this label (``key=value``), as far as the Engine answers."""
    wanted = urllib.parse.quote(json.dumps({"label": [label]}))
    with suppress(OSError, ValueError, http.client.HTTPException):
        for container in json.loads(ask(path, "GET", f"/containers/json?all=1&filters={wanted}")):
            ask(path, "DELETE", f"/containers/{container['Id']}?force=1&v=1")


if __name__ == "__main__":
    regular = sys.stdin.buffer.read() == b"bye"
    shutil.rmtree(sys.argv[3], ignore_errors=True)
    # Three sweeps, half a second apart: the Engine may still be busy with the dead server's last request.
    for sweeps_before in range(1 if regular else 3):
        if sweeps_before:
            time.sleep(0.5)
        sweep(sys.argv[1], sys.argv[2])
