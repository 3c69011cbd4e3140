"""Process 1 in C, of the forks of a zygote: the library, and what its processes do once they are back in Python.

Without the library, or where a sandbox needs more than it does, ``zygote`` forks the guest in Python as process 1.
"""

from __future__ import annotations

import os
import sys
from array import array

from _glovebox_guest import jsontext, kernel, work
from _glovebox_guest.loop import Loop
from _glovebox_guest.program import child as children
from _glovebox_guest.stdlib import Any, Callable, Mapping, NoReturn

NAME = f"process_1.{os.uname().machine}.so"
"""The library for this machine, in this folder, where one was built."""
_HEADER = 9
_LIMITS = ("inputs", "wall_us", "cpu_seconds", "printed_bytes", "output_bytes", "output_files")
_FIELDS = (
    "role", "wire", "last", "deadline", "stopped", "status", "wall_us", "cpu_us", "memory_peak_bytes", *_LIMITS[:1],
    "", *_LIMITS[2:],
)  # fmt: skip
"""As ``struct limits`` and ``struct handed`` in process_1.c: 64 bits each. A limit on time is not told again."""
_PROGRAM, _RECEIVE = 0, 1
_STOPPED = ("", "time", "output", "processor")
"""As in wire.h."""


def keep(config: Mapping[str, Any]) -> Callable[[int], dict[str, int] | None]:
    """Load the library with a plan. Raises OSError.

    What it returns serves orders from a socket until the host closes it, and then returns None. In a process of a
    sandbox that continues in Python it returns what process 1 has for that.
    """
    plan, serve = kernel.load(os.path.join(os.path.dirname(__file__), NAME), "glovebox_plan", "glovebox_serve")
    tmpfs = [word for target, size in config["zygote"]["tmpfs"] for word in (target, f"mode=0700,size={size}")]
    parts = [
        b"".join(os.fsencode(word) + b"\0" for word in [*words, ""])
        for words in (tmpfs, config["hidden"], config["masked"], [sys.version.split()[0]], [config["output"]])
    ]
    parts += [bytes.fromhex(config[name]) for name in ("filter", "program_filter")]
    lengths, told = array("L", map(len, parts)), array("q", bytes(8 * len(_FIELDS)))
    plan(b"".join(parts), kernel.Pointer(lengths.buffer_info()[0]))
    place = kernel.Pointer(told.buffer_info()[0])

    def forks(orders: int) -> dict[str, int] | None:
        over = kernel.forked(lambda: int(serve(orders, place)))
        return None if over else dict(zip(_FIELDS, told, strict=True))

    return forks


def resume(told: Mapping[str, int], config: Mapping[str, Any]) -> NoReturn:
    """Be what this process was forked for. Never returns."""
    if told["role"] == _PROGRAM:
        work.live(config, _order)
    status = 0
    if told["role"] == _RECEIVE:
        status = _receive(told, config)
    else:
        _collect(told, config)
    os._exit(status)


def _order() -> dict[str, Any]:
    """Return the job, which process 1 passes on as it came, after telling it what it has to know.

    Nothing of a program has run here yet, so what this process says is the guest's own word.
    """
    said = jsontext.loads(_frame(children.ORDER)[_HEADER:].decode())
    if said["kind"] != "job":
        raise ValueError(said["kind"])
    job: dict[str, Any] = said["body"]
    limits = job["limits"]
    numbers = (
        job["inputs"], round(limits["wall_seconds"] * 1_000_000), limits["cpu_seconds"], limits["printed_bytes"],
        limits["output_bytes"], limits["output_files"],
    )  # fmt: skip
    os.write(children.DONE, array("q", numbers).tobytes())
    if job["inputs"]:
        # Until they are there.
        os.read(children.ORDER, 1)
    os.close(children.ORDER)
    return {**job, "environment": job.get("environment", {})}


def _frame(descriptor: int) -> bytes:
    """Read one frame and not a byte more. If process 1 ends first, so does this process."""
    header = _exactly(descriptor, _HEADER)
    return header + _exactly(descriptor, int.from_bytes(header[-4:], "big"))


def _exactly(descriptor: int, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = os.read(descriptor, count - len(parts))
        if not part:
            os._exit(1)
        parts += part
    return parts


def _resumed(told: Mapping[str, int], into: str) -> Loop:
    loop = Loop(told["wire"], told["wire"], into)
    loop.wire.resume(told["last"])
    return loop


def _receive(told: Mapping[str, int], config: Mapping[str, Any]) -> int:
    """Receive the job's inputs, and leave the wire between two frames; return why the host stops the program."""
    loop = _resumed(told, config["input"])
    while sum(file.over for file in loop.inputs) < told["inputs"]:
        loop.take(_frame(told["wire"]))
        loop.flush()
    return _STOPPED.index(loop.stop)


def _collect(told: Mapping[str, int], config: Mapping[str, Any]) -> None:
    """Send what is in ``/output``, and the outcome: no other process is left that could change anything."""
    loop = _resumed(told, "")
    collected = work.collected(loop, told, config, None, told["deadline"] / 1e9)
    outcome = {
        "stopped": _STOPPED[told["stopped"]],
        "status": told["status"],
        "wall_ms": told["wall_us"] / 1000,
        "cpu_ms": told["cpu_us"] / 1000,
        "memory_peak_bytes": told["memory_peak_bytes"],
        **collected,
    }
    loop.send(loop.wire.message("outcome", outcome))
    loop.flush()
