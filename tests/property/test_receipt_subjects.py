"""A receipt's subjects are exactly the files that the caller can read: whatever they are called, and whatever fails."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NoReturn

import anyio
import hypothesis.strategies as st
import pytest
from hypothesis import example, given
from tests.fixtures.artifact_stores import a_store, collector_of, content, limits
from tests.fixtures.channels import an_outcome
from tests.fixtures.draws import draws
from tests.fixtures.receipts import CALL_ID, call_of, finished, receipt_log, said

from glovebox_audit import read
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_sandboxes.contract.outcome import SkippedFile
from glovebox_server.artifacts import record
from glovebox_server.artifacts.names import quoted
from glovebox_server.artifacts.record import ArtifactStoreError
from glovebox_server.artifacts.store import ArtifactStore
from glovebox_server.calls import Delivered

Failure = Literal["", "full", "rename", "sync", "cancelled before", "cancelled after", "failed after"]
FAILURES: tuple[Failure, ...] = ("", "full", "rename", "sync", "cancelled before", "cancelled after", "failed after")

#: A name, and the same as a refusal quotes it: what one file is called another may be named in a record.
PLAIN = st.one_of(st.sampled_from(["x.", "x", "a/b", "…", "nul", "\u202e", "\udcff"]), st.text(max_size=6))
NAMES = PLAIN.flatmap(lambda name: st.sampled_from([name, quoted(name), quoted(quoted(name))]))
FILES = st.lists(st.tuples(NAMES, st.binary(max_size=40)), max_size=6)


async def told(directory: Path, sent: list[tuple[str, bytes]], failure: Failure) -> tuple[Any, Any, Any, Any]:
    """One call that put out these files: its subjects, what can be read, what it was told of, and what was refused."""
    call, delivered = call_of(), Delivered(artifacts=(), figures=(), shown=(), skipped=())
    skipped = (SkippedFile(name="guest", reason="not a regular file"), SkippedFile(name="…", reason="more", count=7))
    outcome = an_outcome(skipped=skipped)
    total = 10 if failure == "full" else 10_000
    async with receipt_log(directory / "audit") as harness, a_store(directory / "store", total=total) as store:
        recorder = await harness.recorder(files=0, egress=0)
        with suppress(ArtifactStoreError, ArithmeticError), anyio.CancelScope() as scope:
            async with recorder.until_ended(lambda: ("client", None)):
                async with collector_of(store, call, limits(output_files=64), None, recorder) as collector:
                    for name, data in sent:
                        sink = await collector.accept(name, len(data))
                        if sink is not None:
                            await sink.data(data)
                            await sink.end()
                    if failure == "cancelled before":
                        scope.cancel()
                    with failing(failure):
                        delivered = await collector.deliver(outcome, keep_pictures=True)
                if failure == "failed after":
                    raise ArithmeticError
                if failure == "cancelled after":
                    scope.cancel()
                    await anyio.lowlevel.checkpoint()
                await recorder.finish(finished())
        statement = said(harness.content())
        records = list(read.records_of(directory / "audit", CALL_ID))
        collected = [each.data for each in records if each.kind == "artifact.collected"]
        readable = [each for each in collected if await can_read(store, each["uri"])]
    subjects = [each for each in statement["subject"] if each["name"].startswith("artifact:")]
    refused = sum(each.data.get("count", 1) for each in records if each.kind == "artifact.refused")
    return (
        [(each["name"].removeprefix("artifact:"), each["uri"], each["digest"]["sha256"]) for each in subjects],
        [(each["name"], each["uri"], each["sha256"]) for each in readable],
        [(each.name, each.uri, each.sha256) for each in delivered.artifacts],
        (statement["predicate"]["refused_files"], refused, len(delivered.skipped)),
    )


@contextmanager
def failing(failure: Failure) -> Iterator[None]:
    """A disk that fails at the last moment: the second file, or once all are in place."""
    renamed, rename = 0, Path.rename

    def broken(path: Path, target: Path) -> Path:
        nonlocal renamed
        if target.parent.name == "items":
            renamed += 1
        if target.parent.name == "items" and renamed == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return rename(path, target)

    def full(_folder: Path) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        if failure == "rename":
            patch.setattr(Path, "rename", broken)
        if failure == "sync":
            patch.setattr(record, "_sync", full)
            # A full disk has no room for a new folder either.
            patch.setattr(Path, "mkdir", full)
        yield


async def can_read(store: ArtifactStore, uri: str) -> bool:
    """Whether the caller gets a file at this address."""
    try:
        await content(store, uri, call_of().principal)
    except RefusedError:
        return False
    return True


@draws(60)
@given(sent=FILES, failure=st.sampled_from(FAILURES))
@example(sent=[("x.", b"refused"), ("'x.'", b"delivered")], failure="")
@example(sent=[("a.txt", b"1")], failure="cancelled before")
def test_the_subjects_are_what_the_caller_can_read(sent: list[tuple[str, bytes]], failure: Failure) -> None:
    """By address and digest; what a call was told of is the same, and what was refused is counted in full."""
    with tempfile.TemporaryDirectory() as directory:
        subjects, readable, links, refused = anyio.run(told, Path(directory), sent, failure)
    assert sorted(subjects) == sorted(readable)
    if links:
        assert links == readable
    assert refused[0] == refused[1]


@pytest.mark.parametrize("failure", ["full", "rename", "sync"])
def test_files_that_were_not_published_are_no_subjects(failure: Failure, tmp_path: Path) -> None:
    """Each was checked, recorded and ready; then there was no room, or the disk failed under the second or the last."""
    subjects, readable, links, refused = anyio.run(told, tmp_path, [("a.txt", b"1" * 9), ("b.txt", b"2" * 9)], failure)
    assert subjects == readable == links == []
    assert refused[0] == refused[1]


@pytest.mark.parametrize("failure", ["", "cancelled after", "failed after"])
def test_the_control_files_that_were_published_are_subjects(failure: Failure, tmp_path: Path) -> None:
    """Else a receipt without any subject would pass; also where the call ends badly after that."""
    subjects, readable, _, refused = anyio.run(told, tmp_path, [("x.", b"1"), ("'x.'", b"2"), ("y", b"3")], failure)
    assert [name for name, _, _ in subjects] == ["'x.'", "y"]
    assert sorted(subjects) == sorted(readable)
    assert refused[0] == 1 + 1 + 1 + 7  # 'x.', what the harness and the guest refused, and those it only counted
