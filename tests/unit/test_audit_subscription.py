"""Reading the log: its last lines, one call where its id says that it is, and what comes next, never in its way."""

import json
from collections.abc import Iterable, Iterator
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from mcp.shared.exceptions import MCPError
from tests.fixtures import segments
from tests.fixtures.artifact_stores import ALICE as OWNER
from tests.fixtures.audit_logs import decided, fill, finished, log_lines

from glovebox_audit import chain, read, subscription
from glovebox_audit import file as audit_file
from glovebox_audit.chain import Record, draft
from glovebox_audit.events import ServerStarted
from glovebox_audit.file import LogFile
from glovebox_audit.log import AuditLog
from glovebox_audit.place import AuditError
from glovebox_audit.segments.files import HEAD_NAME, LOG_NAME
from glovebox_audit.subscription import MAX_WAITING_RECORDS, Missed, Subscription
from glovebox_server.calls import Principal
from glovebox_server.mcp import resources
from glovebox_server.mcp.resources import MAX_SUBSCRIPTIONS, Resources, Watches


async def drain(stream: Subscription) -> list[Record | Missed]:
    return [item async for item in stream]


def calls(items: list[Record | Missed]) -> list[str | None]:
    return [item.call_id for item in items if isinstance(item, Record)]


async def test_every_reader_gets_every_record_in_order_and_one_that_left_is_forgotten(tmp_path: Path) -> None:
    """Concurrent appends arrive in the order of the chain; the stream ends with the log."""
    async with AuditLog.open(tmp_path / "audit", "s_1") as log, log.subscribe() as one, log.subscribe() as two:
        async with anyio.create_task_group() as group:
            for number in range(50):
                group.start_soon(log.append, decided(f"c_{number}"))
        first = [await one.receive() for _ in range(50)]
        second = [await two.receive() for _ in range(50)]
    assert first == second
    assert [item.line for item in first if isinstance(item, Record)] == log_lines(tmp_path / "audit")
    async with AuditLog.open(tmp_path / "audit", "s_1") as log:
        async with log.subscribe() as stream:
            await stream.aclose()
            await log.append(decided())
            with pytest.raises(anyio.ClosedResourceError):
                await stream.receive()
        await log.append(decided())
        assert not log._subscriptions


async def test_a_reader_gets_its_call_or_its_principal_only(tmp_path: Path) -> None:
    """M3: records of another principal, or of the server, reach nobody who asked for one principal."""
    async with (
        AuditLog.open(tmp_path / "audit", "s_1") as log,
        log.subscribe(call_id="c_a") as by_call,
        log.subscribe(principal="token:alice") as by_principal,
        log.subscribe(call_id="c_b", principal="token:alice") as crossed,
        log.subscribe() as everything,
    ):
        await log.append(ServerStarted(version="0.1.0", pid=1, transport="http"))
        await log.append(decided("c_a", principal="token:alice"))
        await log.append(decided("c_b", principal="token:bob"))
        assert (log.owner_of("c_a"), log.owner_of("c_b"), log.owner_of("c_c")) == ("token:alice", "token:bob", None)
        await log.append(replace(finished("c_b"), principal="token:bob"))
        await log.append(replace(finished("c_a"), principal="token:alice"))
        await log.append(finished("c_a"))
        assert log.owner_of("c_a") is None
        log._close()
        assert calls(await drain(by_call)) == ["c_a", "c_a", "c_a"]
        # The second "finished" does not say whose it is.
        assert calls(await drain(by_principal)) == ["c_a", "c_a"]
        assert calls(await drain(crossed)) == []
        assert calls(await drain(everything)) == [None, "c_a", "c_b", "c_b", "c_a", "c_a"]


