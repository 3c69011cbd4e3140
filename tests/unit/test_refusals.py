"""Requests that never become a call are counted for everybody, and written rarely, whatever their number."""

import hashlib
import json
from collections import Counter

import anyio
import anyio.lowlevel
import pytest
from tests.fixtures.leftovers import until

from glovebox_audit.chain import draft
from glovebox_audit.event import Event
from glovebox_audit.events import RequestsRefused
from glovebox_audit.place import AuditError
from glovebox_server import requests as refusals
from glovebox_server.requests import MAX_PRINCIPALS, MAX_RULES, OTHER, OTHERS, Refusals


class Log:
    """Keeps what is written, and fails where it is told to."""

    def __init__(self) -> None:
        self.written: list[RequestsRefused] = []
        self.fails = False
        self.failed = 0

    async def append(self, event: Event) -> None:
        """Take one record."""
        await anyio.lowlevel.checkpoint()  # as a real one, it can be cancelled here by whoever does not shield it
        if self.fails:
            self.failed += 1
            raise AuditError("record", "the disk is full", "Free space.")
        assert isinstance(event, RequestsRefused)
        self.written.append(event)

    @property
    def bytes(self) -> int:
        """Of all data that was written."""
        return sum(len(draft(each).encoded) for each in self.written)

    def counts(self) -> Counter[tuple[str | None, str]]:
        """By caller and rule."""
        found: Counter[tuple[str | None, str]] = Counter()
        for each in self.written:
            for row in each.refused:
                found[row.get("principal"), row["rule"]] += row["count"]
        return found


async def test_a_million_refused_requests_are_a_few_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted to the last one; a caller that is refused once is named beside the one that floods."""
    monkeypatch.setattr(refusals, "PAUSE_SECONDS", 0.1)
    log, counted = Log(), Refusals()
    began = anyio.current_time()
    async with counted.recorded(log), anyio.create_task_group() as tasks:
        tasks.start_soon(counted.follow, log)
        for number in range(1_000_000):
            counted.note("http.token")
            if number % 100_000 == 0:
                await anyio.sleep(0.005)
        counted.note("arguments", "token:quiet")
        passed = anyio.current_time() - began
        tasks.cancel_scope.cancel()
    assert log.counts() == {(None, "http.token"): 1_000_000, ("token:quiet", "arguments"): 1}
    assert sum(each.count for each in log.written) == 1_000_001
    assert len(log.written) <= 2 + passed / 0.1
    assert log.bytes < 300 * len(log.written)


@pytest.mark.long
async def test_the_most_that_one_record_can_hold_is_small_and_strangers_have_their_place() -> None:
    """A thousand callers that break a hundred rules each; who came first is named, all are counted."""
    log, counted = Log(), Refusals()
    for caller in range(1000):
        for rule in range(100):
            counted.note(f"rule.{rule}", f"oauth:https://id.example#{caller}" + "x" * 1000)
    counted.note("http.host")
    await counted.record(log)
    (record,) = log.written
    assert record.count == 100_001
    principals = {row.get("principal") for row in record.refused}
    assert len(principals) == MAX_PRINCIPALS + 2
    assert {None, OTHERS} <= principals
    assert len(record.refused) == (MAX_PRINCIPALS + 1) * (MAX_RULES + 1) + 1
    assert log.counts()[OTHERS, OTHER] == (1000 - MAX_PRINCIPALS) * (100 - MAX_RULES)
    assert log.counts()[None, "http.host"] == 1
    assert log.bytes < 96 * 1024


async def test_the_first_after_a_pause_is_written_at_once_and_the_rest_once_in_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kill loses no more than came since the last record; one with many rows is followed by a longer pause."""
    assert (refusals.PAUSE_SECONDS, refusals.ROW_SECONDS) == (5, 0.2)
    monkeypatch.setattr(refusals, "MAX_PRINCIPALS", 100)
    pauses, over = list[float](), anyio.Event()

    async def slept(seconds: float) -> None:
        pauses.append(seconds)
        await over.wait()

    monkeypatch.setattr(anyio, "sleep", slept)
    log, counted = Log(), Refusals()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(counted.follow, log)
        await anyio.wait_all_tasks_blocked()
        assert log.written == []
        counted.note("http.token")
        await anyio.wait_all_tasks_blocked()
        assert [each.count for each in log.written] == [1]
        for caller in range(100):
            counted.note("arguments", f"token:{caller}")
        await anyio.wait_all_tasks_blocked()
        assert [each.count for each in log.written] == [1]
        over.set()
        over = anyio.Event()
        await anyio.wait_all_tasks_blocked()
        assert [each.count for each in log.written] == [1, 100]
        assert pauses == [5, 20]
        tasks.cancel_scope.cancel()


