"""Asks the person at the client whether a call may run: elicitation, as each protocol era has it.

Until 2025-11-25 the server sends ``elicitation/create`` while the call waits. Since 2026-07-28 the call itself is
answered with what is asked, and the client makes it again with the answer and with a state that ``sealed`` has bound to
its caller, tool and arguments. What was asked stays on the server: the state names the question and nothing else.
A model cannot answer: what counts is the host application's answer, never an argument.
"""

from typing import Any, Final

import anyio.to_thread
import mcp_types as types
from mcp.server.context import CallNext, HandlerResult
from mcp.server.request_state import RequestStateBoundary, RequestStateSecurity
from mcp.shared.exceptions import MCPError, NoBackChannelError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from glovebox_server.calls import Principal
from glovebox_server.guards.approvals.question import Answer, Question, Reach
from glovebox_server.guards.approvals.shown import shown
from glovebox_server.mcp.delivery import Context, Identify

#: Longest text to be asked, in bytes: clients reject messages of a few hundred. What does not fit is never cut, for
#: nobody could say yes to what they cannot read: it is left to ``glovebox approvals``.
MAX_ASKED_BYTES: Final = 64 * 1024

#: How long a state is good for, in seconds; the question it names is over long before.
STATE_SECONDS: Final = 24 * 3600.0

#: Rule of a request whose state no server of this state directory gave its caller for it, or not lately.
STATE_RULE: Final = "approval.state"
_HINT: Final = "Make the call without requestState: it is asked anew."

#: How the SDK's refusals of states are told from others.
_INVALID: Final = "invalid_request_state"

#: Name of the request within a result that asks, and of the one field of its form.
_REQUEST: Final = "approval"
_FIELD: Final = "answer"
_ALLOW: Final = "allow"
_ALLOW_RUN: Final = "allow for this run"
_DENY: Final = "deny"


class ClientMustAnswer(Exception):  # noqa: N818 - it is no error
    """The call ends with a question, which its client answers by making the call again."""

    def __init__(self, question: Question, text: str) -> None:
        """Take what is asked, and what its person reads."""
        super().__init__(question.id)
        self.question = question
        self.text = text


class Asker:
    """Asks the client of one ``tools/call`` request."""

    def __init__(self, ctx: Context, principal: Principal, params: types.CallToolRequestParams) -> None:
        """Take the request, which may bring the answer to a question of an earlier one."""
        self._ctx = ctx
        self._principal = principal
        self._answered = params.request_state
        self._responses = params.input_responses or {}

    async def ask(self, question: Question) -> Answer | None:
        """Return what the person said; None where this client cannot be asked, or they said nothing.

        Raises:
            ClientMustAnswer: the answer comes with the client's next request.
        """
        if not _asks(self._ctx):
            return None
        text = await anyio.to_thread.run_sync(shown, question)
        if len(text.encode()) > MAX_ASKED_BYTES:
            return None
        if self._ctx.protocol_version in MODERN_PROTOCOL_VERSIONS:
            if self._answered != question.id:
                raise ClientMustAnswer(question, text)
            given = self._responses.get(_REQUEST)
            return self._said(question, given) if isinstance(given, types.ElicitResult) else None
        try:
            result = await self._ctx.session.elicit_form(text, _form(question), self._ctx.request_id)
        except NoBackChannelError:
            return None
        return self._said(question, result)

    def _said(self, question: Question, result: types.ElicitResult) -> Answer | None:
        word = (result.content or {}).get(_FIELD) if result.action == "accept" else _DENY
        if result.action == "cancel" or word not in _words(question):
            return None
        reach: Reach = "run" if word == _ALLOW_RUN else "call"
        return Answer(allow=word != _DENY, by=self._principal.id, channel="client", reach=reach, digest=question.digest)


def asked(must: ClientMustAnswer) -> types.InputRequiredResult:
    """The result of a call that ends with a question."""
    request = types.ElicitRequest(
        params=types.ElicitRequestFormParams(message=must.text, requested_schema=_form(must.question))
    )
    return types.InputRequiredResult(input_requests={_REQUEST: request}, request_state=must.question.id)


def sealed(key: bytes, identify: Identify) -> RequestStateBoundary:
    """What binds states to their caller and request, and lets none in that was not made so: a middleware of the SDK's.

    Args:
        key: shared by the servers of a state directory, for this use alone.
        identify: who makes a request.
    """
    security = RequestStateSecurity(keys=[key], ttl=STATE_SECONDS, bind_principal=lambda ctx: identify(ctx).id)
    return _Boundary(security, default_audience="glovebox")


class _Boundary(RequestStateBoundary):
    """The SDK's, whose refusals have a rule, by which they are counted."""

    async def __call__(self, ctx: Context, call_next: CallNext) -> HandlerResult:
        try:
            return await super().__call__(ctx, call_next)
        except MCPError as problem:
            data = problem.error.data
            if not isinstance(data, dict) or data.get("reason") != _INVALID:
                raise
            told = {**data, "rule": STATE_RULE, "hint": _HINT}
            raise MCPError(problem.error.code, problem.error.message, told) from None


def _asks(ctx: Context) -> bool:
    """Whether the client declared that it shows forms; an empty declaration means forms (2025-06-18)."""
    declared = ctx.session.client_capabilities
    elicitation = declared.elicitation if declared else None
    return elicitation is not None and (elicitation.form is not None or elicitation.url is None)


def _words(question: Question) -> tuple[str, ...]:
    return (_ALLOW, _ALLOW_RUN, _DENY) if question.asked.reach == "run" else (_ALLOW, _DENY)


def _form(question: Question) -> dict[str, Any]:
    choice = {"type": "string", "title": "Answer", "enum": list(_words(question))}
    return {"type": "object", "properties": {_FIELD: choice}, "required": [_FIELD]}