async def test_a_slow_reader_is_told_what_it_missed_and_delays_nobody(tmp_path: Path) -> None:
    """M13: appends go on; the gap carries the numbers to read from the disk, also after the end; later ones follow."""
    extra = 7
    async with AuditLog.open(tmp_path / "audit", "s_1") as log, log.subscribe() as slow:
        for number in range(MAX_WAITING_RECORDS + extra):
            await log.append(decided(f"c_{number}"))
        received = [await slow.receive() for _ in range(MAX_WAITING_RECORDS)]
        assert [item.seq for item in received if isinstance(item, Record)] == list(range(1, MAX_WAITING_RECORDS + 1))
        await log.append(decided("c_late"))
        first, last = MAX_WAITING_RECORDS + 1, MAX_WAITING_RECORDS + extra + 1
        assert await slow.receive() == Missed(count=extra + 1, first=first, last=last)
        record = await log.append(decided("c_later"))
        assert await slow.receive() == record
    async with AuditLog.open(tmp_path / "audit", "s_1") as log, log.subscribe() as stream:
        for number in range(MAX_WAITING_RECORDS + 1):
            await log.append(decided(f"c_{number}"))
        log._close()
        items = await drain(stream)
    assert isinstance(items[-1], Missed)
    assert len(items) == MAX_WAITING_RECORDS + 1


ALICE, BOB = (Principal(id=f"token:{name}", transport="http") for name in ("alice", "bob"))


def uri(number: int) -> str:
    return f"audit://calls/c_{number:026d}"


async def test_a_flood_of_subscriptions_ends_only_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over HTTP all principals' subscriptions live together; who asks for too many loses his own oldest."""

    async def watch(_self: Resources, *arguments: Any) -> None:
        with arguments[-1]:
            await anyio.sleep_forever()

    monkeypatch.setattr(Resources, "_watch", watch)
    monkeypatch.setattr(Resources, "_running", lambda *_: "c")
    resources = Resources(cast("Any", None), anyio.Event())
    async with anyio.create_task_group() as tasks:
        watches = Watches(tasks)
        ctx = cast("Any", SimpleNamespace(lifespan_context=watches))
        await resources.subscribe(ctx, ALICE, "a", uri(0))
        for number in range(MAX_SUBSCRIPTIONS + 1):
            await resources.subscribe(ctx, BOB, f"b{number % 2}", uri(number))
        assert (ALICE.id, "a", uri(0)) in watches.scopes
        assert not watches.scopes[ALICE.id, "a", uri(0)].cancel_called
        assert (BOB.id, "b0", uri(0)) not in watches.scopes
        assert len(watches.scopes) == 1 + MAX_SUBSCRIPTIONS
        tasks.cancel_scope.cancel()


async def test_nobody_subscribes_to_what_will_not_change() -> None:
    """A call that is over, another's or none: refused, where it was promised and never sent."""
    under_way = {uri(1).removeprefix("audit://calls/"): ALICE.id}
    stores = cast("Any", SimpleNamespace(audit=SimpleNamespace(owner_of=under_way.get)))
    resources = Resources(stores, anyio.Event())
    async with anyio.create_task_group() as tasks:
        ctx = cast("Any", SimpleNamespace(lifespan_context=Watches(tasks)))
        for principal, address in ((ALICE, uri(2)), (BOB, uri(1))):
            with pytest.raises(MCPError, match="You have no such running call"):
                await resources.subscribe(ctx, principal, None, address)
        assert resources._running(ALICE, uri(1))  # the control
        tasks.cancel_scope.cancel()


def seqs(lines: list[read.LogLine]) -> list[int | None]:
    return [None if line.record is None else line.record.seq for line in lines]


@pytest.mark.parametrize("block", [1, 7, 600, 1 << 16])
def test_tail_is_the_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(read, "_BLOCK_BYTES", block)
    fill(tmp_path / "empty", 0)
    assert read.tail(tmp_path / "empty", 10) == []
    fill(tmp_path, 5)
    for count in range(8):
        assert seqs(read.tail(tmp_path, count)) == list(range(1, 6))[5 - min(count, 5) :]
    with (tmp_path / LOG_NAME).open("ab") as handle:
        handle.write(b"half")
    assert seqs(read.tail(tmp_path, 2)) == [5, None]
    assert seqs(read.tail(tmp_path, 9)) == [1, 2, 3, 4, 5, None]


