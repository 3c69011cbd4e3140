"""Runs a case's attack without the guard: on the host, in a scratch directory, with bounds on time and output.

Only for the tests of the cases themselves: it does what a sandbox exists to prevent. Nothing here may import a driver,
a profile or the server.
"""

import os
import re
import secrets
import signal
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.abc

from glovebox_sandboxes.conformance import case as texts
from glovebox_sandboxes.conformance import host as hosts
from glovebox_sandboxes.conformance.case import Case
from glovebox_sandboxes.conformance.host import Planted
from glovebox_sandboxes.session.run import PRINTED_FACTOR

_PYTHON = "/usr/bin/python3"
_MARK = "GLOVEBOX_CONTROL"
_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")
"""An attack that has nothing in its way must not outlive a test run that was killed. See setpriv(1)."""
_NAMESPACES = ("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--net", "--ipc", "--uts",
               "--mount-proc", "--")  # fmt: skip
"""As root: new namespaces, every capability, no filter, no other user. See unshare(1)."""
_MARGIN_SECONDS = 0.5
"""How long past a sandbox's time a control has to run to show that only the sandbox would have ended it."""
_ENDS_SECONDS = 60.0
"""For one that ends by itself, in a second where the machine has nothing else to do."""


@dataclass(slots=True)
class _Ran:
    ended: str = "exited"
    stdout: bytes = b""


async def problems(case: Case, host: Planted) -> tuple[str, ...]:
    """Run a case's control; one sentence for each thing that is not as the case says, empty when the attack works."""
    wanted = case.control
    with tempfile.TemporaryDirectory(prefix="glovebox-control-") as scratch:
        places = _places(Path(scratch), host)
        mark = secrets.token_hex(16)
        if case.before is not None:
            await _run(case, case.before, places, host, mark)
        text = wanted.program or case.program or ""
        if case.attempt is not None:
            text = texts.attempts({case.id: wanted.program or case.attempt})
        ran = await _run(case, text, places, host, mark)
        again = await _run(case, text, places, host, mark) if case.repeated else ran
        outlived = ran.ended in ("exited", "signalled") and _kill(mark)
        # Not our children: there is nothing to wait for but their absence.
        while _kill(mark):  # noqa: ASYNC110 - only /proc tells
            await anyio.sleep(0.01)
    printed = ran.stdout.decode("utf-8", "replace")
    found = []
    if ran.ended != wanted.ended:
        found.append(f"it {ran.ended} instead of {wanted.ended}")
    if outlived != wanted.outlived:
        found.append("processes outlived it" if outlived else "nothing outlived it")
    if wanted.stdout and not re.search(wanted.stdout, printed):
        found.append(f"its standard output is {printed[-500:]!r} and does not match {wanted.stdout}")
    if wanted.answer:
        answer = texts.answers(printed).get(case.id)
        if answer is None or not re.fullmatch(wanted.answer, answer, re.DOTALL):
            found.append(f"it answered {answer!r} instead of {wanted.answer}: {printed[-500:]!r}")
    if case.repeated and (ran.stdout == again.stdout) == (case.repeated == "same"):
        found.append(f"two runs printed {case.repeated} things: {printed!r}")
    return tuple(found)


def _places(scratch: Path, host: Planted) -> Mapping[str, str]:
    scratch.chmod(0o755)
    for name in texts.INSIDE:
        (scratch / name.lower()).mkdir()
    hosts.fill(scratch / "workspace", Path(host.names["secret"]))
    (scratch / "input" / hosts.EARLIER[0]).write_bytes(hosts.EARLIER[1])
    return {name: str(scratch / name.lower()) for name in texts.INSIDE}


async def _run(case: Case, text: str, places: Mapping[str, str], host: Planted, mark: str) -> _Ran:
    limits = case.in_force()
    prefix = _NAMESPACES if case.control.where == "namespaces" else ()
    ran = _Ran(ended="running")
    process = await anyio.open_process(
        [*_WITH_US, *prefix, _PYTHON, "-I", "-B", "-X", "utf8", "-c", texts.program(text, places, host.names)],
        stderr=None,
        env={**os.environ, _MARK: mark},
        cwd=places["WORKSPACE"],
        start_new_session=True,
    )
    # One that ends by itself is waited for, however busy the machine is: that it goes on is no control's answer.
    seconds = _ENDS_SECONDS if case.control.ended == "exited" else limits.wall_seconds + _MARGIN_SECONDS
    return await _watch(process, ran, seconds, limits.stream_bytes * PRINTED_FACTOR)


async def _watch(process: anyio.abc.Process, ran: _Ran, seconds: float, most: int) -> _Ran:
    stdout = process.stdout
    if stdout is None:
        raise TypeError("a control needs a pipe")

    async def read(tasks: anyio.abc.TaskGroup) -> None:
        async for chunk in stdout:
            ran.stdout += chunk
            if len(ran.stdout) > most:
                ran.ended = "printing"
                tasks.cancel_scope.cancel()

    try:
        with anyio.move_on_after(seconds):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read, tasks)
                status = await process.wait()
                ran.ended = "exited" if status >= 0 else "signalled"
                # Whatever outlives it may hold the pipe open: what it printed itself is there already.
                tasks.cancel_scope.deadline = anyio.current_time() + _MARGIN_SECONDS
    finally:
        with anyio.CancelScope(shield=True):
            if process.returncode is None:
                process.kill()
            await process.aclose()
    return ran


def _kill(mark: str) -> bool:
    """Kill everything that carries the mark in its environment; whether there was anything."""
    found = False
    wanted = f"{_MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or wanted not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            if (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                continue
            os.kill(int(entry.name), signal.SIGKILL)
            found = True
        except OSError:
            continue  # it has ended, or is not ours
    return found
