"""Reserves what a call may spend before it runs, and settles what it spent."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from glovebox_sandboxes.contract.errors import Refusal
from glovebox_server.calls import CallResult
from glovebox_server.core.call import Call, CallDeniedError
from glovebox_server.guards.proposal import propose

if TYPE_CHECKING:  # it brings SQLite
    from glovebox_server.guards.budgets.budgets import Budgets


async def reserve(budgets: "Budgets", call: Call) -> None:
    """Hold a reservation for the call, and charge what it used and gave back.

    Raises:
        CallDeniedError: Too little is left, and no person may lift that.
    """
    try:
        await call.stack.enter_async_context(_reserved(budgets, call))
    except CallDeniedError as denial:
        if denial.refusal is None or not call.lift(denial.refusal):
            raise
        await call.stack.enter_async_context(_reserved(budgets, call))


@asynccontextmanager
async def _reserved(budgets: "Budgets", call: Call) -> AsyncIterator[None]:
    now = call.now
    async with budgets.reserved(propose(call)) as reservation:
        if isinstance(reservation, Refusal):
            raise CallDeniedError(reservation)
        now.on_started.append(reservation.started)
        now.on_connect.append(reservation.connect)
        now.on_traffic.append(reservation.counts)
        if reservation.connections is not None:
            now.max_connections.append(reservation.connections)

        async def charge(result: CallResult) -> CallResult:
            finished = call.now.finished
            return result if finished is None else reservation.spent(finished, result)

        now.on_result.append(charge)
        try:
            yield
        except BaseException:
            if not now.is_recorded:  # it does not run
                reservation.release()
            raise
