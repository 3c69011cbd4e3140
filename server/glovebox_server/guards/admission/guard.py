"""Gives a call one place and one fair turn, after its delay."""

from glovebox_server.calls import CallResult
from glovebox_server.core.call import Call
from glovebox_server.core.chain import Next
from glovebox_server.guards.admission.admission import Admission


async def wait_for_turn(admission: Admission, call: Call, call_next: Next[CallResult]) -> CallResult:
    """Hold a turn for the rest of the chain.

    Raises:
        RefusedError: Too many calls are under way, or no turn came. It is counted, not recorded.
    """
    request, delay = call.request, call.delay
    call.delay = 0.0  # a call that waited for a person does not wait again
    async with admission.enter(request.principal.id, request.tool, request.arguments, call.rights.turns, delay):
        return await call_next(call)
