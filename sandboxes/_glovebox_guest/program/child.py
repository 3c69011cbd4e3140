"""The process untrusted code runs in: forked from the guest, without any of the guest's resources.

It is forked before there is a job, so that a call does not wait for it: until then it waits for its order, which comes
from the guest alone. It has pipes of its own for output, result and the end of its task, no other descriptor, no access
to the guest (which is not dumpable, see prctl(2) PR_SET_DUMPABLE), and limits it cannot raise.
"""

from __future__ import annotations

import fcntl
import marshal
import os
import resource
import sys

# Code after a program must not use its replacements of these.
from os import _exit, fstat, getpid
from os import write as _write

from _glovebox_guest.kernel import prctl, read, write
from _glovebox_guest.program.emit import Emit
from _glovebox_guest.stdlib import Any, Callable, Mapping, NoReturn, TypeAlias, signal

Task: TypeAlias = "Callable[[Mapping[str, Any], Emit], int | None]"

# As above.
_SIG_BLOCK = signal.SIG_BLOCK
_block = signal.pthread_sigmask
_wait_for_signal = signal.sigtimedwait
_every_signal = signal.valid_signals

RESULT = 3
"""Descriptor of the result pipe in the child."""
DONE = 4
"""Descriptor that reports the end of the task; a program that writes to it ends as by ``os._exit``."""
ORDER = 5
"""Descriptor the child waits on; closed before the program starts."""
_READ = 1024 * 1024
_LINKS = 10_000
_END_SECONDS = 1.0
"""Between the report of a task's end and the end of its process, where the guest is not faster."""
streams: dict[str, Any] = {}
"""A program's standard ones, by their names in ``sys``."""
_replaced: list[object] = []
"""Those of the guest: to free them would take a fork as long as to make new ones."""
MAX_OPEN_FILES = 1024
"""The usual soft limit of a login shell; a sandbox needs no more."""


class Child:
    """A process that waits for its task, or runs it: its number and the reading ends of its pipes."""

    def __init__(self, pid: int, order: int, pipes: tuple[int, ...]) -> None:
        self.pid = pid
        self._order = order
        self.stdout, self.stderr, self.result, self.done = pipes
        self.descriptors = frozenset({order, *pipes})

    def begin(self, order: Mapping[str, Any]) -> None:
        """Send the order, once. A dead child is detected by its end."""
        # Not JSON: a fetched page is bytes. Both ends are one interpreter.
        view = memoryview(marshal.dumps(dict(order)))
        try:
            while view:
                view = view[os.write(self._order, view) :]
        except BrokenPipeError:
            pass
        os.close(self._order)


def prepare() -> None:
    """Make a program's standard streams once, not in each fork of a zygote, which would copy sixty pages for them."""
    if streams:
        return
    _replaced.extend((sys.stdin, sys.stdout, sys.stderr))
    streams["stdin"] = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - it stays open
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        own, (reading, writing) = os.dup(descriptor), os.pipe()
        # On a pipe, as a program's are: the guest's own are files. Line by line, so that the caller sees output at
        # once; an encoding error must not end a program.
        os.dup2(writing, descriptor)
        streams[name] = open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115 - as above
        os.dup2(own, descriptor)
        for each in (own, reading, writing):
            os.close(each)
    streams.update({f"__{name}__": stream for name, stream in streams.items()})


def fork(ahead: Callable[[], object], work: Callable[[dict[str, Any]], Task]) -> Child:
    """Fork a process that waits for its order, with standard input empty and output in pipes.

    It calls ``ahead`` before it waits, to give up what a program must not have; then, within the order's limits,
    ``work`` with the order, which returns the task for its payload.
    """
    orders, order = os.pipe()
    ours, theirs = zip(*(os.pipe() for _ in range(4)), strict=True)
    pid = os.fork()
    if pid == 0:
        live(lambda: _become_child(orders, theirs), ahead, _wait, work)
    for descriptor in (orders, *theirs):
        os.close(descriptor)
    for descriptor in ours:
        # A program can open its own end for reading, and take what the guest was just notified of, see pipe(7).
        os.set_blocking(descriptor, False)
    return Child(pid, order, ours)


