"""The process untrusted code runs in, started for real: what it holds, what it may, and how its end is told."""

import atexit
import gzip
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from _glovebox_guest import measure
from _glovebox_guest.jobs import python
from _glovebox_guest.kernel import prctl
from _glovebox_guest.loop import Loop, Relay
from _glovebox_guest.program import child as children
from _glovebox_guest.program.emit import HEADER, Emit
from _glovebox_guest.wire import Wire
from _glovebox_guest.work import _reap_orphans, clock

LIMITS = {"cpu_seconds": 2}
Task = Callable[[Mapping[str, Any], Emit], int | None]


def nothing() -> None:
    """Warm nothing up, confine nothing: Landlock has tests of its own."""


@pytest.fixture(autouse=True)
def guest_state() -> Iterator[None]:
    before = signal.getsignal(signal.SIGCHLD), prctl("PR_GET_DUMPABLE")
    yield
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, before[0])
    prctl("PR_SET_DUMPABLE", before[1])


def read(descriptor: int, most: int = -1) -> bytes:
    os.set_blocking(descriptor, True)  # the guest's loop waits elsewhere
    with os.fdopen(descriptor, "rb") as file:
        return file.read(most)


def run(
    task: Task, limits: dict[str, int] | None = None, payload: dict[str, Any] | None = None
) -> tuple[int, bytes, bytes, Any]:
    child = children.fork(nothing, lambda _order: task)
    child.begin({"payload": payload or {}, "limits": limits or LIMITS})
    said = read(child.done, 1)
    if said:
        # It waits for its end, as a program whose memory nobody waits for.
        os.kill(child.pid, signal.SIGKILL)
    out, err, result = read(child.stdout), read(child.stderr), read(child.result)
    _, status = os.waitpid(child.pid, 0)
    value = json.loads(result[HEADER.size :]) if result else None
    return said[0] if said else os.waitstatus_to_exitcode(status), out, err, value


def test_a_task_has_its_streams_and_its_result() -> None:
    """The control: all three pipes, and the status it returns."""

    def task(_payload: Mapping[str, Any], emit: Emit) -> int:
        print("out")  # noqa: T201
        print("err \udcff", file=sys.stderr)  # noqa: T201
        emit.value({"stdin": sys.stdin.read()})
        return 7

    assert run(task) == (7, b"out\n", b"err \\udcff\n", {"stdin": ""})


def test_a_task_holds_no_descriptor_of_the_guests() -> None:
    """Whatever was open before: 0 to 4 and nothing else, also when low numbers were free."""
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
    for descriptor in held:
        os.set_inheritable(descriptor, True)

    def task(_payload: Mapping[str, Any], emit: Emit) -> None:
        found = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208
        emit.value([[n, os.readlink(f"/proc/self/fd/{n}")[:5]] for n in found if os.path.exists(f"/proc/self/fd/{n}")])  # noqa: PTH110, PTH115

    try:
        _, _, _, value = run(task)
    finally:
        for descriptor in held:
            os.close(descriptor)
    assert sorted(value) == [[0, "/dev/"], [1, "pipe:"], [2, "pipe:"], [3, "pipe:"], [4, "pipe:"]]


@pytest.mark.parametrize("descriptor", [3, 4])
def test_a_program_started_by_the_task_does_not_get_its_pipes(descriptor: int) -> None:
    """Descriptors 3 and 4 are closed on exec: a child program cannot write values, or an end, by accident."""

    def task(_payload: Mapping[str, Any], _emit: Emit) -> None:
        os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", f"import os; os.write({descriptor}, b'x')"])  # noqa: S606

    status, _, err, value = run(task)
    assert status == 1
    assert b"Bad file descriptor" in err
    assert value is None


