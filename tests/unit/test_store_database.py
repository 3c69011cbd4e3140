"""The SQLite file of a store: whole transactions among processes, and a sentence where it cannot be used."""

import asyncio
import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess  # noqa: TID251 - whole processes, to be killed
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from glovebox_server.errors import StoreError
from glovebox_server.stores import database
from glovebox_server.stores.database import Worker, opened

SCHEMA = "CREATE TABLE counted (name TEXT PRIMARY KEY, n INTEGER NOT NULL); INSERT INTO counted VALUES ('a', 0)"


def count(connection: sqlite3.Connection) -> int:
    """Read the number, then write one more: lost where two do it at once."""
    (n,) = connection.execute("SELECT n FROM counted").fetchone()
    connection.execute("UPDATE counted SET n = ?", (n + 1,))
    return int(n) + 1


def counted(connection: sqlite3.Connection) -> int:
    """Read it."""
    (n,) = connection.execute("SELECT n FROM counted").fetchone()
    return int(n)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a store would be."""
    return tmp_path / "governance" / "counted.sqlite"


@contextlib.contextmanager
def _unusable(words: str, fix: str) -> Iterator[None]:
    with pytest.raises(StoreError, match=words) as caught:
        yield
    assert fix in caught.value.fix
    assert caught.value.refusal.rule == "store"
    assert "/" not in caught.value.refusal.reason + caught.value.refusal.hint.replace("-wal", "")


async def test_a_transaction_is_done_in_another_thread_and_kept(path: Path) -> None:
    """The control is the file as it is read afterwards, by another connection."""
    threads = set()

    def work(connection: sqlite3.Connection) -> int:
        threads.add(threading.get_ident())
        return count(connection)

    with opened(path, SCHEMA) as store:
        assert [await store.transact(work) for _ in range(3)] == [1, 2, 3]
        assert await store.query(counted) == 3
    assert threading.get_ident() not in threads
    assert "glovebox-counted" not in {each.name for each in threading.enumerate()}
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    with opened(path, SCHEMA) as store:
        assert store.query_now(counted) == 3
    assert [each.name for each in path.parent.iterdir()] == [path.name]


async def test_what_fails_within_a_transaction_undoes_all_of_it(path: Path) -> None:
    """One that is our own mistake is raised as it is; the next transaction works."""

    def fails(connection: sqlite3.Connection) -> None:
        count(connection)
        raise ValueError("a mistake")

    with opened(path, SCHEMA) as store:
        with pytest.raises(ValueError, match="a mistake"):
            await store.transact(fails)
        with pytest.raises(sqlite3.OperationalError, match="no such table"):
            await store.transact(lambda connection: connection.execute("SELECT * FROM no_table"))
        assert await store.transact(count) == 1


async def test_a_cancelled_caller_leaves_whole_transactions(path: Path) -> None:
    """Cancelled while it is at work it is done; cancelled while it waits it is not begun."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(connection: sqlite3.Connection) -> int:
        begun.set()
        go_on.wait(10)
        return count(connection)

    with opened(path, SCHEMA) as store:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(store.transact, slow)
            await anyio.to_thread.run_sync(begun.wait, 10)
            tasks.start_soon(store.transact, count)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
            go_on.set()
        assert await store.query(counted) == 1


PROGRAM = """
import sys, pathlib
from glovebox_server.stores.database import opened
from tests.unit.test_store_database import SCHEMA, count
with opened(pathlib.Path(sys.argv[1]), SCHEMA, lock_wait=60) as store:
    for _ in range(int(sys.argv[2])):
        print(store.transact_now(count), flush=True)
"""


