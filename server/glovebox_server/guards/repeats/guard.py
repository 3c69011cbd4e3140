"""Slows, then refuses, a call that keeps failing in the same way."""

from glovebox_server.calls import CallResult
from glovebox_server.core.call import Call, CallDeniedError
from glovebox_server.core.chain import Next
from glovebox_server.guards.repeats.repeats import Repeats


async def slow(repeats: Repeats, call: Call, call_next: Next[CallResult]) -> CallResult:
    """Delay or refuse a call that failed several times in a row; note how it ends if it runs."""
    if pause := repeats.pause(call.request):
        call.listener.progress(f"Waiting {pause:g} s: this same call has just failed several times")
        call.delay = max(call.delay, pause)
    call.objections.append(lambda request, _: repeats.refusal(request))
    try:
        result = await call_next(call)
    except CallDeniedError:
        raise
    except Exception:
        if call.is_decided and call.now.is_recorded and call.now.decision.effect == "allow":
            repeats.note(call.request, failed=True)
        raise
    if call.now.finished is not None:  # a refusal is no failure
        repeats.note(call.request, failed=result.failed)
    return result
