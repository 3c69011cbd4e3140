"""Segments of the log: when they are sealed, what holds them together, and what may be removed."""

import hashlib
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures import segments
from tests.fixtures.audit_logs import decided, finished, log_lines, started, verify

from glovebox_audit import chain, read, subscription
from glovebox_audit import file as audit_file
from glovebox_audit.chain import Head, draft
from glovebox_audit.events import SegmentBegun, ServerStopped
from glovebox_audit.file import LogFile
from glovebox_audit.log import AuditLog
from glovebox_audit.place import AuditError
from glovebox_audit.segments import files, merkle
from glovebox_audit.segments.rotation import SEGMENT_BYTES, SEGMENT_SECONDS, Rotation
from glovebox_audit.writers import OpenCalls

KEPT = Path(__file__).parents[1] / "fixtures" / "earlier_log"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Name a directory that does not exist yet."""
    return tmp_path / "audit"


def kinds(directory: Path) -> list[str]:
    """What is in the log."""
    return [chain.parse(line).kind for line in segments.all_lines(directory)]


#: Roots over the first n of these leaves, from the test data of Certificate Transparency's own implementation.
#: https://github.com/google/certificate-transparency/blob/master/python/ct/crypto/merkle_test.py
LEAVES = [bytes.fromhex(each) for each in (
    "", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f",
)]  # fmt: skip
ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]


def test_the_tree_is_that_of_certificate_transparency() -> None:
    """Its published roots, and for each leaf of each size a path that leads to the root, and from nowhere else."""
    tree = merkle.Tree()
    assert tree.root() == "sha256:" + hashlib.sha256().hexdigest()
    hashes = [merkle.leaf_hash(leaf) for leaf in LEAVES]
    for size, (leaf, root) in enumerate(zip(hashes, ROOTS, strict=True), 1):
        tree.add(leaf)
        assert tree.root() == f"sha256:{root}"
        for index in range(size):
            way = merkle.path(merkle.levels(hashes[:size]), index)
            assert merkle.root_of(hashes[index], index, size, way) == tree.root()
            for wrong in range(-1, size + 1):
                if wrong != index:
                    assert merkle.root_of(hashes[index], wrong, size, way) != tree.root()
            assert merkle.root_of(hashes[index], index, size, [*way, hashes[0].hex()]) is None
            assert not way or merkle.root_of(hashes[index], index, size, way[:-1]) != tree.root()


def test_a_file_that_is_full_is_sealed_and_the_next_is_chained_to_it(directory: Path) -> None:
    """One chain; each file but the first says which it is, each but the last ends with a seal."""
    made = segments.fill(directory, 12)
    parts = sorted((directory / "segments").iterdir())
    assert [part.name for part in parts] == [f"{number:06}.jsonl" for number in range(1, len(parts) + 1)]
    before = None
    for number, part in enumerate([*parts, directory / "audit.jsonl"], 1):
        found = [chain.parse(line) for line in part.read_bytes().splitlines(keepends=True)]
        if before:
            assert (found[0].kind, found[0].prev, found[0].data["segment"]) == ("segment.begun", before.hash, number)
        if part in parts:
            assert (found[-1].kind, found[-1].data["segment"]) == ("segment.sealed", number)
        before = found[-1]
    report = verify(directory, keys=segments.KEYS)
    assert (report.ok, report.segments, report.removed) == (True, len(parts), 0)
    assert report.records == len(made) + 2 * len(parts)
    head = read.head(directory)
    assert head.size == sum(len(line) for line in segments.all_lines(directory))


def test_a_table_is_written_once_in_each_segment_before_what_names_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By each process that writes to it; where the disk refused it, with the next that names it."""
    file = LogFile(directory, "s_1", segments.rotation())
    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", lambda _: os.close(-1))
        with pytest.raises(AuditError, match="record sandbox"):
            file.commit([started("c_0")])
    found = [file.commit([draft(decided(f"c_{number}")), started(f"c_{number}")]) for number in range(9)]
    again = LogFile(directory, "s_2", segments.rotation(1 << 30))
    assert [each.kind for each in again.commit([started("c_8")])] == ["sandbox.table", "sandbox.started"]
    kinds = [[each.kind for each in records] for records in found]
    assert kinds[0] == ["sandbox.table", "call.decided", "sandbox.started"]
    parts = [*sorted((directory / "segments").iterdir()), directory / "audit.jsonl"]
    assert len(parts) > 2
    for part in parts:
        lines = [chain.parse(line).kind for line in part.read_bytes().splitlines(keepends=True)]
        first = next(number for number, kind in enumerate(lines) if kind == "sandbox.started")
        assert lines[:first].count("sandbox.table") == 1
        assert lines.count("sandbox.table") == 1 + (part is parts[-1])
    assert verify(directory, keys=segments.KEYS).ok


