"""Attacks on the artifact store: what fails, for which reason, and that it would have worked without the guard."""

import errno
import gc
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from ctypes import CDLL, get_errno
from pathlib import Path
from types import SimpleNamespace

import anyio
import anyio.from_thread
import pytest
from anyio.abc import Process
from tests.fixtures.artifact_stores import (
    ALICE,
    BOB,
    Clock,
    a_call,
    a_store,
    collector_of,
    content,
    files,
    keep,
    limits,
    receive,
    untouched,
)

from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server.artifacts import collect, record
from glovebox_server.artifacts import store as store_module
from glovebox_server.artifacts.collect import FLUSH_BYTES
from glovebox_server.artifacts.record import ArtifactStoreError, Disk, unknown
from glovebox_server.artifacts.store import ArtifactStore


async def test_another_principals_artifact_looks_as_if_it_did_not_exist(tmp_path: Path) -> None:
    """F7: same rule, same words, no address in them; the owner gets it (control)."""
    async with a_store(tmp_path / "q") as store:
        found = await keep(store, "a.txt", b"secret")
        refusals = []
        for uri, principal in [(found.uri, BOB), ("artifact://" + "0" * 32, BOB), ("artifact://../../etc", ALICE)]:
            with pytest.raises(RefusedError) as refused:
                await content(store, uri, principal)
            refusals.append((refused.value.rule, str(refused.value)))
        assert set(refusals) == {("artifacts.unknown", str(unknown()))}
        assert await content(store, found.uri, ALICE) == b"secret"


@pytest.mark.parametrize("change", [b"evil!", b"evil! and longer", b"evil"])
async def test_altered_content_is_never_handed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: bytes
) -> None:
    """The bytes are checked on each read; without the check the altered ones come out (control)."""
    async with a_store(tmp_path / "q") as store:
        found = await keep(store, "a.txt", b"good!")
        assert await content(store, found.uri) == b"good!"
        (tmp_path / "q" / "items" / found.id / "content").write_bytes(change)
        if len(change) == len(b"good!"):
            with pytest.raises(ArtifactStoreError) as damaged:
                await content(store, found.uri)
            assert damaged.value.reason == "its content no longer matches its sha256 and was not handed out"
            monkeypatch.setattr(store_module, "_require", lambda _same: None)
            assert await content(store, found.uri) == change
        else:
            with pytest.raises(RefusedError) as gone:
                await content(store, found.uri)
            assert gone.value.rule == "artifacts.unknown"


@pytest.mark.parametrize("what", ["symlink", "fifo", "folder", "missing"])
@pytest.mark.parametrize("file", ["content", "record.json"])
async def test_an_item_that_is_not_plain_files_is_unknown_and_swept(tmp_path: Path, what: str, file: str) -> None:
    """F2, F6: a link out of the store, a FIFO that would hang the reader, a folder, nothing: unfollowed, then gone."""
    outside = tmp_path / "outside"
    outside.write_bytes(b"12345")
    async with a_store(tmp_path / "q") as store:
        found = await keep(store, "a.txt", b"12345")
        place = tmp_path / "q" / "items" / found.id / file
        if file == "record.json":
            outside.write_bytes(place.read_bytes())  # so that only the link is wrong with it
        place.unlink()
        make: dict[str, Callable[[], None]] = {
            "symlink": lambda: place.symlink_to(outside),
            "fifo": lambda: os.mkfifo(place),
            "folder": place.mkdir,
            "missing": lambda: None,
        }
        make[what]()
        with anyio.fail_after(10):
            with pytest.raises(RefusedError) as refused:
                await content(store, found.uri)
            assert refused.value.rule == "artifacts.unknown"
    async with a_store(tmp_path / "q"):  # a new server has not seen the record before
        pass
    assert files(tmp_path / "q") == set()
    assert outside.exists()