def live(
    begin: Callable[[], object],
    ahead: Callable[[], object],
    wait: Callable[[], dict[str, Any]],
    work: Callable[[dict[str, Any]], Task],
) -> NoReturn:
    """Be the child: ``wait`` returns the order. It never returns into the guest's own code."""
    status = 70  # EX_SOFTWARE: the harness itself failed, which only a bug of ours or lack of memory explains
    try:
        begin()
        ahead()
        wanted = wait()
        _limit(wanted["limits"])
        task = work(wanted)
        own, place = getpid(), fstat(DONE)
        status = task(wanted["payload"], Emit(RESULT)) or 0
        # A program may have forked, and this may be the fork.
        if getpid() == own:
            _say(status, place)
    except BaseException:  # noqa: BLE001 - it must never return
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    finally:
        _exit(status)


def _say(status: int, place: os.stat_result) -> None:
    """Report the end of the task, and wait to be killed by the guest, once it has read this process's usage.

    So the call does not wait for the kernel to free memory. A late guest sees the end of the process instead.
    """
    try:
        found = fstat(DONE)
        # The program may have opened something else under the number.
        if (found.st_dev, found.st_ino) != (place.st_dev, place.st_ino):
            return
        _write(DONE, bytes([status]))
    except OSError:
        return
    # Signals, of an alarm for instance, must not change the reported status.
    _block(_SIG_BLOCK, _every_signal())
    _wait_for_signal((), _END_SECONDS)


def _wait() -> dict[str, Any]:
    """Return the complete order. If the guest ends first, so does this process."""
    parts = []
    while part := os.read(ORDER, _READ):
        parts.append(part)
    os.close(ORDER)
    wanted: dict[str, Any] = marshal.loads(b"".join(parts))  # noqa: S302 - from the guest, before anything else ran here
    return wanted


def _become_child(order: int, pipes: tuple[int, ...]) -> None:
    os.setsid()
    # First away from 0 to 4, then into place: a pipe may itself be numbered 0 to 4.
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, ORDER + 1) for descriptor in (*pipes, order)]
    null = os.open("/dev/null", os.O_RDONLY)
    for target, source in enumerate([null, *high]):
        os.dup2(source, target, inheritable=target <= 2)
    os.closerange(ORDER + 1, os.sysconf("SC_OPEN_MAX"))
    settle()
    # The files below /proc/self belong to root for a process that is not dumpable. The guest stays so.
    prctl("PR_SET_DUMPABLE", 1)
    # In a shortage of memory the kernel kills the program, not the guest that has to report it.
    write("/proc/self/oom_score_adj", "1000")


def settle() -> None:
    """Take a program's standard streams and the usual handlers of signals."""
    prepare()
    sys.__dict__.update(streams)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    # The interpreter's default, see PyConfig.install_signal_handlers: a write fails with EPIPE.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _limit(limits: dict[str, int]) -> None:
    # 1 and not 0: a core_pattern that is a pipe ignores 0, but the kernel gives up at 1, see core(5).
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_OPEN_FILES, MAX_OPEN_FILES))
    # At the soft limit SIGXCPU, which a program may ignore; one second later SIGKILL, which it may not.
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_seconds"], limits["cpu_seconds"] + 1))
    if "memory_bytes" in limits:
        # Grow the stack now: a program at its memory limit cannot later, and would end by SIGSEGV, see getrlimit(2).
        # CPython 3.13 frees a chain of references with 0.8 MiB of stack, whatever its length.
        chain: tuple[Any, ...] = ()
        for _ in range(_LINKS):
            chain = (chain,)
        del chain
        # Memory that the guest has mapped already (interpreter, preloaded modules) does not count as the program's.
        mapped = int(read("/proc/self/statm").split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (mapped + limits["memory_bytes"],) * 2)
    if "pids" in limits:
        resource.setrlimit(resource.RLIMIT_NPROC, (limits["pids"],) * 2)
