"""The guest from start to end: measure, preload, report ready, take one job, send its outcome, exit.

It is the sandbox's process 1: when it exits, the kernel ends everything else in its pid namespace.
"""

from __future__ import annotations

import fcntl
import os
import sys

from _glovebox_guest.jsontext import loads
from _glovebox_guest.kernel import add_filter, prctl
from _glovebox_guest.loop import Loop
from _glovebox_guest.measure import measure
from _glovebox_guest.stdlib import Any, NoReturn, signal

_WIRE = 10
"""Lowest number for the wire's descriptors: above 0 to 5, which a child assigns itself."""


def main() -> None:
    """Run one job and exit. The configuration is the last argument, JSON: see ``runtime.guest_tree.command``."""
    config = loads(sys.argv[-1])
    sys.path.extend(config["path"])
    serve(config)


def _import(names: list[str]) -> None:
    if names:
        from _glovebox_guest.site import sitecustomize

        sitecustomize.install()
    for name in names:
        try:
            __import__(name)
        except BaseException as problem:  # noqa: BLE001 - a module's own code; the host reports which it was
            sys.exit(_import_failure(name, problem))


def _import_failure(name: str, problem: BaseException) -> str:
    """Return one line: the module, the exception, and the last line of its traceback."""
    from traceback import format_exception_only

    first, *others = "".join(format_exception_only(problem)).strip().splitlines()
    return " ".join((f"{name}: {first.rstrip()}", *others[-1:]))


def require_first() -> None:
    """Exit unless this is process 1 of a pid namespace."""
    if os.getpid() != 1:
        # A job ends with kill(-1, SIGKILL): in a pid namespace of our own that is the job, anywhere else every process.
        sys.exit("the guest runs as process 1 of a pid namespace of its own, or not at all")


def serve(config: dict[str, Any]) -> NoReturn:
    """Serve one job as process 1 of a sandbox, on descriptors 0 and 1, and exit."""
    require_first()
    wire_in, wire_out = take_wire()
    prctl("PR_SET_DUMPABLE", 0)
    if config["filter"]:
        add_filter(bytes.fromhex(config["filter"]))
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    # The kernel drops every signal from inside that process 1 does not handle; Python handles this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = None
    if config["zygote"]:
        # All is imported. Forked later, it would make this process copy again what it has written to until then.
        from _glovebox_guest.work import ready_child

        child = ready_child(config)
    loop = Loop(wire_in, wire_out, config["input"])
    ready = measure(loop.descriptors | (child.descriptors if child else set()), config["hidden"], config["masked"])
    if ready["system"] == "gvisor":
        # There any process of a user may open another's descriptors, except sockets: no other process speaks as the
        # guest.
        os.dup2(0, 2)
    if child is None:
        _import(config["preload"])
    try:
        loop.send(loop.wire.message("ready", ready))
        loop.flush()
        # Imported while the host compares and records the measurement, so that it delays no call.
        from _glovebox_guest.work import prefault, ready_child, warm_up, work

        if child is None:
            warm_up()
            child = ready_child(config)
        prefault(child, config)
        while loop.job is None:
            loop.step(None)
        loop.send(loop.wire.message("outcome", work(loop, child, config)))
        loop.flush()
        # The host reads what the sandbox has used before it ends it; with process 1 the counters would be gone.
        while os.read(wire_in, 4096):
            pass
    except EOFError:
        # The host is gone. Process 1 ends, and with it the sandbox.
        os._exit(1)
    os._exit(0)


def take_wire() -> tuple[int, int]:
    """Move standard input and output out of reach, and put /dev/null in their place."""
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _WIRE) for descriptor in (0, 1)]
    for descriptor in moved:
        # Under gVisor both are one socket of the host: a flag that its kernel sets on the first is set on the second.
        os.set_blocking(descriptor, True)
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    return moved[0], moved[1]
