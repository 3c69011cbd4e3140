"""Reserves budgets before calls and settles them right after. Waits for the file are off the event loop.

A failure to settle never holds a result back: the reservation stays spent until it can be settled.
"""

import logging
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, NoReturn, TypeVar

import anyio

from glovebox_profiles.egress.targets import pattern_covers
from glovebox_profiles.policy.model import Rate
from glovebox_sandboxes.contract.errors import Refusal
from glovebox_sandboxes.host.owner import is_of_another_boot, is_orphan, new_mark
from glovebox_server.calls import CallResult, Image, Link, Principal, Text
from glovebox_server.core.call import Attempt, Call, CallDeniedError
from glovebox_server.core.rights import Rights
from glovebox_server.egress.gate import Traffic
from glovebox_server.errors import StoreError
from glovebox_server.guards.budgets import spending, store
from glovebox_server.guards.budgets.spending import Amounts, Clocks, Funds, Spender, read_clocks
from glovebox_server.guards.budgets.store import Ledger, ReservationRequest
from glovebox_server.stores import database
from glovebox_server.stores.database import Database
from glovebox_server.tools.base import BudgetRemainder

_log = logging.getLogger(__name__)

MAX_UNSETTLED: Final = 1024
"""Calls whose failed settling is retried; of others the most they could spend stays spent."""
_T = TypeVar("_T")


@dataclass(kw_only=True)
class Reservation:
    """The reservation and spending of one call."""

    asked: ReservationRequest
    granted: Sequence[Funds]
    _began: float = field(default_factory=anyio.current_time)
    _told: Amounts | None = None

    def spent(self, now: Attempt, result: CallResult) -> CallResult:
        """Take the call's usage and output size; return its result, with the remainder if it is low."""
        if now.finished is None:
            return result
        used = now.finished.usage
        scan_ms = used.get("scan_ms", 0)  # of one processor
        self._told = {
            "failures": int(result.failed),
            "wall_seconds": spending.amount("wall_seconds", (used["wall_ms"] + scan_ms) / 1000),
            "cpu_seconds": self._cpu(now)
            if used["cpu_ms"] is None
            else spending.amount("cpu_seconds", (used["cpu_ms"] + scan_ms) / 1000),
            "disclosed_bytes": sum(map(_bytes, result.content)) + result.beside,
            "artifacts": sum(isinstance(each, Link) for each in result.content),
        }
        low = [left for each in self.granted for left in spending.little(each, self.amounts(now))]
        if not low:
            return result
        note = Text(text=f"[left of your budgets: {'; '.join(map(spending.said, low))}]")
        structured = {**result.structured, "budget": [asdict(each) for each in low]}
        return replace(result, structured=structured, content=(*result.content, note))

    def amounts(self, now: Attempt) -> Amounts:
        """Return what was spent. Without a result, which may have had much output: the measured or maximum amounts."""
        counted = now.traffic or Traffic()
        traffic = {"calls": 1, "connections": counted.connections, "fetched_bytes": counted.received_bytes}
        if self._told is not None:
            return {**traffic, **self._told}
        taken: dict[str, int] = {}
        for each in self.granted if now.is_started else ():
            for name, n in each.takes.items():
                taken[name] = max(n, taken.get(name, 0))
        wall = min(self.wall(), self.asked.worst["wall_seconds"])
        return {**taken, **traffic, "failures": 1, "wall_seconds": wall, "cpu_seconds": self._cpu(now)}

    def wall(self) -> int:
        """Return the time since it was made."""
        return spending.amount("wall_seconds", anyio.current_time() - self._began)

    def _cpu(self, now: Attempt) -> int:
        return min(self.wall() * now.profile.limits.processors, self.asked.worst["cpu_seconds"])


def _bytes(content: Text | Image | Link) -> int:
    if isinstance(content, Text):
        return len(content.text.encode("utf-8", "replace"))
    return len(content.data) if isinstance(content, Image) else 0


