"""Removes a server's containers when the server is killed with SIGKILL and cannot do it itself.

A running container ends by itself then, because its input closes; one that was created and not yet started would stay.
Nothing here may import a profile or the server.
"""

from pathlib import Path

from glovebox_sandboxes.host.janitor import Janitor

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


def janitor(socket: str, label: str, directory: Path) -> Janitor:
    """Name the Engine's socket, the label (``key=value``) of this server's containers, and a directory of its."""
    return Janitor(_PROGRAM, socket, label, str(directory))
