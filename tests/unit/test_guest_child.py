"""The process untrusted code runs in, started for real: what it holds, what it may, and how its end is told."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from sandboxes.guest import child as children
from sandboxes.guest.emit import HEADER, Emit
from sandboxes.guest.kernel import get_dumpable, set_dumpable
from sandboxes.guest.work import _reap_orphans

LIMITS = {"cpu_seconds": 2}
Task = Callable[[Mapping[str, Any], Emit], int | None]


def nothing() -> None:
    """Warm nothing up, confine nothing: Landlock has tests of its own."""


@pytest.fixture(autouse=True)
def guest_state() -> Iterator[None]:
    """Put back what the guest changes in a process."""
    before = signal.getsignal(signal.SIGCHLD), get_dumpable()
    yield
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, before[0])
    set_dumpable(before[1])


def read(descriptor: int, most: int = -1) -> bytes:
    """Everything until the end."""
    with os.fdopen(descriptor, "rb") as file:
        return file.read(most)


def run(task: Task, limits: dict[str, int] | None = None) -> tuple[int, bytes, bytes, Any]:
    """Exit status, standard output, standard error and the value of one task."""
    child = children.fork(nothing, lambda _order: task)
    child.begin({"payload": {}, "limits": limits or LIMITS})
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
    """It cannot raise them, and leaves no core file."""

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
    """Fail to confine."""
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
        deadline = time.monotonic() + 10
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
    """Its end tells, and the guest goes on to report it."""
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
    """What the guest ignores or handles for itself is not inherited."""

    def task(_payload: Mapping[str, Any], _emit: Emit) -> None:
        os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert run(task)[0] == status
    finally:
        signal.signal(signal.SIGINT, before)


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
