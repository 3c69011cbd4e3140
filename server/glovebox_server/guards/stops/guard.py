"""Refuses what is stopped, and ends what is stopped while it is delayed, waits, is scanned or runs (GB-LIFE-8)."""

import anyio
import anyio.lowlevel

from glovebox_server.calls import CallResult
from glovebox_server.core.call import Call, CallDeniedError
from glovebox_server.core.chain import Next
from glovebox_server.guards.stops.stops import Stops


async def refuse(stops: Stops, call: Call, call_next: Next[CallResult]) -> CallResult:
    """Enter the rest unless a stop names the call; cancel the rest once one does."""
    with anyio.CancelScope() as scope, stops.ending(call.request, scope) as stopped:
        otherwise = call.ended_by

        async def look(call: Call) -> None:
            """Obey a stop that was made while the decision was recorded."""
            stops.refusal(call.request)
            await anyio.lowlevel.checkpoint_if_cancelled()

        call.ended_by = lambda: ("stop", stopped.stop) if stopped.refusal else otherwise()
        call.objections.insert(0, lambda request, _: stops.refusal(request))  # denied in its turn, like any call
        call.on_decided.append(look)
        return await call_next(call)
    # Nothing else cancels that scope: a call that ran is recorded as cancelled, and its sandbox is gone.
    raise CallDeniedError(stopped.refusal)
