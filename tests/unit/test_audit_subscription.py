"""Reading the log: its last lines, one call, and what comes next, live, in order and never in the log's way."""

from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from mcp.shared.exceptions import MCPError
from tests.fixtures.audit_logs import decided, fill, finished, log_lines

from glovebox_audit import chain, read, subscription
from glovebox_audit.chain import Record
from glovebox_audit.events import ServerStarted
from glovebox_audit.log import AuditLog
from glovebox_audit.place import AuditError
from glovebox_audit.segments.files import HEAD_NAME, LOG_NAME
from glovebox_audit.subscription import MAX_WAITING_RECORDS, Missed, Subscription
from glovebox_server.calls import Principal
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