async def test_callers_have_places_of_their_own_and_are_counted_apart() -> None:
    """Whoever came first; of long names the record has the beginning and a digest, short ones are whole (control)."""
    log, counted = Log(), Refusals()
    counted.note("http.token")
    for number in range(MAX_PRINCIPALS + 1):
        counted.note("arguments", f"token:{number}")
    await counted.record(log)
    named = {principal for principal, _ in log.counts() if principal}
    assert len(named) == MAX_PRINCIPALS + 1
    assert log.counts()[OTHERS, "arguments"] == 1
    log, counted = Log(), Refusals()
    short, long = "o" * 128, "o" * 129
    for caller in (short, long, f"{long}a", f"{long}b", f"{long}b", f"{long}\udcff"):
        counted.note("arguments", caller)
    await counted.record(log)
    rows = {principal: count for (principal, _), count in log.counts().items() if principal}
    assert sorted(rows.values()) == [1, 1, 1, 1, 2]
    assert rows[short] == 1
    assert rows[f"{short}… sha256:{hashlib.sha256(f'{long}b'.encode()).hexdigest()}"] == 2


async def test_a_record_that_is_being_written_when_the_server_ends_is_written_once() -> None:
    """Cancelled in the middle of it, with nothing left for the end; and a later try needs no further refusal."""
    log, counted = Log(), Refusals()
    with anyio.CancelScope() as scope:
        async with counted.recorded(log), anyio.create_task_group() as tasks:
            counted.note("http.token")
            tasks.start_soon(counted.follow, log)
            while counted._since is not None:
                await anyio.lowlevel.checkpoint()
            scope.cancel()
    assert log.counts() == {(None, "http.token"): 1}


async def test_what_could_not_be_written_is_tried_again_without_another_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a pause; the control is that it was not written before."""
    monkeypatch.setattr(refusals, "PAUSE_SECONDS", 0.01)
    log, counted = Log(), Refusals()
    log.fails = True
    counted.note("http.token")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(counted.follow, log)
        await until(lambda: log.failed > 1)
        assert log.written == []
        log.fails = False
        await until(lambda: bool(log.written))
        tasks.cancel_scope.cancel()
    assert log.counts() == {(None, "http.token"): 1}


async def test_what_could_not_be_written_is_written_later_with_the_same_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full disk loses no count; the control is that nothing is written of nothing."""
    times = iter(("first", "second", "third"))
    monkeypatch.setattr(refusals, "_now", lambda: next(times))
    log, counted = Log(), Refusals()
    await counted.record(log)
    assert log.written == []
    log.fails = True
    counted.note("tool.unknown", "token:a")
    await counted.record(log)
    since = json.loads(json.dumps(counted.totals))
    counted.note("tool.unknown", "token:a")
    log.fails = False
    await counted.record(log)
    await counted.record(log)
    (record,) = log.written
    assert (record.count, log.counts()) == (2, {("token:a", "tool.unknown"): 2})
    assert since == {"tool.unknown": 1}
    assert record.since == "first"
    assert counted.totals == {"tool.unknown": 2}


async def test_the_last_counts_are_written_at_the_end_and_hold_nothing_of_a_request() -> None:
    """However the block ends; a record has callers that are known, rules of ours and numbers."""
    log, counted = Log(), Refusals()
    with anyio.CancelScope() as scope:
        async with counted.recorded(log):
            counted.note("run.handle", "token:a")
            scope.cancel()
            await anyio.sleep(1)
    (record,) = log.written
    data = draft(record).data
    assert set(data) == {"since", "count", "refused"}
    assert data["refused"] == [{"principal": "token:a", "rule": "run.handle", "count": 1}]