def test_a_tree_grows_with_each_record_and_what_was_there_before_is_hashed_in_steps(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So no commit hashes more than a step, that of the seal included; one that is long overdue hashes all at once."""
    hashed: list[int] = []
    linked = chain.linked

    def counted(line: bytes, before: Head) -> Head | None:
        hashed.append(len(line))
        return linked(line, before)

    monkeypatch.setattr(chain, "linked", counted)
    monkeypatch.setattr(audit_file, "_STEP_BYTES", 4096)
    segments.fill(directory, 40, size=1 << 30)
    assert hashed == []
    size = read.head(directory).size
    monkeypatch.setattr(audit_file, "_AGAIN_BYTES", 9000)
    for late, most in ((0, 4096), (9000, size)):
        copy = directory.with_name(f"copy{late}")
        shutil.copytree(directory, copy)
        file = LogFile(copy, "s_2", segments.rotation(size - late))
        steps: list[int] = []
        while not (copy / "segments").exists():
            file.commit([draft(decided(f"c_{len(steps)}"))])
            steps.append(sum(hashed))
            hashed.clear()
        file.close()
        assert abs(max(steps) - most) < 1024
        assert (len(steps) == 1) is bool(late)
        assert verify(copy, keys=segments.KEYS).ok


@pytest.mark.long
def test_nothing_is_sealed_before_it_is_due_with_the_shipped_numbers(directory: Path) -> None:
    """16 MiB or a day: a log one record short of it is one file, with that record it is not (the control)."""
    assert (SEGMENT_BYTES, SEGMENT_SECONDS) == (16 * 2**20, 86400)
    file = LogFile(directory, "s_1", Rotation(signer=segments.SIGNER))
    big = draft(ServerStopped(reason="x" * 1_000_000))
    while read.head(directory).size + 1_000_300 < SEGMENT_BYTES:
        file.commit([big])
    assert not (directory / "segments").exists()
    file.commit([big])
    file.close()
    assert [path.name for path in (directory / "segments").iterdir()] == ["000001.jsonl"]
    assert verify(directory).ok


def test_a_segment_ends_after_a_day(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the first record after it, also where another process began it; before that it goes on (the control)."""
    LogFile(directory, "s_1").close()
    now = time.time()
    file = LogFile(directory, "s_1", Rotation(signer=segments.SIGNER))
    file.commit([draft(decided())])
    monkeypatch.setattr(time, "time", lambda: now + SEGMENT_SECONDS - 60)
    file.commit([draft(finished())])
    assert not (directory / "segments").exists()
    monkeypatch.setattr(time, "time", lambda: now + SEGMENT_SECONDS + 60)
    file.commit([draft(decided("c_2"))])
    file.close()
    assert kinds(directory)[3:] == ["segment.sealed", "segment.begun"]


def test_an_earlier_log_goes_on_and_rotates(tmp_path: Path) -> None:
    """It was written before there were segments: what it holds is the first."""
    place = tmp_path / "audit"
    shutil.copytree(KEPT / "audit", place)
    for each in (place, *place.iterdir()):
        each.chmod(0o700 if each.is_dir() else 0o600)
    earlier = (place / "audit.jsonl").read_bytes()
    # However long ago it was written.
    file = LogFile(place, "g1", Rotation(signer=segments.SIGNER, segment_seconds=math.inf))
    file.commit([draft(ServerStopped(reason="test"))])
    assert file.seal() == 1
    file.close()
    assert (place / "segments" / "000001.jsonl").read_bytes().startswith(earlier)
    report = verify(place, keys=segments.KEYS)
    assert (report.problems, report.segments) == ((), 1)


async def test_a_log_that_is_not_told_to_rotate_stays_one_file(directory: Path) -> None:
    """As what has no key to sign with."""
    async with AuditLog.open(directory, "s_1") as log:
        for _ in range(40):
            await log.append(ServerStopped(reason="x" * 1000))
    assert not (directory / "segments").exists()


def test_a_file_that_may_not_be_renamed_is_not_sealed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``chattr +a``: the log goes on in one file as before; asked to seal, it says what is in the way."""
    monkeypatch.setattr("glovebox_audit.place.LogDirectory.may_rename", lambda *_: False)
    segments.fill(directory, 5)
    assert not (directory / "segments").exists()
    file = LogFile(directory, "s_1", segments.rotation())
    with pytest.raises(AuditError, match="chattr -a"):
        file.seal()
    file.close()
    monkeypatch.undo()
    segments.fill(directory, 1)
    assert (directory / "segments").exists()


def test_an_append_only_file_is_recognised(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the flag the kernel has for it; by a directory without write permission too."""
    file = LogFile(directory, "s_1", segments.rotation())
    assert file._place.may_rename(file._log_fd)
    with monkeypatch.context() as patch:

        def flagged(_: int, __: int, flags: bytearray) -> int:
            flags[0] = 0x20
            return 0

        patch.setattr("fcntl.ioctl", flagged)
        assert not file._place.may_rename(file._log_fd)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_, **__: False)
        assert not file._place.may_rename(file._log_fd)
    file.close()