async def test_open_recovers_from_whatever_lies_in_the_folder(tmp_path: Path) -> None:
    """Torn records, orphans, strangers and links are removed without being followed; the good artifact stays."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"x")
    async with a_store(tmp_path / "q") as store:
        good = await keep(store, "good", b"good")
        torn = await keep(store, "torn", b"torn")
        record = tmp_path / "q" / "items" / torn.id / "record.json"
        record.write_bytes(record.read_bytes()[:50])
    (tmp_path / "q" / "items" / "stranger").write_bytes(b"x")
    (tmp_path / "q" / "items" / "folder").symlink_to(outside)
    (tmp_path / "q" / "items" / ("0" * 32)).mkdir()
    (tmp_path / "q" / "incoming" / "dead" / "x").mkdir(parents=True)
    (tmp_path / "q" / "incoming" / "dead" / "x" / "content").write_bytes(b"half")
    (tmp_path / "q" / "incoming" / "dead" / "link").symlink_to(outside)
    async with a_store(tmp_path / "q") as store:
        assert await content(store, good.uri) == b"good"
        expected = {f"items/{good.id}/content", f"items/{good.id}/record.json"}
        assert files(tmp_path / "q") == expected
    assert files(outside) == {"precious"}


async def test_running_out_of_descriptors_does_not_cost_an_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that says nothing about the record must not look like a damaged one, which is removed."""

    def no_descriptor(_: bytes) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    async with a_store(tmp_path / "q") as store:
        found = await keep(store, "a", b"x")
    with monkeypatch.context() as patched:
        patched.setattr(record, "decode", no_descriptor)
        with pytest.raises(ArtifactStoreError, match="Too many open files"):
            async with a_store(tmp_path / "q"):
                pass
    async with a_store(tmp_path / "q") as store:
        assert await content(store, found.uri) == b"x"


@pytest.mark.parametrize("how", ["link", "open to others", "file"])
async def test_a_directory_that_others_control_is_not_used(tmp_path: Path, how: str) -> None:
    """M10: a planted link, loose modes or a file in its place: refused with the fix, no path in the message."""
    place = tmp_path / "q"
    if how == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "elsewhere")
    elif how == "file":
        place.touch()
    else:
        place.mkdir()
        place.chmod(0o750)
    with pytest.raises(ArtifactStoreError) as refused:
        async with a_store(place):
            pass
    assert refused.value.reason == "its directory is a link, belongs to someone else, or is open to others"
    assert "chmod" in refused.value.fix
    assert str(tmp_path) not in str(refused.value)


async def test_a_stopped_process_holding_the_lock_is_reported_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that hangs costs a bounded time; when it lets go, work goes on (control)."""
    monkeypatch.setattr(record, "LOCK_WAIT_SECONDS", 0.05)
    async with a_store(tmp_path / "q") as store:
        peer = Disk(tmp_path / "q", max_bytes_total=1, parts=1)
        with untouched(tmp_path / "q"), peer._exclusive(), pytest.raises(ArtifactStoreError) as stuck:
            await keep(store, "a", b"x")
        assert "another Glovebox process" in stuck.value.reason
        await keep(store, "a", b"x")


async def test_cancelling_at_any_step_keeps_all_of_a_call_or_nothing(tmp_path: Path) -> None:
    """M6: the cancellation arrives before, and while, each piece of disk work; no file and no descriptor is left."""
    async with a_store(tmp_path / "q") as store:
        for step in range(100):
            before, descriptors = files(tmp_path / "q"), open_descriptors()
            cancelled = await cancelled_at(step, store)
            assert not list((tmp_path / "q" / "incoming").glob("*/*"))
            assert open_descriptors() == descriptors
            added = files(tmp_path / "q") - before
            assert len([path for path in added if path.endswith("record.json")]) in {0, 2}
            if not cancelled:
                break
        assert 10 <= step < 99


def open_descriptors() -> int:
    """Return how many files this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


