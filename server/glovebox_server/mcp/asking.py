"""Ask the person at the client whether a call may run: elicitation, in each protocol era.

Until 2025-11-25 the server sends ``elicitation/create`` while the call waits. Since 2026-07-28 the call is answered
with the question. The client repeats the call with the answer and a state, which ``seal_states`` binds to caller, tool
and arguments. The state only names the question, which stays on the server. A model cannot answer: only the host
application's answer counts, never an argument.
"""

from typing import Any, Final

import anyio.to_thread
import mcp_types as types
from mcp.server.request_state import RequestStateBoundary, RequestStateSecurity
from mcp.shared.exceptions import NoBackChannelError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from glovebox_profiles.policy.model import Reach
from glovebox_server.calls import Principal
from glovebox_server.guards.approvals.question import ApprovalAnswer, Question
from glovebox_server.guards.approvals.shown import shown
from glovebox_server.mcp.delivery import Context, Identify

#: Longest question in bytes: clients reject messages of a few hundred. A longer one is never cut, because people can
#: only approve what they can read. It is left to ``glovebox approvals``.
MAX_ASKED_BYTES: Final = 64 * 1024
#: Lifetime of a state in seconds; the question it names ends long before.
STATE_SECONDS: Final = 24 * 3600.0
#: Name of the request in a result that asks, and of the one field of its form.
_REQUEST: Final = "approval"
_FIELD: Final = "answer"
_ALLOW: Final = "allow"
_ALLOW_RUN: Final = "allow for this run"
_DENY: Final = "deny"


class ClientMustAnswerError(Exception):
    """The call ends with a question; the client answers by repeating the call."""

    def __init__(self, question: Question, text: str) -> None:
        """Make the result that asks."""
        super().__init__(question.id)
        params = types.ElicitRequestFormParams(message=text, requested_schema=_form(question))
        asked = {_REQUEST: types.ElicitRequest(params=params)}
        self.result = types.InputRequiredResult(input_requests=asked, request_state=question.id)


async def ask_client(
    ctx: Context, principal: Principal, params: types.CallToolRequestParams, question: Question
) -> ApprovalAnswer | None:
    """Ask the client of a ``tools/call`` request; return None if it cannot be asked, or gave no answer.

    Raises ClientMustAnswerError: the answer comes with the client's next request.
    """
    declared = ctx.session.client_capabilities
    elicitation = declared.elicitation if declared else None
    if elicitation is None or (elicitation.form is None and elicitation.url is not None):
        return None
    text = await anyio.to_thread.run_sync(shown, question)
    if len(text.encode()) > MAX_ASKED_BYTES:
        return None
    if ctx.protocol_version in MODERN_PROTOCOL_VERSIONS:
        if params.request_state != question.id:
            raise ClientMustAnswerError(question, text)
        given = (params.input_responses or {}).get(_REQUEST)
        return _read_answer(principal, question, given) if isinstance(given, types.ElicitResult) else None
    try:
        result = await ctx.session.elicit_form(text, _form(question), ctx.request_id)
    except NoBackChannelError:
        return None
    return _read_answer(principal, question, result)


def _read_answer(principal: Principal, question: Question, result: types.ElicitResult) -> ApprovalAnswer | None:
    word = (result.content or {}).get(_FIELD) if result.action == "accept" else _DENY
    if result.action == "cancel" or word not in _words(question):
        return None
    reach: Reach = "run" if word == _ALLOW_RUN else "call"
    return ApprovalAnswer(allow=word != _DENY, by=principal.id, channel="client", reach=reach, digest=question.digest)


def seal_states(key: bytes, identify: Identify) -> RequestStateBoundary:
    """Return the SDK's middleware that binds states to their caller and request, and refuses all others.

    The servers of a state directory share ``key``, for this use alone.
    """
    security = RequestStateSecurity(keys=[key], ttl=STATE_SECONDS, bind_principal=lambda ctx: identify(ctx).id)
    return RequestStateBoundary(security, default_audience="glovebox")


def _words(question: Question) -> tuple[str, ...]:
    return (_ALLOW, _ALLOW_RUN, _DENY) if question.asked.reach == "run" else (_ALLOW, _DENY)


def _form(question: Question) -> dict[str, Any]:
    choice = {"type": "string", "title": "ApprovalAnswer", "enum": list(_words(question))}
    return {"type": "object", "properties": {_FIELD: choice}, "required": [_FIELD]}