class Budgets:
    """The open budgets of a state directory; make it with ``opened``."""

    def __init__(self, database: Database, clocks: Callable[[], Clocks]) -> None:
        self._database = database
        self._over = anyio.Event()
        self._clocks = clocks
        self._server = new_mark()
        self._unsettled: list[tuple[str, Amounts]] = []

    @asynccontextmanager
    async def reserved(self, now: Attempt, worst: Amounts | None = None) -> AsyncIterator[Reservation]:
        """Reserve what the call may spend, for the block, and charge what it spent.

        ``worst`` is the most that a look at files spends within the block; None if the call runs in it, and spends
        nothing if it breaks off before its decision is on record.

        Raises CallDeniedError: too little is left, or the file fails.
        """
        call, who = now.request, now.request.principal
        spender = Spender(principal=who.id, run=call.run or "", workflow=who.workflow or "", tool=call.tool)
        asked = ReservationRequest(
            call_id=call.id,
            spender=spender,
            lines=spending.lines_of(now.rights.budgets, spender),
            worst=worst or spending.worst_case(now.profile, call.arguments),
        )
        try:
            granted = await self._transact(lambda ledger: ledger.reserve(self._server, asked))
        except StoreError as problem:
            _log.error("A call was refused: %s", problem)
            granted = problem.refusal
        if isinstance(granted, Refusal):
            raise CallDeniedError(granted)
        reservation = Reservation(asked=asked, granted=granted)
        runs = False
        try:
            yield reservation
            runs = True
        finally:
            if worst is not None:
                spent: Amounts = dict.fromkeys(worst, reservation.wall())
            else:
                spent = reservation.amounts(now) if runs or now.is_recorded else {}
            # Its caller does not wait for this. Later requests of this server to the file come after it.
            if len(self._unsettled) < MAX_UNSETTLED:
                self._unsettled.append((call.id, spent))
            self._over.set()

    async def reserve(self, lift: Callable[[Call, Refusal], bool] | None, call: Call) -> None:
        """Hold a reservation for the call, and charge what it used and gave back.

        ``lift`` has a refusal asked about, and returns True if a person may lift it: then it is tried again.

        Raises CallDeniedError: too little is left, and no person may lift that.
        """
        try:
            reservation = await call.stack.enter_async_context(self.reserved(call.now))
        except CallDeniedError as denial:
            if denial.refusal is None or lift is None or not lift(call, denial.refusal):
                raise
            reservation = await call.stack.enter_async_context(self.reserved(call.now))
        now, granted = call.now, reservation.granted
        now.on_connect.append(partial(self.connect, reservation.asked, now.rights.rates))
        now.max_connections += [each.takes["connections"] for each in granted if "connections" in each.takes]

        async def charge(result: CallResult) -> CallResult:
            return reservation.spent(call.now, result)

        now.on_result.append(charge)

    async def settling(self) -> NoReturn:
        """Settle calls as they end. One task for all: starting one is a tenth of what budgets cost a call."""
        while True:
            await self._over.wait()
            self._over = anyio.Event()
            await self.settle()

    async def settle(self) -> None:
        """Count what ended calls spent. Not cancelled; a failure is logged and retried."""
        if not self._unsettled:
            return
        with anyio.CancelScope(shield=True):
            try:
                await self._transact(_tidied)
            except StoreError as problem:
                _log.warning("What a call spent stays at the most it could, until this is put right: %s", problem)
            except Exception:  # noqa: BLE001 - an internal error ends no server
                # Not tried again: it would fail each call that comes after.
                self._unsettled.clear()
                _log.exception("What calls spent cannot be counted, and stays at the most they could")

    async def connect(self, asked: ReservationRequest, rates: Sequence[Rate], host: str) -> Refusal | None:
        """Count one connection of a call to this host; return why none is allowed now, or None."""
        lines = spending.rates_of([each for each in rates if pattern_covers(each.host, host)], asked.spender)
        if not lines:
            return None
        one = replace(asked, lines=lines, worst={"connections": 1})
        try:
            refused = await self._transact(lambda ledger: ledger.spend(one))
        except StoreError as problem:
            return problem.refusal
        return refused and replace(refused, rule="egress.rate")

    async def left(self, principal: Principal, run: str | None, rights: Rights) -> list[BudgetRemainder]:
        """Return what is left of everything that bounds a caller. Raises StoreError: the file cannot be read."""
        spender = Spender(principal=principal.id, run=run or "", workflow=principal.workflow or "", tool="")
        lines = spending.all_lines(rights.budgets, rights.rates, spender, rights.profiles)
        await self.settle()
        return await self._database.query(lambda connection: Ledger(connection, self._clocks()).left(lines))

    async def _transact(self, work: Callable[[Ledger], _T]) -> _T:
        unsettled, self._unsettled = self._unsettled, []

        def all_of_it(connection: sqlite3.Connection) -> _T:
            ledger = Ledger(connection, self._clocks())
            for call_id, spent in unsettled:
                ledger.settle(call_id, spent)
            return work(ledger)

        try:
            return await self._database.transact(all_of_it)
        except BaseException:
            self._unsettled = [*unsettled, *self._unsettled][:MAX_UNSETTLED]
            raise


def _tidied(ledger: Ledger) -> None:
    # Here, not before a call: it looks through all there is. What is over, or of a dead server, grants nothing anyway.
    if ledger.is_untidy:
        ledger.tidy(lambda server: is_orphan(server) or is_of_another_boot(server))


@asynccontextmanager
async def opened(state_dir: Path, clocks: Callable[[], Clocks] = read_clocks) -> AsyncIterator[Budgets]:
    """Open the budgets of a state directory for the block. Raises StoreError: their file cannot be used."""
    with database.opened(state_dir / database.DIRECTORY / store.NAME, store.SCHEMA) as found:
        async with anyio.create_task_group() as tasks:
            budgets = Budgets(found, clocks)
            tasks.start_soon(budgets.settling)
            try:
                yield budgets
            finally:
                tasks.cancel_scope.cancel()
                await budgets.settle()
