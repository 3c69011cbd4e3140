"""A call is looked for where its id says that it is: in few segments, at the cost of whoever asks."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from mcp.shared.exceptions import MCPError
from tests.fixtures import segments
from tests.fixtures.artifact_stores import ALICE
from tests.fixtures.audit_logs import decided, finished

from glovebox_audit import chain, read
from glovebox_audit import file as audit_file
from glovebox_audit.chain import Record, draft
from glovebox_audit.file import LogFile
from glovebox_server import calls
from glovebox_server.mcp import resources
from glovebox_server.mcp.resources import Resources

DAY = 86400.0
START = datetime(2026, 11, 1, tzinfo=UTC).timestamp()


class Days:
    """A log of one segment a day, the last one open, whose clock a test sets."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.now = START
        self.scanned: list[str] = []
        monkeypatch.setattr("glovebox_audit.chain.time.time_ns", lambda: round(self.now * 1e9))
        monkeypatch.setattr(audit_file, "_now", self._written)
        records_in = read.records_in

        def counted(log: Any, size: int, call_id: str, start: int = 0) -> Iterator[Record]:
            self.scanned.append(str(size))
            return records_in(log, size, call_id, start)

        monkeypatch.setattr(read, "records_in", counted)
        self.log = LogFile(directory, "s_1", segments.rotation(size=1 << 30))

    def _written(self) -> str:
        return datetime.fromtimestamp(self.now, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    def id_at(self, time: float) -> str:
        before, self.now = self.now, time
        made, self.now = chain.new_call_id(), before
        return made

    def call(self, *, waits: float = 0.0, seals: bool = False) -> str:
        """A call that begins now, waits, and ends, in the next segment where it seals."""
        call_id = chain.new_call_id()
        self.now += waits
        self.log.commit([draft(decided(call_id, principal=ALICE.id))])
        if seals:
            self.seal()
        self.log.commit([draft(finished(call_id))])
        return call_id

    def seal(self) -> None:
        self.log.seal()

    def near(self, call_id: str) -> tuple[list[str], int]:
        self.scanned.clear()
        charged: list[int] = []
        found = [record.kind for record in read.records_near(self.directory, call_id, charged.append)]
        assert sum(charged) >= sum(map(int, self.scanned))
        return found, len(self.scanned)


@pytest.fixture
def days(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Days]:
    """Eight days with a call at noon each; the seventh began yesterday."""
    made = Days(tmp_path / "audit", monkeypatch)
    for number in range(8):
        made.now = START + number * DAY + DAY / 2
        made.call()
        made.now = START + (number + 1) * DAY
        if number < 7:
            made.seal()
    yield made
    made.log.close()


WHOLE = ["call.decided", "call.finished"]


def test_an_unknown_id_has_the_segments_of_its_time_read_and_no_others(days: Days) -> None:
    assert days.near(days.id_at(START + 2.5 * DAY)) == ([], 1)
    assert days.near(days.id_at(START + 3 * DAY - 1)) == ([], 2)
    assert days.near("c_" + "0" * 26) == ([], 0)
    assert days.near("c_" + "z" * 26) == ([], 1)
    assert days.near("c_1") == days.near("c_" + "u" * 26) == ([], 0)
    assert list(read.records_of(days.directory, days.id_at(START))) == []  # the control reads all of them
    assert len(days.scanned) == 8


def test_a_call_is_found_with_one_read_from_its_beginning_to_its_end(days: Days) -> None:
    """Also one that waited for an answer, and one that ends in the next segment."""
    assert days.near(days.call()) == (WHOLE, 1)
    assert days.near(days.call(waits=read.LATEST_SECONDS - 1, seals=True))[0] == WHOLE
    days.now += DAY
    later = days.call(seals=True)
    days.now += DAY
    days.seal()
    days.call()
    assert days.near(later) == (WHOLE, 2)


def test_a_segment_whose_times_do_not_run_forward_may_hold_any_call(days: Days) -> None:
    before = days.call()
    right, days.now = days.now, days.now + 365 * DAY
    ahead = days.call()
    days.seal()
    behind, days.now = days.call(), right + 60
    set_back = days.call()
    days.seal()
    days.now += DAY
    after = days.call()
    for call_id in (before, ahead, behind, set_back, after):
        assert days.near(call_id)[0] == WHOLE
    days.now = right + 2 * DAY
    days.seal()
    days.now, right = days.now + 9 * 365 * DAY, days.now
    hidden, days.now = days.call(), right
    days.seal()
    days.call()
    assert days.near(hidden)[0] == []  # both ends of its segment are right: whoever asks is told what was read
    assert list(read.records_of(days.directory, hidden))


async def test_whoever_reads_the_log_pays_for_it(days: Days, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once until what is free was scanned, then as paid for; in the same words for another caller's call."""
    slept: list[float] = []
    clock = 1000.0

    async def sleep(seconds: float) -> None:
        nonlocal clock
        slept.append(seconds)
        clock += seconds

    days.now = START + 7.6 * DAY
    monkeypatch.setattr(anyio, "sleep", sleep)
    monkeypatch.setattr(anyio, "current_time", lambda: clock)
    monkeypatch.setattr(resources, "LOG_BYTES_PER_SECOND", 1_000_000)
    monkeypatch.setattr(resources, "LOG_BYTES_AT_ONCE", 10_000_000)
    stores: Any = SimpleNamespace(settings=SimpleNamespace(state_dir=days.directory.parent))
    served = Resources(stores, anyio.Event())
    call_id = days.call()
    found = await served.read(ALICE, f"audit://calls/{call_id}")
    assert [each["kind"] for each in json.loads(found.contents[0].text)["records"]] == WHOLE  # type: ignore[union-attr]
    words = set[str]()
    for asked in (call_id, days.id_at(days.now)) * 20:
        with pytest.raises(MCPError) as refused:
            await served.read(calls.Principal(id="token:bob", transport="http"), f"audit://calls/{asked}")
        words.add(str(refused.value))
    (said,) = words
    assert "in the part of the log of 2026-11-08 14:24:00 UTC, which its id names; no other was read." in said
    assert not slept
    for _ in range(100):
        with pytest.raises(MCPError):
            await served.read(ALICE, f"receipt://{days.id_at(days.now)}")
    # Each looked at the two ends of eight files, at least.
    assert 10_000_000 + 1_000_000 * sum(slept) > 99 * 8 * read._SPAN_BYTES