def test_a_task_is_in_a_session_of_its_own_with_its_limits() -> None:
    def task(_payload: Mapping[str, Any], emit: Emit) -> None:
        import resource  # noqa: PLC0415

        names = ("RLIMIT_CPU", "RLIMIT_CORE", "RLIMIT_NOFILE", "RLIMIT_NPROC")
        found: dict[str, Any] = {name: resource.getrlimit(getattr(resource, name)) for name in names}
        mapped = resource.getrlimit(resource.RLIMIT_AS)[0]
        emit.value({**found, "session": os.getsid(0) == os.getpid(), "mapped": 2**29 < mapped < 2**33})

    _, _, _, value = run(task, {"cpu_seconds": 2, "memory_bytes": 2**29, "pids": 50})
    assert value == {
        "RLIMIT_CPU": [2, 3], "RLIMIT_CORE": [1, 1], "RLIMIT_NOFILE": [1024, 1024], "RLIMIT_NPROC": [50, 50],
        "session": True, "mapped": True,
    }  # fmt: skip


def refused(_order: dict[str, Any]) -> Task:
    raise OSError("Landlock is absent")


@pytest.mark.parametrize("broken", ["work", "ahead"])
def test_a_harness_that_fails_is_told_apart_from_the_program(broken: str) -> None:
    """What cannot be confined does not run: status 70, never the task."""

    def task(_payload: Mapping[str, Any], emit: Emit) -> None:
        emit.value("ran")

    def fail() -> None:
        raise OSError("no memory")

    child = children.fork(nothing, refused) if broken == "work" else children.fork(fail, lambda _order: task)
    child.begin({"payload": {}, "limits": LIMITS})
    results = [read(child.stdout), read(child.stderr), read(child.result)]
    assert os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]) == 70
    assert results[2] == b""


def test_a_child_that_waits_has_nothing_of_the_guests_and_runs_nothing_without_an_order() -> None:
    """Prepared before there is a job: the guest's end, when it comes first, is its end as well."""

    def work(_order: dict[str, Any]) -> Task:
        os.write(1, b"there was an order")
        raise AssertionError

    held = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(held, True)
    child = children.fork(nothing, work)
    try:
        waits = f"/proc/{child.pid}/fd"
        deadline = time.monotonic() + 30
        while len(found := os.listdir(waits)) != 6:  # noqa: PTH208 - it puts them into place
            assert time.monotonic() < deadline, found
        assert sorted(found) == ["0", "1", "2", "3", "4", "5"]
        assert os.getsid(child.pid) == child.pid
    finally:
        os.close(held)
        os.close(child._order)
    results = [read(child.stdout), read(child.stderr), read(child.result), read(child.done)]
    assert os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]) == 70
    assert (results[0], *results[2:]) == (b"", b"", b"")


def test_an_order_larger_than_a_pipe_arrives_whole_and_its_descriptor_is_gone() -> None:
    """A program of a megabyte is one order; the program finds no descriptor to the guest."""
    order: dict[str, Any] = {"payload": {"code": "x" * 2**20}, "limits": LIMITS}

    def task(payload: Mapping[str, Any], emit: Emit) -> None:
        emit.value([len(payload["code"]), os.path.exists("/proc/self/fd/5")])  # noqa: PTH110

    child = children.fork(nothing, lambda _order: task)
    child.begin(order)
    assert read(child.done, 1) == b"\0"
    os.kill(child.pid, signal.SIGKILL)
    out, err, result = read(child.stdout), read(child.stderr), read(child.result)
    os.waitpid(child.pid, 0)
    assert (out, err) == (b"", b"")
    assert json.loads(result[HEADER.size :]) == [2**20, False]


def test_an_order_for_a_child_that_is_dead_is_no_failure_of_its_own() -> None:
    before = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        child = children.fork(nothing, refused)
        os.kill(child.pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]) == -9
        child.begin({"payload": {"code": "x" * 2**20}, "limits": LIMITS})
    finally:
        signal.signal(signal.SIGPIPE, before)
    for descriptor in (child.stdout, child.stderr, child.result, child.done):
        assert read(descriptor) == b""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, -15), (signal.SIGINT, 70), (signal.SIGKILL, -9)])
