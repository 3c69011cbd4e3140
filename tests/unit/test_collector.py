"""From a hostile guest's file streams to artifacts: every file is kept whole or refused on the record."""

import errno
import os
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from tests.fixtures.artifact_stores import ALICE, PNG, a_call, a_store, collector_of, content, files, limits
from tests.fixtures.channels import an_outcome

from _glovebox_guest.pictures.header import MAX_EDGE
from glovebox_audit.events import ArtifactCollected, ArtifactRefused
from glovebox_audit.place import AuditError
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_sandboxes.contract.outcome import Blob, Captured, Shown, SkippedFile
from glovebox_sandboxes.contract.pictures import MAX_BYTES, MAX_PICTURES
from glovebox_server.artifacts.collect import MAX_REFUSED, Collector
from glovebox_server.artifacts.record import ArtifactStoreError
from glovebox_server.artifacts.store import ArtifactStore
from glovebox_server.receipts.recorder import CallRecorder, ReceiptIssuer


class Recorder:
    def __init__(self) -> None:
        self.events: list[Any] = []
        self.readable: list[str] = []

    async def record(self, event: object) -> None:
        self.events.append(event)

    def published(self, uris: Iterable[str], take_back: object) -> None:
        self.readable = list(uris)
        self.take_back: Any = take_back

    def refused(self) -> list[tuple[str, str]]:
        return [(each.name, each.reason) for each in self.events if isinstance(each, ArtifactRefused)]

    def collected(self) -> list[str]:
        return [each.name for each in self.events if isinstance(each, ArtifactCollected)]


@asynccontextmanager
async def collecting(
    directory: Path, recorder: Recorder, *, output_bytes: int = 1_000_000, output_files: int = 8, total: int = 10**7
) -> AsyncIterator[tuple[Collector, ArtifactStore]]:
    bounds = limits(output_bytes=output_bytes, output_files=output_files)
    records = cast("CallRecorder", recorder)
    async with a_store(directory, total=total) as store, collector_of(store, a_call(), bounds, None, records) as made:
        yield made, store


async def put(collector: Collector, name: str, *chunks: bytes, size: int | None = None) -> None:
    sink = await collector.accept(name, sum(map(len, chunks)) if size is None else size)
    if sink is not None:
        for chunk in chunks:
            await sink.data(chunk)
        await sink.end()


