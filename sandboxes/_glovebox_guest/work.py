"""One job in the guest: inputs in, child out, leftover processes killed, outputs collected."""

from __future__ import annotations

import os
import resource
import select
from io import BytesIO
from time import clock_gettime, monotonic

from _glovebox_guest import kernel, landlock, measure, wire
from _glovebox_guest.files.output import Picture, collect, opened, send
from _glovebox_guest.jobs import python
from _glovebox_guest.loop import Loop, Relay
from _glovebox_guest.program import child as children
from _glovebox_guest.program import write_only
from _glovebox_guest.stdlib import Any, Callable, Mapping, NoReturn, signal

_DRAIN_SECONDS = 2.0
"""Time to drain pipes of dead processes, at most 64 KiB each, to a slow host."""

_ASKING_SHARE = 0.8
"""Share of the job's time for the network: a partial page still has to be parsed."""

_LOOK_SECONDS = 0.25
"""Interval of checks of all processes' processor time: the most by which a program is stopped late."""
_MAX_RESULT = 64 * 1024 * 1024
"""Bytes of value and pictures together; the host keeps less, see ``glovebox_sandboxes.session.result``."""

_PICTURE_CPU_SECONDS = 3
"""Processor time for smaller copies of pictures; one of 24 million pixels takes half a second."""
_PICTURE_SECONDS = 10.0
"""Wall-clock time for the same, where others use the processor too."""
_LATE_SECONDS = 2.0
"""Seconds that copies may pass the job's time: less than the host waits before it ends the sandbox."""
_PICTURE_BYTES = 32 * 1024 * 1024
"""Bytes of all pictures read for copies."""
_PICTURE_MEMORY = 256 * 1024 * 1024
"""Bytes of address space for copies: a decoder led to want more fails by itself, not the sandbox."""

# RLIMIT_CPU bounds each process for itself: a program that forks could use its limit many times over.
_TICKS = os.sysconf("SC_CLK_TCK")
_UTIME = 10
"""Index of ``utime`` behind the state in /proc/PID/stat; stime, cutime and cstime follow it."""
_CUTIME = _UTIME + 2
"""Index of the time of reaped children."""
_CMINFLT = 7
"""Index of their page faults: on Linux never 0. gVisor does not count them, and times in steps of 10 ms."""
_CPU_CLOCK = 2

_NOT_STARTED: Mapping[str, Any] = {
    "stopped": "", "status": 0, "wall_ms": 0.0, "cpu_ms": 0.0, "memory_peak_bytes": 0, "skipped": [],
}  # fmt: skip


def work(loop: Loop, child: children.Child, config: Mapping[str, Any]) -> dict[str, Any]:
    """Have the child do the job; returns the outcome's body (see ``session.connection.GuestOutcome``)."""
    job: Any = loop.job
    limits, started = job["limits"], monotonic()
    while sum(file.over for file in loop.inputs) < job["inputs"]:
        loop.step(None)
    copied = None
    if config["overlay"]:
        from _glovebox_guest.files.changes import WorkspaceCopy

        most = {"max_files": limits["workspace_files"], "max_bytes": limits["workspace_bytes"]}
        try:
            copied = WorkspaceCopy(*config["overlay"], **most)
        except (ValueError, OSError) as problem:
            return {**_NOT_STARTED, "refused": str(problem)[:300]}
    payload, environment = dict(job["payload"]), {}
    relays: list[Relay] = []
    proxy = None
    # Only then is it imported here as well: the child has to, and that takes milliseconds.
    module: Any = _module(job["kind"]) if config["proxy"] else None
    if hasattr(module, "ask"):
        payload = module.ask(loop, payload, started + limits["wall_seconds"] * _ASKING_SHARE)
    if getattr(module, "PROXY", False):
        from _glovebox_guest.proxy.listener import Proxy

        proxy = Proxy(loop, lambda text: relays[1].say(f"[glovebox] {text}\n".encode("utf-8", "replace")))
        environment = {**job.get("environment", {}), **proxy.environment}

    began, ahead_ms = monotonic(), clock(child.pid) * 1000
    child.begin({"kind": job["kind"], "payload": payload, "limits": limits, "environment": environment})
    for descriptor, kind in ((child.stdout, "stdout"), (child.stderr, "stderr"), (child.result, "result")):
        relays.append(Relay(loop, descriptor, kind, _MAX_RESULT if kind == "result" else limits["printed_bytes"]))
    deadline = started + limits["wall_seconds"]
    stopped, status, peak_bytes, cpu_ms = _wait(loop, child, deadline, relays, limits["cpu_seconds"])
    elapsed = monotonic() - began
    if proxy is not None:
        proxy.close()
    _kill_everything()
    # The kernel takes longer to free a process's memory than most programs run. Do not wait for it where nothing else
    # ran that counts, and no written file could still change.
    written = copied is not None or _holds_anything(config["output"])
    if written or cpu_ms is None:
        reap_everything()
    _drain(loop, relays)
    sent = collected(loop, limits, config, copied, deadline) if written else {"skipped": []}
    cpu_ms = _reaped() if cpu_ms is None else cpu_ms
    return {
        "stopped": stopped or ("output" if any(relay.overflowed for relay in relays) else ""),
        "status": status,
        "wall_ms": elapsed * 1000,
        "cpu_ms": max(0.0, cpu_ms - ahead_ms),
        "memory_peak_bytes": peak_bytes,
        **sent,
    }