def test_readers_see_one_log(directory: Path) -> None:
    """The last lines, and a call's records, also of one that began in a segment that was sealed since."""
    file = LogFile(directory, "s_1", segments.rotation())
    file.commit([draft(decided("c_long"))])
    segments.fill(directory, 12)
    file.commit([draft(finished("c_long"))])
    file.close()
    assert [record.kind for record in read.records_of(directory, "c_long")] == ["call.decided", "call.finished"]
    assert [record.kind for record in read.records_of(directory, "c_1")] == ["call.decided", "call.finished"]
    assert list(read.records_of(directory, "c_none")) == []
    seqs = [line.record.seq for line in read.tail(directory, 1000) if line.record]
    assert seqs == list(range(1, len(segments.all_lines(directory)) + 1))
    assert [line.record.seq for line in read.tail(directory, 7) if line.record] == seqs[-7:]


async def test_following_goes_over_a_rotation(directory: Path) -> None:
    """No line is missed or told twice."""
    segments.fill(directory, 1)
    stream = subscription.follow(directory, 100)
    seen = [await anext(stream)]
    segments.fill(directory, 12, first=1)
    total = len(segments.all_lines(directory))
    while len(seen) < total:
        seen.append(await anext(stream))
    await stream.aclose()
    assert [line.record.seq for line in seen if line.record] == list(range(1, total + 1))


def test_a_call_lost_in_an_earlier_segment_is_found(directory: Path) -> None:
    """Its server was killed, and others sealed the segment in which it began."""
    dead = LogFile(directory, "s_dead", segments.rotation())
    dead.commit([draft(decided("c_cut"))])
    living = LogFile(directory, "s_living", segments.rotation())
    for number in range(12):
        living.commit([draft(decided(f"c_{number}"))])
        living.commit([draft(finished(f"c_{number}"))])
    dead.close()
    assert "call.lost" not in kinds(directory)
    LogFile(directory, "s_next", segments.rotation()).close()
    living.close()
    lost = [each for each in map(chain.parse, segments.all_lines(directory)) if each.kind == "call.lost"]
    assert [each.call_id for each in lost] == ["c_cut"]
    assert verify(directory, keys=segments.KEYS).problems == ()