def test_signals_mean_to_a_task_what_they_mean_to_any_program(number: int, status: int) -> None:
    def task(_payload: Mapping[str, Any], _emit: Emit) -> None:
        os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert run(task)[0] == status
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_write_to_a_pipe_that_nobody_reads_is_an_error_of_the_program() -> None:
    """As in any interpreter, with its line; ``communicate`` with a program that has ended is none at all."""
    code = "import os\nreader, writer = os.pipe()\nos.close(reader)\nos.write(writer, b'x')"
    status, _, err, value = run(program, payload={"code": code})
    assert (status, value["error"]["type"], value["error"]["line"]) == (1, "BrokenPipeError", 4)
    assert "Traceback" in err.decode()
    code = (
        "import subprocess, sys\n"
        "started = subprocess.Popen([sys.executable, '-I', '-c', ''], stdin=subprocess.PIPE)\n"
        "started.wait()\nstarted.communicate(bytes(2**20))\nstarted.returncode"
    )
    assert run(program, payload={"code": code})[3]["value"] == "0"


def test_a_program_that_prints_too_much_is_not_told_of_a_broken_pipe() -> None:
    """It waits in its last write until it is ended; what is beyond the bound is neither sent nor waited for."""
    ours, theirs = socket.socketpair()
    reader, writer = os.pipe()
    loop, host = Loop(theirs.fileno(), theirs.fileno(), ""), Wire("host")
    host.receive(loop.wire.message("ready", {}))
    loop.wire.receive(host.message("job", {}))
    with ours, theirs, os.fdopen(writer, "wb", buffering=0) as printed:
        relay = Relay(loop, reader, "stdout", 10)
        printed.write(b"x" * 11)
        loop.step(None)
        assert relay.overflowed
        printed.write(b"x")
        relay.on_credit()
        assert not loop.watches(reader)
        assert relay.empty
        relay.close()
        with pytest.raises(BrokenPipeError):
            printed.write(b"x")


def test_orphans_are_reaped_and_the_task_is_not() -> None:
    """Neither a busy loop nor a lost status: what is dead is taken away, up to the task itself."""
    orphan = os.fork()
    if orphan == 0:
        os._exit(0)
    task = os.fork()
    if task == 0:
        os._exit(5)
    for pid in (orphan, task):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    _reap_orphans(task)
    with pytest.raises(ChildProcessError):
        os.waitpid(orphan, 0)
    assert os.waitstatus_to_exitcode(os.waitpid(task, 0)[1]) == 5


def test_what_a_task_has_put_in_the_place_of_its_last_word_is_left_alone(tmp_path: Path) -> None:
    """Nothing is written to a file of its own; then its end tells how it ended, as it does for a fork of it."""

    def task(_payload: Mapping[str, Any], _emit: Emit) -> int:
        os.dup2(os.open(tmp_path / "own", os.O_WRONLY | os.O_CREAT), 4)
        return 7

    def fork(_payload: Mapping[str, Any], _emit: Emit) -> int:
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            os._exit(8)
        return 0

    assert run(task)[0] == 7
    assert (tmp_path / "own").read_bytes() == b""
    assert run(fork)[0] == 8


def program(payload: Mapping[str, Any], emit: Emit) -> int:
    """A caller's program, in a process that has nothing of this one's to do at its end."""
    atexit._clear()
    return python.run(payload, emit)


@pytest.mark.parametrize("replaced", ["os.write", "os._exit", "signal.pthread_sigmask"])
def test_what_a_program_has_put_in_the_place_of_a_function_does_not_keep_it_from_ending(replaced: str) -> None:
    """A mock that was left behind, for instance."""
    code = f"import os, signal\n{replaced} = lambda *_: 0\nraise SystemExit(3)"
    assert run(program, payload={"code": code}) == (3, b"", b"", {"value": None, "truncated": False, "error": None})


