"""What of the log may be removed, and how that is told apart from what somebody took away."""

import shutil
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.fixtures import segments
from tests.fixtures.audit_logs import decided, finished, verify
from tests.fixtures.receipts import public, receipt_log

from glovebox_audit import chain
from glovebox_audit.chain import EvidenceError, Head, draft
from glovebox_audit.file import LogFile
from glovebox_audit.receipts.statement import verify as verify_receipt
from glovebox_audit.segments import files, rotation
from glovebox_audit.segments.rotation import Removal
from glovebox_server.receipts.keys import Signer


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Name a directory that does not exist yet."""
    return tmp_path / "audit"


OLD = 2 * 86400.0


def make_old(monkeypatch: pytest.MonkeyPatch, seconds: float = OLD) -> None:
    """Let that much time pass, as far as retention sees."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + seconds)


def retain(directory: Path, **kept: float) -> list[int]:
    """Have retention remove what it may."""
    file = LogFile(directory, "s_keeper", segments.rotation(10**9, **kept))
    try:
        return file.retain()
    finally:
        file.close()


def test_everything_is_kept_unless_a_setting_says_otherwise(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However old and large; with a setting the oldest go, and the rest verifies (the control)."""
    segments.fill(directory, 20)
    make_old(monkeypatch, 10 * 365 * 86400.0)
    assert retain(directory) == []
    count = verify(directory).segments
    assert retain(directory, seconds=86400.0) == list(range(1, count + 1))
    report = verify(directory, keys=segments.KEYS)
    assert (report.problems, report.segments, report.removed) == ((), 0, count)


def test_retention_by_size_removes_the_oldest_until_it_fits(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than needed; the bytes that are left are the last ones."""
    segments.fill(directory, 20)
    lines = segments.all_lines(directory)
    make_old(monkeypatch)
    gone = retain(directory, bytes=10_000)
    left = segments.all_lines(directory)
    added = len(gone)
    assert gone == list(range(1, len(gone) + 1))
    assert left[:-added] == lines[len(lines) - len(left) + added :]
    assert sum(map(len, left[:-added])) <= 10_000
    assert verify(directory, keys=segments.KEYS).problems == ()
    assert retain(directory, bytes=20_000) == []


def test_so_many_segments_go_at_once_and_the_others_next(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their records are one write, which a crash must not make too long to be told from tampering."""
    monkeypatch.setattr("glovebox_audit.file._MAX_REMOVED_AT_ONCE", 3)
    segments.fill(directory, 20)
    make_old(monkeypatch)
    assert retain(directory, seconds=1.0) == [1, 2, 3]
    assert retain(directory, seconds=1.0) == [4, 5, 6]
    assert verify(directory, keys=segments.KEYS).problems == ()


def test_retention_leaves_what_is_young(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that began in it may be under way: not in the first hour, whatever the settings say."""
    segments.fill(directory, 20)
    make_old(monkeypatch, 3500)
    assert retain(directory, bytes=1, seconds=1.0) == []
    make_old(monkeypatch, 3700)
    assert retain(directory, bytes=1, seconds=1.0) != []


def test_retention_leaves_the_calls_of_a_killed_server(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a start has told of them: else they would have no end, and nobody could say which."""
    living = LogFile(directory, "s_living", segments.rotation(bytes=1))
    living.commit([draft(decided("c_0"))])
    living.commit([draft(finished("c_0"))])
    dead = LogFile(directory, "s_dead", segments.rotation())
    dead.commit([draft(decided("c_cut"))])
    dead.close()
    make_old(monkeypatch)
    for number in range(12):
        living.commit([draft(decided(f"c_{number}"))])
        living.commit([draft(finished(f"c_{number}"))])
    assert (directory / "segments" / "000001.jsonl").exists()
    LogFile(directory, "s_next", segments.rotation()).close()
    assert living.retain() != []
    living.close()
    assert verify(directory, keys=segments.KEYS).problems == ()


@pytest.mark.parametrize("which", [[1], [1, 2], [2], [3]])
def test_a_segment_that_is_missing_is_told_apart_from_one_that_was_removed(
    directory: Path, monkeypatch: pytest.MonkeyPatch, which: list[int]
) -> None:
    """By name; retention removes the same files, and the log is whole (the control)."""
    segments.fill(directory, 20)
    copy = directory.with_name("copy")
    shutil.copytree(directory, copy)
    for number in which:
        (directory / "segments" / f"{number:06}.jsonl").unlink()
    (problem,) = verify(directory, keys=segments.KEYS).problems
    assert (problem.file, problem.kind) == (f"segments/{which[-1]:06}.jsonl", "missing")
    if which[0] == 1:
        make_old(monkeypatch)
        total = sum(map(len, segments.all_lines(copy)))
        sizes = [(copy / "segments" / f"{number:06}.jsonl").stat().st_size for number in which]
        assert retain(copy, bytes=total - sum(sizes)) == which
        assert verify(copy, keys=segments.KEYS).problems == ()
        assert verify(copy, keys=segments.KEYS).removed == which[-1]


def test_a_removal_that_was_forged_is_found_with_the_key(directory: Path) -> None:
    """Who may write the files can chain a record; who has not the key cannot sign that retention removed a segment."""
    segments.fill(directory, 20)
    first = rotation.sealed(directory, 1)
    assert first is not None
    removal = Removal(segment=1, root=first.root, time="2026-11-22T00:00:00.000000Z", seal=first.seal, reason="age")
    file = LogFile(directory, "s_forger")
    file.commit([draft(removal.event(Signer(Ed25519PrivateKey.from_private_bytes(b"\1" * 32))))])
    file.close()
    (directory / "segments" / "000001.jsonl").unlink()
    assert verify(directory).ok
    found = verify(directory, keys=segments.KEYS).problems
    assert [(each.file, each.kind) for each in found] == [
        ("segments/000001.jsonl", "missing"), ("audit.jsonl", "seal"),
    ]  # fmt: skip


def test_an_anchor_in_what_was_removed_is_told_apart_from_a_false_one(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be compared; the seal that the oldest segment is chained to can be, and a false one there is false."""
    segments.fill(directory, 20)
    seals = {}
    for number in (1, 2, 3):
        last = (directory / files.name(number)).read_bytes().splitlines(keepends=True)[-1]
        seals[number] = chain.parse(last)
    make_old(monkeypatch)
    size = sum(map(len, segments.all_lines(directory)))
    gone = retain(directory, bytes=size - (directory / files.name(1)).stat().st_size - 1)
    assert gone == [1, 2]
    anchors = {number: Head(seq=each.seq, hash=each.hash) for number, each in seals.items()}
    assert verify(directory, anchors[3], keys=segments.KEYS).ok
    assert verify(directory, anchors[2], keys=segments.KEYS).ok
    (found,) = verify(directory, anchors[1], keys=segments.KEYS).problems
    assert (found.kind, found.line) == ("anchor", None)
    assert found.detail.endswith("which lay in a segment removed on record: not compared")
    false = Head(seq=anchors[3].seq, hash="e" * 64)
    (found,) = verify(directory, false, keys=segments.KEYS).problems
    assert found.detail == f"the anchor names another record {false.seq}: the log was rewritten"
    false = Head(seq=anchors[2].seq, hash="e" * 64)
    (found,) = verify(directory, false, keys=segments.KEYS).problems
    assert found.detail == f"the anchor names another record {false.seq}: the log was rewritten"


async def test_a_receipt_whose_record_was_removed_is_not_called_false(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place cannot be checked any more; until retention removes the record it is right (the control)."""
    async with receipt_log(directory) as harness:
        await harness.receipt()
        content = harness.content()
    segments.fill(directory, 20)
    verify_receipt(content, public(), directory)
    make_old(monkeypatch)
    assert 1 in retain(directory, seconds=1.0)
    with pytest.raises(EvidenceError, match=r"place in the audit log cannot be checked: .* removed on record"):
        verify_receipt(content, public(), directory)