def test_one_call_is_found_among_others_and_rubbish(tmp_path: Path) -> None:
    """Records that merely mention the id belong to another call."""
    directory = tmp_path / "audit"
    fill(directory, 6)
    with (directory / LOG_NAME).open("ab") as handle:
        handle.write(b"c_1 rubbish\n")
    fill(directory, 1)
    found = [(record.seq, record.kind) for record in read.records_of(directory, "c_1")]
    assert found == [(3, "call.decided"), (4, "call.finished")]
    assert list(read.records_of(directory, "c_none")) == []


async def test_follow_sees_what_any_process_appends_and_says_when_the_log_became_shorter(tmp_path: Path) -> None:
    directory = tmp_path / "audit"
    fill(directory, 4)
    async with AuditLog.open(directory, "s_2") as log, aclosing(subscription.follow(directory, 2)) as lines:
        assert [(await anext(lines)).raw for _ in range(2)] == log_lines(directory)[2:]
        async with anyio.create_task_group() as group:
            group.start_soon(log.append, decided("c_new"))
            line = await anext(lines)
        assert line.record is not None
        assert line.record.call_id == "c_new"
    directory = tmp_path / "audit"
    fill(directory, 2)
    async with aclosing(subscription.follow(directory, 1)) as lines:
        await anext(lines)
        (directory / LOG_NAME).write_bytes(b"")
        with pytest.raises(AuditError, match="it became shorter"):
            await anext(lines)


def test_a_line_beyond_the_bound_is_read_in_parts(tmp_path: Path) -> None:
    """Parts share a line number and are never taken for records."""
    directory = tmp_path / "audit"
    records = fill(directory, 1)
    (directory / LOG_NAME).write_bytes(b"x" * chain.MAX_LINE_BYTES + records[0].line + records[0].line)
    found = read.tail(directory, 10)
    assert [(line.number, line.record is None) for line in found] == [(1, True), (1, True), (2, False)]


def test_the_head_is_read_or_its_absence_is_said(tmp_path: Path) -> None:
    """`glovebox audit head` never invents an anchor."""
    directory = tmp_path / "audit"
    record = fill(directory, 1)[0]
    assert (read.head(directory).seq, read.head(directory).hash) == (1, record.hash)
    (directory / HEAD_NAME).unlink()
    with pytest.raises(AuditError, match="missing or damaged"):
        read.head(directory)


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
        records_with = read.records_with

        def counted(log: Any, size: int, texts: Iterable[str], start: int = 0) -> Iterator[Record]:
            self.scanned.append(str(size))
            return records_with(log, size, texts, start)

        monkeypatch.setattr(read, "records_with", counted)
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
        self.log.commit([draft(decided(call_id, principal=OWNER.id))])
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
    """The clock was a year ahead for a while: what was written meanwhile, and since, is found, and what came before."""
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
    found = await served.read(OWNER, f"audit://calls/{call_id}")
    assert [each["kind"] for each in json.loads(found.contents[0].text)["records"]] == WHOLE  # type: ignore[union-attr]
    words = set[str]()
    for asked in (call_id, days.id_at(days.now)) * 20:
        with pytest.raises(MCPError) as refused:
            await served.read(Principal(id="token:bob", transport="http"), f"audit://calls/{asked}")
        words.add(str(refused.value))
    (said,) = words
    assert "in the part of the log of 2026-11-08 14:24:00 UTC, which its id names; no other was read." in said
    assert not slept
    for _ in range(100):
        with pytest.raises(MCPError):
            await served.read(OWNER, f"receipt://{days.id_at(days.now)}")
    # Each looked at the two ends of eight files, at least.
    assert 10_000_000 + 1_000_000 * sum(slept) > 99 * 8 * read._SPAN_BYTES