@pytest.fixture
def same_descriptors() -> Iterator[None]:
    """No descriptor more after a test than before it."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    yield
    assert len(list(Path("/proc/self/fd").iterdir())) == before


async def test_a_file_becomes_an_artifact_and_a_record(tmp_path: Path) -> None:
    """The control of all that follows."""
    recorder = Recorder()
    async with collecting(tmp_path, recorder) as (collector, store):
        await put(collector, "a/b.txt", b"hello ", b"world")
        delivered = await collector.deliver(an_outcome(), keep_pictures=True)
        (link,) = delivered.artifacts
        assert (link.name, link.bytes) == ("a/b.txt", 11)
        assert recorder.readable == [link.uri]
        assert await content(store, link.uri, ALICE) == b"hello world"
    assert (recorder.collected(), recorder.refused(), delivered.skipped) == (["a/b.txt"], [], ())


@pytest.mark.parametrize(
    "name",
    ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a\x00b", "a\nb", "\udcff", "x" * 2000, "a\\b", "\u202etxt"],
)
async def test_a_hostile_name_is_refused_on_the_record(tmp_path: Path, name: str) -> None:
    """The name is in the record as printable ASCII, bounded; the other files are not affected."""
    recorder = Recorder()
    async with collecting(tmp_path, recorder) as (collector, _):
        assert await collector.accept(name, 1) is None
        await put(collector, "good.txt", b"x")
        delivered = await collector.deliver(an_outcome(), keep_pictures=True)
    ((recorded, reason),) = recorder.refused()
    assert recorded.removesuffix("…").isascii()
    assert recorded.isprintable()
    assert len(recorded) < 700
    assert "was not kept" in reason
    assert [link.name for link in delivered.artifacts] == ["good.txt"]
    assert [each.reason for each in delivered.skipped] == [reason]


@pytest.mark.usefixtures("same_descriptors")
async def test_files_may_overlap(tmp_path: Path) -> None:
    """A guest may send several at a time, in pieces; each arrives whole."""
    recorder = Recorder()
    async with collecting(tmp_path, recorder) as (collector, store):
        sinks = [await collector.accept(f"{n}.bin", 10) for n in range(8)]
        for part in range(10):
            for n, sink in enumerate(sinks):
                assert sink is not None
                await sink.data(bytes([n * 16 + part]))
        for sink in reversed(sinks):
            assert sink is not None
            await sink.end()
        delivered = await collector.deliver(an_outcome(), keep_pictures=True)
        for n, link in enumerate(sorted(delivered.artifacts, key=lambda each: each.name)):
            assert await content(store, link.uri, ALICE) == bytes(n * 16 + part for part in range(10))


async def test_the_same_name_twice_is_refused(tmp_path: Path) -> None:
    recorder = Recorder()
    async with collecting(tmp_path, recorder) as (collector, _):
        first = await collector.accept("a.txt", 1)
        assert first is not None
        for name in ("a.txt", "A.TXT", "a.txt/b"):
            assert await collector.accept(name, 1) is None
        await first.data(b"1")
        await first.end()
        delivered = await collector.deliver(an_outcome(), keep_pictures=True)
    assert len(recorder.refused()) == 3
    assert [link.name for link in delivered.artifacts] == ["a.txt"]


@pytest.mark.usefixtures("same_descriptors")
async def test_a_file_that_grows_past_the_limit_is_refused_on_the_record(tmp_path: Path) -> None:
    """What the guest announced does not count, what comes does; nothing of the file stays."""
    recorder = Recorder()
    async with collecting(tmp_path, recorder, output_bytes=1000) as (collector, _):
        await put(collector, "small.txt", b"x" * 600)
        sink = await collector.accept("big.txt", 1)
        assert sink is not None
        await sink.data(b"y" * 401)
        await sink.data(b"y" * 10)  # the rest of it, already under way
        await sink.end()
        delivered = await collector.deliver(an_outcome(), keep_pictures=True)
        assert [link.name for link in delivered.artifacts] == ["small.txt"]
    ((name, reason),) = recorder.refused()
    assert name == "'big.txt'"
    assert "more than the 1000 bytes" in reason
    assert [each.name for each in delivered.skipped] == ["'big.txt'"]


@pytest.mark.usefixtures("same_descriptors")
async def test_a_file_that_never_ends_is_refused_on_the_record(tmp_path: Path) -> None:
    """The guest said its outcome, or reset the stream, in the middle of a file."""
    recorder = Recorder()
    async with collecting(tmp_path, recorder) as (collector, _):
        for n in range(5):
            sink = await collector.accept(f"{n}.txt", 100)
            assert sink is not None
            await sink.data(b"half")
        delivered = await collector.deliver(an_outcome(), keep_pictures=True)
    assert delivered.artifacts == ()
    assert [reason for _, reason in recorder.refused()] == ["It did not arrive whole."] * 5
    assert not [name for name in files(tmp_path) if name.endswith((".part", ".tmp")) or "incoming" in name]


@pytest.mark.usefixtures("same_descriptors")
async def test_a_call_that_ends_in_the_middle_of_a_file_leaves_nothing(tmp_path: Path) -> None:
    """Cancelled, timed out or failed: no descriptor and no file is left."""
    recorder = Recorder()
    async with a_store(tmp_path):
        before = files(tmp_path)
    with anyio.CancelScope() as scope:
        async with collecting(tmp_path, recorder) as (collector, _):
            for n in range(5):
                sink = await collector.accept(f"{n}.txt", 100)
                assert sink is not None
                await sink.data(b"half" * 100_000 if n == 0 else b"half")
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert files(tmp_path) == before


@pytest.mark.usefixtures("same_descriptors")
async def test_a_full_disk_ends_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's failure is ours: it is told, never a file that is silently missing."""

    def full(_descriptor: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    recorder = Recorder()
    async with collecting(tmp_path, recorder) as (collector, _):
        sink = await collector.accept("a.bin", 1)
        assert sink is not None
        with monkeypatch.context() as patch:
            patch.setattr("glovebox_server.artifacts.collect.os.write", full)
            with pytest.raises(ArtifactStoreError):
                await sink.data(bytes(300_000))
    assert recorder.events == []


async def test_refusals_are_counted_and_recorded_as_ascii(tmp_path: Path) -> None:
    """A guest may open tens of thousands of streams: the log gets MAX_REFUSED records and a sum, harmless to print."""
    recorder = Recorder()
    async with collecting(tmp_path, recorder, output_files=2) as (collector, _):
        for n in range(1000):
            await put(collector, f"{n}.txt", b"x")
        delivered = await collector.deliver(an_outcome(), keep_pictures=True)
    assert len(delivered.artifacts) == 2
    assert len(recorder.refused()) == MAX_REFUSED + 1
    assert recorder.refused()[-1] == ("…", f"and {998 - MAX_REFUSED} more")
    assert sum(each.count or 1 for each in recorder.events if isinstance(each, ArtifactRefused)) == 998
    assert len(delivered.skipped) == MAX_REFUSED + 1
    recorder = Recorder()
    async with collecting(tmp_path, recorder) as (collector, _):
        skipped = (SkippedFile(name="\x1b[2J\udcff", reason="not a regular file"),)
        await collector.deliver(an_outcome(skipped=skipped), keep_pictures=True)
    ((name, _),) = recorder.refused()
    assert name.isascii()
    assert name.isprintable()


async def test_figures_are_artifacts_and_shown(tmp_path: Path) -> None:
    """Under names of ours; a file of the program's that has such a name keeps it, and the figure is still shown."""
    recorder = Recorder()
    blobs = (Blob(media_type="image/png", data=PNG), Blob(media_type="image/png", data=PNG + b"2"))
    async with collecting(tmp_path, recorder) as (collector, _):
        await put(collector, "figure-1.png", PNG + b"mine")
        delivered = await collector.deliver(an_outcome(blobs=blobs), keep_pictures=True)
    assert [link.name for link in delivered.artifacts] == ["figure-1.png"]
    assert [link.name for link in delivered.figures] == ["figure-2.png"]
    assert [image.data for image in delivered.shown][:2] == [blob.data for blob in blobs]


async def test_what_clients_would_not_take_is_shown_smaller_and_kept(tmp_path: Path) -> None:
    """A figure and two files, each with its sentence; a name that is no picture's gets none (control)."""
    about: dict[str, Any] = {"media_type": "image/png", "data": PNG, "size": (640, 480), "of": (6400, 4800)}
    blob = Blob(media_type="image/png", data=PNG + bytes(MAX_BYTES), shown=Shown(name="", **about))
    shown = (
        Shown(name="a.png", **about),
        Shown(name="b.png", reason="it is broken"),
        Shown(name="c.txt", **about),
        Shown(name="none.png", **about),
    )
    async with collecting(tmp_path, Recorder(), output_bytes=10_000_000) as (collector, _):
        for name in ("a.png", "b.png"):
            await put(collector, name, PNG, bytes(MAX_BYTES))
        await put(collector, "c.txt", b"text")
        delivered = await collector.deliver(an_outcome(blobs=(blob,), shown=shown), keep_pictures=True)
    assert [image.data for image in delivered.shown] == [PNG, PNG]
    links = {link.name: link for link in (*delivered.figures, *delivered.artifacts)}
    assert links["figure-1.png"].bytes == len(blob.data)
    assert list(delivered.notes) == [
        f"figure-1.png: shown at 640 × 480; the original, 6400 × 4800, is {links['figure-1.png'].uri}",
        f"a.png: shown at 640 × 480; the original, 6400 × 4800, is {links['a.png'].uri}",
        f"b.png: not shown, it is broken; it is {links['b.png'].uri}",
    ]
    blob = Blob(
        media_type="image/png",
        data=PNG + bytes(MAX_BYTES),
        shown=Shown(name="", media_type="image/png", data=PNG, size=(640, 480), of=(640, 480)),
    )
    async with collecting(tmp_path, Recorder(), output_bytes=10_000_000) as (collector, _):
        delivered = await collector.deliver(an_outcome(blobs=(blob,)), keep_pictures=True)
    assert delivered.notes == (f"figure-1.png: shown in fewer bytes; the original is {delivered.figures[0].uri}",)


async def test_a_figure_too_large_to_be_kept_says_what_to_do(tmp_path: Path) -> None:
    """The guest hands back its copy alone, or why there is none; the controls above say where the original is."""
    copy = Shown(name="", media_type="image/png", data=PNG, size=(640, 480), of=(6400, 4800))
    async with collecting(tmp_path, Recorder()) as (collector, _):
        shown = (copy, Shown(name="", reason="it is broken"))
        delivered = await collector.deliver(an_outcome(shown=shown), keep_pictures=True)
    advice = "too large to be kept as a figure: save it to /output"
    assert delivered.notes == (
        f"A picture: shown at 640 × 480; the original, 6400 × 4800, is {advice}",
        f"A picture: not shown, it is broken; it is {advice}",
    )


async def test_few_and_small_pictures_are_shown(tmp_path: Path) -> None:
    """The first MAX_PICTURES of at most MAX_BYTES and MAX_EDGE, by what came; what only was read is not kept."""
    recorder = Recorder()
    async with collecting(tmp_path, recorder, output_files=20, output_bytes=10_000_000) as (collector, _):
        await put(collector, "big.png", PNG, bytes(MAX_BYTES), size=1)
        await put(collector, "false.png", b"no picture")
        for n in range(MAX_PICTURES + 2):
            await put(collector, f"{n}.png", PNG, bytes([n]))
        delivered = await collector.deliver(an_outcome(), keep_pictures=True)
    assert [image.data for image in delivered.shown] == [PNG + bytes([n]) for n in range(MAX_PICTURES - 1)]
    wide = PNG.replace((640).to_bytes(4, "big"), (MAX_EDGE + 1).to_bytes(4, "big"))
    async with collecting(tmp_path, Recorder()) as (collector, _):
        await put(collector, "a.png", wide)
        await put(collector, "b.png", PNG)
        blob = Blob(media_type="image/png", data=wide)
        delivered = await collector.deliver(an_outcome(blobs=(blob,)), keep_pictures=True)
    assert [image.data for image in delivered.shown] == [PNG]
    async with collecting(tmp_path, Recorder()) as (collector, _):
        blob = Blob(media_type="image/png", data=PNG)
        delivered = await collector.deliver(an_outcome(blobs=(blob,)), keep_pictures=False)
    assert delivered.artifacts == delivered.figures == ()
    assert [image.data for image in delivered.shown] == [PNG]


async def test_nothing_is_visible_when_the_store_is_full(tmp_path: Path) -> None:
    recorder = Recorder()
    async with collecting(tmp_path, recorder, total=1000) as (collector, _):
        await put(collector, "a.txt", b"x" * 800)
        await put(collector, "b.txt", b"x" * 800 + b"y")
        delivered = await collector.deliver(an_outcome(), keep_pictures=True)
    assert (delivered.artifacts, delivered.shown, recorder.readable) == ((), (), [])
    assert [name for name, _ in recorder.refused()] == ["'a.txt'", "'b.txt'"]


async def test_what_was_published_can_be_taken_back(tmp_path: Path) -> None:
    """For a call whose last record cannot be written; the control is the file that was readable before."""
    recorder = Recorder()
    async with collecting(tmp_path, recorder) as (collector, store):
        await put(collector, "a.txt", b"x")
        (link,) = (await collector.deliver(an_outcome(), keep_pictures=True)).artifacts
        async with store.open(link.uri, ALICE) as reader:
            assert await reader.read(10) == b"x"
        await recorder.take_back()
        with pytest.raises(RefusedError) as caught:
            async with store.open(link.uri, ALICE):
                pass
        assert caught.value.rule == "artifacts.unknown"
    assert not list(tmp_path.rglob("content"))


@pytest.mark.parametrize("full", [True, False])
async def test_a_call_whose_last_record_cannot_be_written_takes_its_files_back(*, full: bool) -> None:
    """Where the log has room for its failure, they stay and the record names them (control)."""
    done: list[str] = []

    class Log:
        head = None

        async def append_all(self, *_: object) -> list[Any]:
            if full:
                raise AuditError("record call.failed", "No space left on device", "Free some.")
            return [SimpleNamespace(seq=1, hash="", data={"digest": ""})]

        def lose(self, *_: object) -> None:
            done.append("lost")

    async def take_back() -> None:
        done.append("taken back")

    recorder = CallRecorder(cast("ReceiptIssuer", SimpleNamespace(log=Log())), a_call(), None)
    recorder._written = [cast("Any", SimpleNamespace(kind="call.decided"))]
    recorder.published(["artifact://1"], take_back)
    with pytest.raises(RuntimeError):
        async with recorder.until_ended(lambda: ("client", None)):
            raise RuntimeError
    assert done == (["lost", "taken back"] if full else [])


async def test_output_that_is_cut_in_the_result_is_kept_before_all_files(tmp_path: Path) -> None:
    """Whole and on record, also where a program's file has a name like it; without files, or room, it is not."""
    long = Captured(text="é" * 10_000, total_bytes=20_000, dropped_bytes=0)
    for room, keep, names in ((1_000_000, True, ["stdout", "value", "stdout.txt"]), (9, True, ["stdout.txt"]),
                              (1_000_000, False, ["stdout.txt"])):  # fmt: skip
        recorder = Recorder()
        async with collecting(tmp_path / f"{room} {keep}", recorder, output_bytes=room) as (collector, store):
            await put(collector, "stdout.txt", b"its own")
            value = {"value": "v" * 20_000}
            given = replace(an_outcome(), stdout=long, value=value)
            delivered = await collector.deliver(given, keep_pictures=keep)
            assert [link.name.partition("-")[0] for link in delivered.artifacts] == names
            assert set(delivered.whole) == set(names[:-1])
            assert sorted(recorder.collected()) == sorted(link.name for link in delivered.artifacts)
            if names[:-1]:
                assert await content(store, delivered.whole["stdout"]) == long.text.encode()
                assert [link.uri for link in delivered.artifacts][:2] == list(delivered.whole.values())
            assert len(recorder.refused()) == (2 if room == 9 else 0)