async def cancelled_at(step: int, store: ArtifactStore) -> bool:
    """Make one call of two files that is cancelled before (odd) or while (even) the worker does its n-th work."""
    real, seen = ArtifactStore.run, 0

    async def run(within: ArtifactStore, attempted: str, work: Callable[[], object]) -> object:
        nonlocal seen
        seen += 1
        if seen == step // 2 + 1:
            if step % 2:
                scope.cancel()
            else:
                work = cancelling(work, scope)
        return await real(within, attempted, work)

    with anyio.CancelScope() as scope, pytest.MonkeyPatch.context() as patched:
        patched.setattr(ArtifactStore, "run", run)
        async with collector_of(store, a_call(), limits()) as collection:
            await receive(collection, "a", b"x" * FLUSH_BYTES)
            await receive(collection, "b", b"y")
            await collection.publish()
    return scope.cancel_called


def cancelling(work: Callable[[], object], scope: anyio.CancelScope) -> Callable[[], object]:
    """Return disk work during which, seen from the event loop, the scope is cancelled."""

    def both() -> object:
        anyio.from_thread.run_sync(scope.cancel)
        return work()

    return both


CRASH = """
import sys, anyio
from pathlib import Path
from tests.fixtures.artifact_stores import a_call, a_store, collector_of, keep, limits, receive, receiving
from glovebox_server.artifacts.collect import FLUSH_BYTES

async def main():
    async with a_store(Path(sys.argv[1])) as store:
        kept = await keep(store, "kept", b"kept")
        async with collector_of(store, a_call(), limits()) as collection:
            await receive(collection, "sealed", b"sealed")
            async with receiving(collection, "half") as sink:
                await sink.data(b"x" * FLUSH_BYTES)
                print(kept.uri, flush=True)
                await anyio.sleep_forever()

anyio.run(main)
"""


async def started(directory: Path) -> tuple[Process, str]:
    """Return another server process that is in the middle of receiving a file, and what it published before."""
    environment = dict(os.environ, PYTHONPATH=str(Path(__file__).parents[2]))
    process = await anyio.open_process(
        [sys.executable, "-c", CRASH, str(directory)], env=environment, stdin=None, stderr=None
    )
    assert process.stdout is not None
    with anyio.fail_after(30):
        return process, (await process.stdout.receive()).decode().strip()


async def test_sigkill_in_the_middle_of_a_file_leaves_nothing_of_it(tmp_path: Path) -> None:
    """I11: what was published stays, what was sealed or half written goes at the next sweep, of another server too."""
    q = tmp_path / "q"
    async with a_store(q) as survivor:
        process, kept = await started(q)
        try:
            assert await survivor.sweep() == 0
            assert len(list(q.glob("incoming/*/*/content"))) == 2  # control: it is alive, so its files are left alone
        finally:
            process.send_signal(signal.SIGKILL)
            await process.aclose()
            await process.wait()
        assert await survivor.sweep() == 0
        assert await content(survivor, kept) == b"kept"
        assert len(list(q.glob("incoming/*"))) == 1
    assert not list(q.glob("incoming/*"))
    assert len(files(q)) == 2