def collected(
    loop: Loop, limits: Mapping[str, int], config: Mapping[str, Any], copied: Any, deadline: float
) -> dict[str, object]:
    """Send the patch of the workspace and the files of ``/output``; returns what was skipped, and what was changed."""
    room, files = limits["output_bytes"], limits["output_files"]
    changes = None
    if copied is not None:
        changes, patch = copied.compare(room)
        changes["patch"] = bool(patch)
        if patch:
            # Before the program's own files: none of them can take its name.
            send(loop, BytesIO(patch), "", len(patch), kind="patch")
            room, files = room - len(patch), files - 1
    skipped: list[dict[str, object]] = []
    if config["output"]:
        skipped, pictures = collect(loop, config["output"], max_files=files, max_bytes=room)
        if pictures:
            _show(loop, config, pictures, min(monotonic() + _PICTURE_SECONDS, deadline + _LATE_SECONDS))
    return {"skipped": skipped, "changes": changes}


def _show(loop: Loop, config: Mapping[str, Any], pictures: list[Picture], deadline: float) -> None:
    """Have smaller copies made of pictures that a client would not take, by a child that is confined as the program."""
    from _glovebox_guest.pictures import header, smaller

    most = smaller.share((size for _, size, *_ in pictures), header.MAX_BYTES)
    large = [(name, size) for name, size, media_type, head in pictures if not header.fits(head, media_type, size, most)]
    while sum(size for _, size in large) > _PICTURE_BYTES:
        large.remove(max(large, key=lambda each: each[1]))
    if not large:
        return
    contents = []
    for name, size in large:  # read once more: nothing has changed since they were sent
        with opened(os.path.join(config["output"], name)) as file:
            contents.append((name, file.read(size)))
    child = children.fork(lambda: _confine(config), lambda _: smaller.show_all)
    limits = {"cpu_seconds": _PICTURE_CPU_SECONDS, "memory_bytes": _PICTURE_MEMORY}
    child.begin({"payload": {"pictures": contents, "most": most}, "limits": limits})
    relay = Relay(loop, child.result, "shown", _MAX_RESULT)
    _wait(loop, child, deadline, [relay], _processor_seconds() + _PICTURE_CPU_SECONDS)
    _kill_everything()
    _drain(loop, [relay])


def _drain(loop: Loop, relays: list[Relay]) -> None:
    drained = monotonic() + _DRAIN_SECONDS
    while not all(relay.empty for relay in relays) and monotonic() < drained:
        loop.step(drained)
    for relay in relays:
        relay.close()


def _wait(
    loop: Loop, child: children.Child, deadline: float, relays: list[Relay], cpu_seconds: float
) -> tuple[str, int, int, float | None]:
    """Wait until the child ends, reports that its task is over, or has to be stopped.

    Return why it was stopped ("time", "output" or "processor", "" if it ended by itself), its exit status or minus the
    signal, its peak of memory, and the milliseconds of all processes where it was alone and is not reaped yet.
    """
    pid = child.pid
    said: list[bytes] = []

    def hear() -> None:
        try:
            said.append(os.read(child.done, 1))
        except BlockingIOError:
            return
        loop.watch(child.done, None)

    loop.watch(child.done, hear)
    reason, look = "", monotonic() + _LOOK_SECONDS
    try:
        while True:
            done, status, usage = os.wait4(pid, os.WNOHANG)
            if done and not said:
                hear()
            # Checked first: a program that exceeded its output may have ended by now, and that is not how it ended.
            overflowed = any(relay.overflowed for relay in relays)
            over = bool(said and said[0]) and not overflowed
            if done:
                break
            if over and (alone := _of_one_alone(pid)):
                return "", said[0][0], alone[1], alone[0]
            if not over:
                reason = loop.stop or ("time" if monotonic() >= deadline else "output" if overflowed else "")
            if not over and not reason and monotonic() >= look:
                reason = "processor" if _processor_seconds() > cpu_seconds else ""
                look = monotonic() + _LOOK_SECONDS
            if over or reason:
                _kill_everything()  # all: a process that traces this one would keep it from being reaped
                _, status, usage = os.wait4(pid, 0)
                break
            loop.step(min(deadline, look))
            _reap_orphans(pid)
    finally:
        loop.watch(child.done, None)
        os.close(child.done)
    code = said[0][0] if over else os.waitstatus_to_exitcode(status)
    return reason or ("output" if overflowed else ""), code, usage.ru_maxrss * 1024, None


