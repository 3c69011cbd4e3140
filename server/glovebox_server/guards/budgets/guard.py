"""Reserves what a call may spend before it runs, and settles what it spent."""

from typing import TYPE_CHECKING

from glovebox_sandboxes.contract.errors import Refusal
from glovebox_server.calls import CallResult
from glovebox_server.core.call import Call, CallDeniedError
from glovebox_server.core.chain import Next
from glovebox_server.guards.proposal import propose

if TYPE_CHECKING:  # it brings SQLite
    from glovebox_server.guards.budgets.budgets import Budgets


async def reserve(budgets: "Budgets", call: Call, call_next: Next[CallResult]) -> CallResult:
    """Hold a reservation for the rest of the chain, and charge what the call used and gave back."""
    now = call.now
    async with budgets.reserved(propose(call)) as reservation:
        if isinstance(reservation, Refusal):
            raise CallDeniedError(reservation)
        now.on_started.append(reservation.started)
        now.on_connect.append(reservation.connect)
        now.on_traffic.append(reservation.counts)
        if reservation.connections is not None:
            now.max_connections.append(reservation.connections)
        try:
            result = await call_next(call)
        except BaseException:
            if not now.is_recorded:  # it does not run
                reservation.release()
            raise
        return result if now.finished is None else reservation.spent(now.finished, result)