@pytest.mark.parametrize("step", ["mkdir", "open", "write", "fsync", "rename"])
async def test_a_disk_error_at_any_step_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Each use of each system call fails once, in turn: all of the call or nothing of it, and no path is told."""

    async def one_call(store: ArtifactStore) -> None:
        async with collector_of(store, a_call(), limits()) as collection:
            for name in ("a", "b", "c"):
                await receive(collection, name, b"known" if name != "c" else b"new")
            await collection.publish()

    async with a_store(tmp_path / "q") as store:
        await keep(store, "known", b"known")
        failed = 0
        while True:
            before = files(tmp_path / "q")
            with monkeypatch.context() as patched:
                spent = break_once(patched, step, failed)
                if not await fails(one_call, store, str(tmp_path)):
                    assert not spent()
                    break
            assert spent()
            assert files(tmp_path / "q") == before
            failed += 1
        assert failed >= 2
        assert not list((tmp_path / "q" / "incoming").glob("*/*"))


async def fails(
    attempt: Callable[[ArtifactStore], Awaitable[None]], store: ArtifactStore, secret: str
) -> ArtifactStoreError | None:
    """Return how an attempt fails, having checked what it says, or None."""
    problem = None
    try:
        await attempt(store)
    except ArtifactStoreError as error:
        problem = error
    if problem is not None:
        assert problem.reason == os.strerror(errno.ENOSPC)
        assert "Free space" in problem.fix
        assert secret not in str(problem)
    return problem


def break_once(patched: pytest.MonkeyPatch, step: str, good: int) -> Callable[[], bool]:
    """Let one system call fail with a full disk, once, after some good ones; the answer tells whether it has."""
    owner: object = Path if step in {"mkdir", "rename"} else os
    real = getattr(owner, step)
    calls = [0]

    def broken(*args: object, **kwargs: object) -> object:
        calls[0] += 1
        if calls[0] == good + 1:
            raise OSError(errno.ENOSPC, "no space", "/a/path/that/must/not/be/told")
        return real(*args, **kwargs)

    if owner is os:
        fake = SimpleNamespace(**{**vars(os), step: broken})
        patched.setattr(record, "os", fake)
        patched.setattr(collect, "os", fake)
    else:
        patched.setattr(owner, step, broken)
    return lambda: calls[0] > good


@contextmanager
def tiny_disk(place: Path, size: int) -> Iterator[None]:
    """Mount a tmpfs of this many bytes, or skip where that is not permitted."""
    libc = CDLL(None, use_errno=True)
    place.mkdir()
    if libc.mount(b"glovebox-test", str(place).encode(), b"tmpfs", 0, f"size={size},mode=700".encode()) != 0:
        pytest.skip(f"mounting a tmpfs is not permitted here: {os.strerror(get_errno())}")
    try:
        yield
    finally:
        gc.collect()
        assert libc.umount2(str(place).encode(), 2) == 0


async def test_a_full_disk_refuses_the_file_and_keeps_the_rest(tmp_path: Path) -> None:
    """F8: a really full file system: said with its fix, nothing half-written stays, and afterwards it works again."""
    with tiny_disk(tmp_path / "tiny", 1024 * 1024):
        async with a_store(tmp_path / "tiny" / "q") as store:
            first = await keep(store, "a", b"x" * 100_000)
            with untouched(tmp_path / "tiny"):
                async with collector_of(store, a_call(), limits(output_bytes=10_000_000)) as collection:
                    with pytest.raises(ArtifactStoreError) as full:
                        await receive(collection, "b", *[b"x" * FLUSH_BYTES] * 8)
            assert full.value.reason == "No space left on device"
            assert full.value.fix == "Free space on the file system of the state directory."
            assert await content(store, first.uri) == b"x" * 100_000
            await keep(store, "b", b"y" * FLUSH_BYTES)


async def test_no_secret_of_the_server_gets_into_the_store_or_its_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M12: a canary in the environment is in no file of the quarantine and in no message."""
    canary = "canary-5f1d0a"
    monkeypatch.setenv("GLOVEBOX_CANARY", canary)
    messages: list[str] = []

    async def attempt(store: ArtifactStore, name: str) -> None:
        try:
            await keep(store, name, b"x")
        except RefusedError as refused:
            messages.append(str(refused))

    clock = Clock()
    async with a_store(tmp_path / "q", clock, total=1) as store:
        for name in ["a", "../a", "b"]:
            await attempt(store, name)
    assert len(messages) == 2
    assert not any(canary in message or str(tmp_path) in message for message in messages)
    for path in files(tmp_path / "q"):
        assert canary.encode() not in (tmp_path / "q" / path).read_bytes()