def _reaped() -> float:
    """Return the milliseconds of everything reaped; not by ``os.times``, which counts in steps of 10 ms."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (spent.ru_utime + spent.ru_stime) * 1000


def _of_one_alone(pid: int) -> tuple[float, int] | None:
    """Return milliseconds and peak bytes of a live process and of all we reaped; None if others live or were its own.

    The memory is that since its last exec(2): earlier peaks are in the host's count alone.
    """
    try:
        if {name for name in os.listdir("/proc") if name.isdigit()} != {"1", str(pid)}:
            return None
        fields = _fields(str(pid))
        seconds = clock(pid)
        if not seconds or fields[_CMINFLT] or any(fields[_CUTIME : _CUTIME + 2]):
            return None
        sizes = measure.status(measure.lines(f"/proc/{pid}/status"))
        # gVisor reports no peak; there the host counts the whole sandbox.
        return _reaped() + seconds * 1000, int((sizes.get("VmHWM") or sizes["VmRSS"]).split()[0]) * 1024
    except (OSError, LookupError, ValueError):
        return None  # it has just ended; or the kernel does not report it


def clock(pid: int) -> float:
    """Return the seconds of processor time of one process; 0 where the kernel does not report them."""
    # Its number as clock_getcpuclockid(3) makes it; the columns of /proc/PID/stat count in steps of 10 ms.
    try:
        return clock_gettime(~pid << 3 | _CPU_CLOCK)
    except OSError:
        return 0.0


def _processor_seconds() -> float:
    """Return the time of all other processes in this pid namespace and of all reaped ones.

    Children of a parent that ignores SIGCHLD are not counted: wall time and the processor quota bound those.
    """
    total = _reaped() / 1000
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            try:
                total += sum(_fields(name)[_UTIME : _UTIME + 4]) / _TICKS
            except OSError:
                continue  # it has just ended, and is counted as a reaped one next time
    return total


def _fields(pid: str) -> list[int]:
    """Return the columns of /proc/PID/stat behind the state, see proc_pid_stat(5). Raises OSError."""
    # The command may hold spaces and brackets: only what follows the last bracket is in columns.
    return [int(field) for field in kernel.read(f"/proc/{pid}/stat").rpartition(")")[2].split()[1:]]


def _reap_orphans(pid: int) -> None:
    """Reap the orphans that process 1 inherits: they would count against the limit of processes."""
    while True:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None or found.si_pid == pid:
            return
        os.waitpid(found.si_pid, 0)


def _kill_everything() -> None:
    """Kill every other process here: daemons, double forks, those that ignore SIGTERM."""
    try:
        # As process 1 of a pid namespace, -1 is everything in it but ourselves, see kill(2).
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        return


def reap_everything() -> None:
    """Wait for every child."""
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _holds_anything(output: str) -> bool:
    """Return whether there may be something to collect."""
    try:
        return bool(output) and bool(os.listdir(output))
    except OSError:
        return True


def warm_up() -> None:
    """Prepare what children need first, before they are forked."""
    children.prepare()
    python.prepare()


def prefault(child: children.Child, config: Mapping[str, Any]) -> None:
    """Do what every job needs once more in this process, after the fork: shared pages are copied when used.

    It saves a millisecond of the call in a zygote's fork, ten in gVisor.
    """
    host, guest = wire.Wire("host"), wire.Wire("guest")
    host.receive(guest.message("ready", {}))
    guest.receive(host.message("job", {"limits": {}, "inputs": 0}))
    stream, frames = guest.open("stdout", {})
    said = frames + guest.data(stream, b"0") + guest.end(stream) + guest.message("outcome", _NOT_STARTED)
    host.receive(said)
    look = select.poll()
    look.register(child.stdout, select.POLLIN)
    look.poll(0)
    _of_one_alone(child.pid)
    _holds_anything(config["output"])


def ready_child(config: Mapping[str, Any]) -> children.Child:
    """Fork a process for a job that has not arrived yet."""

    def ahead() -> None:
        _confine(config)
        _touch(config)

    return children.fork(ahead, _task)


def live(config: Mapping[str, Any], wait: Callable[[], dict[str, Any]]) -> NoReturn:
    """Be the process for a job, which ``wait`` returns, after process 1 in C has confined it."""

    def ahead() -> None:
        write_only.open_without_reading()
        _touch(config)

    children.live(lambda: None, ahead, wait, _task)


def _touch(config: Mapping[str, Any]) -> None:
    python.elsewhere = config["elsewhere"]
    # A little program touches the memory that any other needs: later the program would wait for it.
    python.warm_up()


def _task(order: Mapping[str, Any]) -> children.Task:
    for name, value in order["environment"].items():
        os.environ[name] = value
    task: children.Task = _module(order["kind"]).run
    return task


def _module(kind: str) -> Any:
    # A closed list: the folder is read-only, and the host asks for nothing else.
    return __import__(f"_glovebox_guest.jobs.{kind}", fromlist=["run"])


def _confine(config: Mapping[str, Any]) -> None:
    """Make ``/output`` write-only for the child before its order, unless the plan's kernel cannot."""
    if config["landlock"]:
        landlock.restrict_output_write_only(also_writable=tuple(config["overlay"][1:]))
        write_only.open_without_reading()
    if config["program_filter"]:
        kernel.add_filter(bytes.fromhex(config["program_filter"]))