def test_a_start_reads_no_sealed_segment(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither lists nor opens one; after a kill it reads from the segment in which a call may be open (the control)."""
    segments.fill(directory, 30)
    opened: list[str] = []
    real = os.open

    def noted(path: str | Path, *args: int, **kwargs: int) -> int:
        opened.append(str(path))
        return real(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", noted)
        patch.setattr("glovebox_audit.segments.files.listed", None)
        file = LogFile(directory, "s_new", segments.rotation())
    file.commit([draft(decided("c_cut"))])
    file.close()
    assert not any("segments/" in path for path in opened)
    segments.fill(directory, 12, server="s_new", first=100)
    (directory / "writers" / "s_dead.json").write_bytes(chain.encode_head(Head()))
    (directory / "writers" / "s_dead.json").chmod(0o600)
    monkeypatch.setattr(os, "open", noted)
    LogFile(directory, "s_newer", segments.rotation()).close()
    assert any("segments/" in path for path in opened)


def test_a_folder_that_is_open_to_others_is_no_place_for_segments(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Refused like the log itself. Opened under a server: not sealed, calls go on, and each try says so; then it is."""
    file = LogFile(directory, "s_1", segments.rotation(1))
    (directory / "segments").mkdir(mode=0o777)
    for call in ("c_0", "c_1"):
        file._due_size = 0
        assert file.commit([draft(decided(call))])
    assert caplog.text.count("segments is open to other users") == 2
    with pytest.raises(AuditError, match="segments is open to other users"):
        file.seal()
    with pytest.raises(AuditError, match="segments is open to other users"):
        LogFile(directory, "s_2", segments.rotation())
    (directory / "segments").chmod(0o700)
    assert file.seal() == 1
    LogFile(directory, "s_2", segments.rotation()).close()
    file.commit([draft(decided("c_2"))])
    file.close()
    assert files.listed(directory)[0] == (1, 2)
    (directory / files.name(1)).chmod(0o644)
    file = LogFile(directory, "s_1", segments.rotation(10**9))
    file.commit([draft(decided("c_3"))])
    with pytest.raises(AuditError, match=r"000001\.jsonl is open to other users"):
        file.seal()
    (directory / files.name(1)).chmod(0o600)
    assert file.seal() == 3
    file.close()
    assert verify(directory, keys=segments.KEYS).problems == ()


@pytest.mark.parametrize("length", [10, 8191, 8192, 8193, 20_000, chain.MAX_LINE_BYTES])
def test_the_last_line_of_a_file_is_found_whatever_its_length(tmp_path: Path, length: int) -> None:
    """Shorter than what is read first, longer, and at the border; also where it is the only one."""
    line = b"x" * (length - 1) + b"\n"
    for before in (b"", b"\n", b"before\n"):
        (tmp_path / "file").write_bytes(before + line)
        with files.opened(tmp_path / "file") as descriptor:
            assert files.line_before(descriptor, len(before) + length) == line


def test_calls_under_way_over_a_seal_are_known(directory: Path) -> None:
    """An end without a beginning is found; in a sealed segment, or one that is not known, it has one (controls)."""
    file = LogFile(directory, "s_1", segments.rotation())
    file.commit([draft(decided("c_long"))])
    segments.fill(directory, 12)
    assert verify(directory).ok
    file.commit([draft(finished("c_long"))])
    assert verify(directory).problems == ()
    file.commit([draft(finished("c_never"))])
    file.close()
    assert [each.kind for each in verify(directory).problems] == ["call"]
    end = chain.seal(draft(finished("c_1")), seq=2, time="2026-11-20T12:00:00.000001Z", server="s_1", prev="a" * 64)
    assert OpenCalls(forgot=True).note(end, Head()) == ""
    assert "not under way" in OpenCalls().note(end, Head())


NEWER = b'{"data":{},"format":2,"hash":"x","kind":"call.decided","prev":"y","seq":3}\n'


def test_what_a_newer_version_wrote_is_refused_with_that_sentence(directory: Path) -> None:
    """By the verifier and by the writer, which takes rubbish for the rest of a crash (control), and this not."""
    segments.fill(directory, 1, size=10**9)
    with (directory / "audit.jsonl").open("ab") as log:
        log.write(NEWER)
    (problem,) = verify(directory).problems
    assert (problem.kind, problem.line) == ("newer", 3)
    assert "made by a newer Glovebox (format 2" in problem.detail
    with pytest.raises(AuditError, match="made by a newer Glovebox"):
        LogFile(directory, "s_1")
    (directory / "audit.jsonl").write_bytes(b"".join(log_lines(directory)[:-1]) + NEWER.replace(b"format", b"fermat"))
    LogFile(directory, "s_1").close()
    assert verify(directory).gaps == 1
    segments.fill(directory, 4)
    lines = log_lines(directory)
    first = chain.parse(lines[0])
    data = {**first.data, "format": 2}
    item = chain.Draft(kind=first.kind, call_id=None, data=data, encoded=chain.canonical(data))
    forged = chain.seal(item, seq=first.seq, time=first.time, server=first.server, prev=first.prev)
    (directory / "audit.jsonl").write_bytes(forged.line)
    (directory / "head.json").write_bytes(chain.encode_head(Head(seq=first.seq, hash=forged.hash, size=10**6)))
    assert "newer" in {problem.kind for problem in verify(directory).problems}
    with pytest.raises(AuditError, match="made by a newer Glovebox"):
        LogFile(directory, "s_1")


@pytest.mark.parametrize(
    "name", ["0000001.jsonl", "000000.jsonl", "1.jsonl", "000001.jsonl.bak", "x\n.jsonl", "000900000.jsonl"]
)
def test_what_lies_among_the_segments_and_is_none_is_found(directory: Path, name: str) -> None:
    """Under any name but exactly a segment's; without it the log is whole (the control)."""
    segments.fill(directory, 6)
    copy = directory / "segments" / name
    shutil.copyfile(directory / files.name(1), copy)
    assert [(each.file, each.kind) for each in verify(directory).problems] == [(f"segments/{name}", "foreign")]
    copy.unlink()
    assert verify(directory).ok


def test_a_hole_of_any_length_is_one_problem_at_once(directory: Path) -> None:
    """A segment under the highest number there can be: its name costs no time."""
    segments.fill(directory, 6)
    last = files.listed(directory)[0][-1]
    shutil.copyfile(directory / files.name(last), directory / files.name(999_999_999))
    missing = [each for each in verify(directory).problems if each.kind == "missing"]
    assert missing[0].detail.startswith(f"segments {last + 1} to 999999998 are missing")


@pytest.mark.parametrize(
    "when", ["2026-13-45T99:99:99.000000Z", "0000-00-00T00:00:00.000000Z", "2026-02-30T00:00:00.000000Z"]
)
def test_a_time_that_cannot_be_is_no_records(directory: Path, when: str) -> None:
    """Found by ``verify``, and nothing fails over it; with one that can be it is a record (the control)."""
    segments.fill(directory, 1, size=10**9)
    for time_said, whole in ((when, False), ("2026-01-01T00:00:00.000000Z", True)):
        made, prev = b"", chain.GENESIS
        for seq, event in enumerate((decided(), finished()), 1):
            record = chain.seal(draft(event), seq=seq, time=time_said, server="s_1", prev=prev)
            made, prev = made + record.line, record.hash
        (directory / "audit.jsonl").write_bytes(made)
        (directory / "head.json").write_bytes(chain.encode_head(Head(seq=2, hash=prev, size=len(made))))
        assert verify(directory).ok is whole
        assert files.start_of(made.splitlines(keepends=True)[0]).number == 1
        if not whole:
            assert {each.kind for each in verify(directory).problems} == {"foreign"}
            with pytest.raises(AuditError, match="record 2 was changed"):
                LogFile(directory, "s_1", segments.rotation())


def test_a_first_record_that_names_no_segment_begins_the_first() -> None:
    """The last is the control."""
    cases: tuple[dict[str, Any], ...] = ({"segment": 0}, {"segment": "2"}, {"offset": -1}, {"offset": None}, {})
    for wrong in cases:
        event = SegmentBegun(**{"format": chain.FORMAT, "segment": 2, "offset": 5, **wrong})
        line = chain.seal(draft(event), seq=9, time="2026-01-01T00:00:00.000000Z", server="s_1", prev="0" * 64).line
        assert files.start_of(line).number == (1 if wrong else 2)