@pytest.mark.timeout(10)  # ten times as long as it waits for somebody
def test_a_child_ends_by_itself_where_nobody_ends_it() -> None:
    """With the same status: a guest that has not heard sees that."""

    def task(_payload: Mapping[str, Any], _emit: Emit) -> int:
        return 7

    child = children.fork(nothing, lambda _order: task)
    child.begin({"payload": {}, "limits": LIMITS})
    assert os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]) == 7
    assert read(child.done) == b"\7"
    for descriptor in (child.stdout, child.stderr, child.result):
        os.close(descriptor)


def test_the_guest_does_not_wait_for_what_somebody_else_has_taken() -> None:
    """A program can read from its own output, and so between the guest's look and its own reading."""

    def task(_payload: Mapping[str, Any], _emit: Emit) -> None:
        time.sleep(60)

    child = children.fork(nothing, lambda _order: task)
    try:
        for descriptor in (child.stdout, child.stderr, child.result, child.done):
            with pytest.raises(BlockingIOError):
                os.read(descriptor, 1)
            os.close(descriptor)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
        os.close(child._order)


def test_what_a_program_did_not_close_is_written(tmp_path: Path) -> None:
    code = f"""
import csv, gzip, io, os, sys
os.chdir({str(tmp_path)!r})
table = csv.writer(open("table.csv", "w"))
table.writerow([1, 2])
kept = [open("bytes", "wb"), gzip.open("text.gz", "wt"), gzip.open("bytes.gz", "wb")]
kept[0].write(b"data")
kept[1].write("text")
kept[2].write(b"data")
open("closed", "w").close()
sys.stdout.write("partial")
sys.stdout = io.StringIO()
"""
    status, out, err, _ = run(program, payload={"code": code})
    assert (status, out, err) == (0, b"partial", b"")
    assert (tmp_path / "table.csv").read_bytes() == b"1,2\r\n"
    assert (tmp_path / "bytes").read_bytes() == b"data"
    assert gzip.decompress((tmp_path / "text.gz").read_bytes()) == b"text"
    assert gzip.decompress((tmp_path / "bytes.gz").read_bytes()) == b"data"


_HIDES = "def hide(self): raise ValueError\nclass E(Exception): __str__ = hide\n"


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("import sys; sys.stdout = None", 0, ""),
        ("import sys; del sys.stdout, sys.stderr", 0, ""),
        ("import sys; sys.stdout = object()", 0, ""),
        ("import sys; sys.stderr.close(); raise SystemExit('why')", 1, ""),
        ("import sys; sys.stderr = None; 1/0", 1, ""),
        (f"{_HIDES}raise E", 1, "exception str() failed"),
        (f"{_HIDES}raise SystemExit(E())", 1, "<E that cannot be shown>"),
        ("import os; os.closerange(3, 1000)", 0, ""),
    ],
)
def test_a_programs_end_is_its_own_whatever_it_left_behind(code: str, status: int, said: str) -> None:
    """Never status 70, which means that we failed, and never a traceback of the guest's own."""
    found, _, err, _ = run(program, payload={"code": code})
    assert found == status
    assert said in err.decode()
    assert "_glovebox_guest" not in err.decode()


