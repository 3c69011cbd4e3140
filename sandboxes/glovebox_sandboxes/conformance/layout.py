"""The code in front of cases' programs: names of places and planted things, and the harness of attempts. Pure."""

import json
from collections.abc import Mapping
from typing import Any

from glovebox_sandboxes.contract.spec import INPUT, OUTPUT, SCRATCH, WORKSPACE

INSIDE: Mapping[str, str] = {"WORKSPACE": WORKSPACE, "OUTPUT": OUTPUT, "INPUT": INPUT, "SCRATCH": SCRATCH}
"""The places by their names inside every sandbox; a control has them elsewhere."""
PRELUDE = "import ctypes, json, os, signal, socket, stat, subprocess, sys, time\n"
ANSWER_SECONDS = 5
"""An attempt that takes longer hangs, and answers SIGALRM: none of them waits for anything."""

_HARNESS = """
import errno, json, os, signal
def _attempt(code):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        me = os.getpid()
        signal.alarm({seconds})
        names = dict(globals())
        try:
            exec(code, names)
            answer = str(names.get("answer", "ok"))
        except OSError as problem:
            answer = errno.errorcode.get(problem.errno, type(problem).__name__)
        except BaseException as problem:
            answer = type(problem).__name__
        if os.getpid() == me:  # clone(2) returns here twice
            os.write(writing, answer.encode("utf-8", "backslashreplace")[:4000])
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    os.close(writing)
    os.set_blocking(reading, False)
    try:
        answer = os.read(reading, 4000).decode()
    except BlockingIOError:
        answer = ""
    os.close(reading)
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else answer
print()
print(json.dumps({{name: _attempt(code) for name, code in json.loads({table!r}).items()}}))
"""


def program(text: str, places: Mapping[str, str], host: Mapping[str, Any]) -> str:
    """Return the text of a case's program after the names it uses: ``places`` (see :data:`INSIDE`) and ``host``."""
    names = "".join(f"{name} = {value!r}\n" for name, value in places.items())
    return f"{PRELUDE}{names}HOST = {dict(host)!r}\n{text}"


def attempts(codes: Mapping[str, str | None]) -> str:
    """Return the text of a program that makes these attempts, by id, and prints the answers."""
    return _HARNESS.format(seconds=ANSWER_SECONDS, table=json.dumps(codes))


def answers(stdout: str) -> dict[str, str]:
    """Return the printed answers of :func:`attempts`, by id. Empty if it did not get so far."""
    try:
        found = json.loads(stdout.rstrip().rpartition("\n")[2])
    except ValueError:
        return {}
    return {str(name): str(answer) for name, answer in found.items()} if isinstance(found, dict) else {}