def _counter(path: Path, times: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(path), str(times)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


def test_several_processes_lose_no_transaction(path: Path) -> None:
    """Four begin with no file and count to 400 together: each number is given once."""
    running = [_counter(path, 100) for _ in range(4)]
    numbers = [int(line) for each in running for line in each.communicate(timeout=60)[0].split()]
    assert [each.returncode for each in running] == [0] * 4
    assert sorted(numbers) == list(range(1, 401))


@pytest.mark.long
def test_what_was_told_survives_sigkill(path: Path) -> None:
    """Of each killed process all that it told is there, and at most the one more that it had no time to tell."""
    for _ in range(20):
        running = _counter(path, 1_000_000)
        assert running.stdout is not None
        told = [running.stdout.readline() for _ in range(20)]
        running.kill()
        told += running.stdout.read().splitlines(keepends=True)
        running.communicate(timeout=60)
        most = max(int(line) for line in told if line.endswith("\n"))
        with opened(path, SCHEMA) as store:
            assert most <= store.query_now(counted) <= most + 1


@pytest.mark.parametrize("where", ["header", "page", "cut"])
def test_a_damaged_file_is_told_and_left_as_it_is(where: str, path: Path) -> None:
    """Never made anew; the control is the same file before."""
    with opened(path, SCHEMA) as store:
        assert store.transact_now(count) == 1
    content = bytearray(path.read_bytes())
    if where == "header":
        content[:16] = b"no database here"
    elif where == "page":
        content[4096:4200] = b"\xff" * 104
    path.write_bytes(b"" if where == "cut" else content)
    with _unusable("damaged", "put a whole copy"), opened(path, SCHEMA):
        pass
    assert path.read_bytes() == (b"" if where == "cut" else content)


def test_a_file_removed_or_replaced_while_in_use_is_told(path: Path, tmp_path: Path) -> None:
    """What would be written to it nobody else would see; put back, it is used again."""
    with opened(path, SCHEMA) as store:
        store.transact_now(count)
        path.rename(tmp_path / "aside")
        with _unusable("No such file", "writable"):
            store.transact_now(count)
        shutil.copy(tmp_path / "aside", path)
        with _unusable("removed or replaced", "Put it back"):
            store.transact_now(count)
        path.unlink()
        (tmp_path / "aside").rename(path)
        assert store.transact_now(count) == 2


def test_a_file_of_other_tables_as_of_another_version_is_refused(path: Path) -> None:
    """Whichever is later; its own still opens it (the control)."""
    with opened(path, SCHEMA) as store:
        store.transact_now(count)
    for other in (f"{SCHEMA}; ALTER TABLE counted ADD COLUMN more TEXT", "CREATE TABLE other (n)"):
        with _unusable("tables", "put a whole copy"), opened(path, other):
            pass
    with opened(path, SCHEMA) as store:
        store.transact_now(count)


@pytest.mark.parametrize("what", ["link", "open", "folder"])
def test_a_file_that_is_not_ours_alone_is_refused(what: str, path: Path, tmp_path: Path) -> None:
    """Before anything of it is read."""
    with opened(path, SCHEMA):
        pass
    if what == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif what == "open":
        path.chmod(0o640)
    else:
        path.parent.chmod(0o755)
    words, fix = ("link", "Move") if what == "link" else ("open to other users", "chmod")
    with _unusable(words, fix), opened(path, SCHEMA):
        pass


async def test_a_lock_that_another_process_keeps_is_told_in_time(path: Path) -> None:
    """The event loop goes on meanwhile; once it is let go, the store works."""
    with opened(path, SCHEMA) as holder, opened(path, SCHEMA, lock_wait=0.3) as store:
        held, go_on = threading.Event(), threading.Event()

        def hold(connection: sqlite3.Connection) -> None:
            held.set()
            go_on.wait(10)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(holder.transact, hold)
            await anyio.to_thread.run_sync(held.wait, 10)
            turns = 0

            async def tick() -> None:
                nonlocal turns
                while not go_on.is_set():
                    turns += 1
                    await anyio.sleep(0.01)

            tasks.start_soon(tick)
            with _unusable("holds its lock", "fuser"):
                await store.transact(count)
            assert await store.query(counted) == 0  # readers wait for nobody
            go_on.set()
        assert turns > 3
        assert await store.transact(count) == 1


async def test_who_waits_behind_one_that_waited_in_vain_fails_with_it(path: Path) -> None:
    """All of them after one wait, with the same sentence; the control is one that comes later, and waits itself."""
    wait = 0.5
    with opened(path, SCHEMA) as holder, opened(path, SCHEMA, lock_wait=wait) as store:
        held, go_on = threading.Event(), threading.Event()
        told: list[str] = []

        def hold(_: sqlite3.Connection) -> None:
            held.set()
            go_on.wait(30)

        async def one() -> None:
            with pytest.raises(StoreError) as caught:
                await store.transact(count)
            told.append(str(caught.value))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(holder.transact, hold)
            await anyio.to_thread.run_sync(held.wait, 10)
            began = anyio.current_time()
            async with anyio.create_task_group() as waiting:
                for _ in range(20):
                    waiting.start_soon(one)
            assert anyio.current_time() - began < 10 * wait
            assert len(told) == 20
            assert len(set(told)) == 1
            assert "holds its lock" in told[0]
            again = anyio.current_time()
            await one()
            assert anyio.current_time() - again >= wait * 0.8
            go_on.set()
        assert await store.transact(count) == 1


async def test_a_full_store_refuses_and_forgets_nothing(path: Path) -> None:
    """SQLITE_FULL, by its own bound: what was there can be read, and room given back is used."""
    with opened(path, SCHEMA) as store:
        await store.transact(count)
        await store.query(lambda connection: connection.execute("PRAGMA max_page_count = 8").fetchone())

        def fill(connection: sqlite3.Connection) -> None:
            count(connection)
            connection.execute("INSERT INTO counted VALUES (?, 0)", ("x" * 65536,))

        with _unusable("full", "Free space"):
            await store.transact(fill)
        assert await store.query(counted) == 1
        assert await store.transact(count) == 2


FULL_DISK = """
import os, pathlib, sqlite3, sys
from glovebox_server.errors import StoreError
from glovebox_server.stores.database import opened
from tests.unit.test_store_database import SCHEMA, count, counted
place = pathlib.Path(sys.argv[1])
with opened(place / "governance" / "counted.sqlite", SCHEMA) as store:
    store.transact_now(count)
    filler = os.open(place / "filler", os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(filler, bytes(4096))
    except OSError:
        pass
    told = 0
    try:
        while store.transact_now(count):
            told += 1
    except StoreError as error:
        print(error)
    assert store.query_now(counted) == 1 + told
    os.ftruncate(filler, 0)
    assert store.transact_now(count) == 2 + told
with opened(place / "governance" / "counted.sqlite", SCHEMA) as store:
    assert store.query_now(counted) == 2 + told
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_disk_refuses_and_forgets_nothing(tmp_path: Path) -> None:
    """ENOSPC, on a file system of its own; the control is the same store once there is room."""
    place = tmp_path / "small"
    place.mkdir(mode=0o700)
    script = f'mount -t tmpfs -o size=512k,mode=700 none {place} && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", script, "sh", sys.executable, "-c", FULL_DISK, str(place)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    assert "Free space" in done.stdout


def test_a_killed_process_leaves_no_lock(path: Path) -> None:
    """It is the kernel's to drop: the next waits for nobody. A mistake of ours is no failure of the file."""
    with pytest.raises(sqlite3.ProgrammingError), database.translated(Path("/x"), "read"):
        raise sqlite3.ProgrammingError("a mistake")
    command = [sys.executable, "-c", HOLDER, str(_made(path))]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    holder.stdout.readline()
    with opened(path, SCHEMA, lock_wait=0) as store:
        with _unusable("holds its lock", "fuser"):
            store.transact_now(count)
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate(timeout=60)
        assert store.transact_now(count) == 1


HOLDER = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("held", flush=True)
time.sleep(60)
"""


def _made(path: Path) -> Path:
    with opened(path, SCHEMA):
        return path


NAME = "glovebox-tried"


@pytest.fixture
def worker() -> Iterator[Worker]:
    """One that ends with the test."""
    found = Worker(NAME)
    yield found
    found.close()
    assert NAME not in {each.name.removesuffix("_0") for each in threading.enumerate()}


class Held:
    """Work that says that it has begun, and waits for the test."""

    def __init__(self) -> None:
        """Begin with neither."""
        self.begun, self.go_on, self.ended = threading.Event(), threading.Event(), False

    def __call__(self) -> str:
        """Wait."""
        self.begun.set()
        assert self.go_on.wait(10)
        self.ended = True
        return "done"


async def test_what_it_is_given_is_done_in_order_in_one_thread_that_ends(worker: Worker) -> None:
    """Its thread begins with the first; what was raised is raised to whoever asked, and the next is done."""
    assert NAME not in {each.name.removesuffix("_0") for each in threading.enumerate()}
    done: list[int] = []

    async def one(number: int) -> None:
        def work() -> str:
            done.append(number)
            return threading.current_thread().name

        assert await worker.run(work) == f"{NAME}_0"

    async with anyio.create_task_group() as tasks:
        for number in range(50):
            tasks.start_soon(one, number)
    assert done == list(range(50))
    with pytest.raises(ZeroDivisionError):
        await worker.run(lambda: 1 / 0)
    assert await worker.run(lambda: 1) == 1


async def test_what_is_cancelled_before_it_is_begun_is_never_done(worker: Worker) -> None:
    """And what is under way is done, with its result for whoever asked: the control."""
    held, results, done = Held(), [], []

    async def asks() -> None:
        results.append(await worker.run(held))
        await anyio.lowlevel.checkpoint()
        results.append("went on")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(asks)
        await anyio.to_thread.run_sync(held.begun.wait, 10)
        tasks.start_soon(worker.run, lambda: done.append(1))
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
        later = threading.Timer(0.1, held.go_on.set)
        later.start()
    later.join()
    assert results == ["done"]
    await worker.run(lambda: None)
    assert not done


async def test_a_cancellation_that_is_no_scopes_is_not_lost(worker: Worker) -> None:
    """As a web server's, which cancels a task once: what is under way ends first, and then the task does."""
    held, went_on = Held(), False

    async def asks() -> None:
        nonlocal went_on
        await worker.run(held)
        went_on = True

    task = asyncio.get_running_loop().create_task(asks())
    await anyio.to_thread.run_sync(held.begun.wait, 10)
    task.cancel()
    await anyio.lowlevel.checkpoint()
    assert not task.done()
    held.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (held.ended, went_on) == (True, False)