def test_a_program_that_leaves_no_memory_to_tell_of_it_failed_for_want_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds on to the last page, so nothing can be imported or formatted; never status 70, nor our traceback."""
    # The child of this process would have pytest's hook, which needs memory; a guest has the interpreter's own.
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    code = (
        "held, size = None, 1 << 20\nwhile size:\n    try:\n        held = (held, bytearray(size))\n"
        "    except MemoryError:\n        size //= 2\nheld = (held, bytearray(1 << 20))"
    )
    status, _, err, value = run(program, limits={**LIMITS, "memory_bytes": 1 << 20}, payload={"code": code})
    assert status == 1
    # Between the lines the interpreter says, where it can, that a generator of the traceback's had no memory to end.
    told = re.sub("Exception ignored (?:in|on).*", "", err.decode()).rstrip().splitlines()
    # Where a page is left after all, what to do next is told too.
    assert told[-1:] == ["MemoryError"] or (
        told[-2:-1] == ["MemoryError"] and told[-1].startswith("(Load less at a time")
    ), (told, value)
    assert value["error"]["type"] == "MemoryError"


@pytest.mark.long
def test_whatever_little_memory_is_left_to_tell_of_an_error_it_is_told() -> None:
    """To a mebibyte, closely below 200 KiB: what is imported to tell it then ends, in narrow windows, as no Python."""
    code = (
        "spare = bytearray({} << 10)\nheld, size = None, 1 << 20\nwhile size:\n    try:\n"
        "        held = (held, bytearray(size))\n    except MemoryError:\n        size //= 2\n"
        "spare = None\nheld = (held, bytearray(1 << 20))"
    )
    limits = {**LIMITS, "memory_bytes": 4 << 20}
    for left in (*range(0, 200, 8), *range(200, 1000, 80), *range(1000, 1024)):
        status, _, err, value = run(program, limits=limits, payload={"code": code.format(left)})
        assert (status, value and value["error"]["type"]) == (1, "MemoryError"), (left, err)


@pytest.mark.parametrize(
    "code",
    [
        (
            "import sys\nclass Full:\n    def write(self, text, out=sys.stderr, tries=[]):\n"
            "        tries.append(text)\n"
            "        if len(tries) == 1:\n            raise MemoryError\n        return out.write(text)\n"
            "sys.stderr = Full()\n1 / 0"
        ),
        (
            "import os, sys\ndef write(*given, real=os.write, tries=[]):\n    tries.append(given)\n"
            "    if len(tries) < 4:\n        raise OSError(12, 'no page')\n    return real(*given)\n"
            "class Full:\n    def write(self, text, write=write):\n        return write(2, text.encode())\n"
            "os.write, sys.stderr = write, Full()\n1 / 0"
        ),
    ],
    ids=["only printing it", "a pipe in a full control group"],
)
def test_an_error_is_named_where_there_is_no_memory_to_print_it(code: str) -> None:
    """The last page was gone when it was written; or ENOMEM, once for the traceback and twice for the name."""
    status, _, err, value = run(program, payload={"code": code})
    assert (status, err.decode()) == (1, "ZeroDivisionError\n")
    assert value["error"] == {"type": "ZeroDivisionError", "message": "", "line": None}


def test_a_fork_that_runs_to_its_end_hands_back_nothing() -> None:
    """One value a job is believed, the first: it has to be the program's own."""
    code = "import os\nif os.fork() == 0:\n    raise ValueError\nos.wait()[1] >> 8"
    status, _, err, value = run(program, payload={"code": code})
    assert status == 0
    assert "ValueError" in err.decode()
    assert (value["value"], value["error"]) == ("1", None)


def test_what_a_process_has_used_is_told_by_its_clock_alone() -> None:
    """As it goes on, in less than the 10 ms of other counts; 0 for one that is not there."""
    child = children.fork(nothing, refused)
    try:
        deadline = time.monotonic() + 30
        while not (used := clock(child.pid)) and time.monotonic() < deadline:
            time.sleep(0.001)  # it has not run yet
        assert 0 < used <= clock(child.pid)
        assert used * 100 % 1, used
    finally:
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
        os.close(child._order)
        for descriptor in (child.stdout, child.stderr, child.result, child.done):
            os.close(descriptor)
    assert clock(child.pid) == 0


def test_a_programs_name_is_nothing_but_its_name() -> None:
    """A carriage return in it begins no new line of what the kernel says about its memory."""
    pid = os.fork()
    if pid == 0:
        Path("/proc/self/comm").write_bytes(b"x\rVm")
        signal.pause()
    try:
        deadline = time.monotonic() + 30
        while b"x\rVm\n" not in Path(f"/proc/{pid}/status").read_bytes():
            assert time.monotonic() < deadline
        assert int(measure.status(measure.lines(f"/proc/{pid}/status"))["VmRSS"].split()[0]) > 1_000
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
