"""The gate of every HTTP request: Host, Origin, bearer token, size, time and JSON.

Rule 1  It wraps the whole application, so no route, method or transport is without it. Without a token, /health answers
        "ok", /ready 200 or 503, and nothing else; the address of the authorization server, if any, is public. /metrics
        is no caller's: it has a token of its own, or is for this machine.
Rule 2  Host must be one of this server's names: a web page that resolves its own name to this address (DNS rebinding)
        sends its own Host. Origin, which browsers send, must be one of the same.
Rule 3  One Authorization header with a known token, or with one of the authorization server's. The token's name, or its
        subject, is the caller. When a token is removed, replaced or expires, what was begun with it ends.
Rule 4  A body is read whole, within a size and a time, and must mean one thing to every reader. So its length is given
        in one way: a proxy in front could use the other one and see another request (RFC 9112, 6.1).
Rule 5  Each caller has its share of the connections, and of the event loop's time, after which it waits: none can keep
        the others out. A request is read and answered before its calls are counted; bodies of one caller are read one
        after the other, many at once delay only their sender.
Rule 6  Errors name the rule and nothing else of the server.
"""

from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sized
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, Final

import anyio
import mcp_types as types
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glovebox_server.calls import Principal
from glovebox_server.mcp.server import ENDINGS_SCOPE_KEY
from glovebox_server.requests import Refusals
from glovebox_server.transport import stdio
from glovebox_server.transport.oauth.authority import METADATA_PATH, GateRefusal, TokenAuthority, address_of
from glovebox_server.transport.tokens import Callers, TokenGrant
from glovebox_server.upkeep.readiness import Readiness

if TYPE_CHECKING:
    from glovebox_server.telemetry.prometheus import Scrape

#: Largest request body in bytes. The largest sound request is a program of about 100 kB.
MAX_BODY_BYTES: Final = 1 << 20
#: Seconds in which a client must send its body, and in which the body may wait to be read.
BODY_SECONDS: Final = 10.0
#: Seconds that a call may wait for its caller's share: as long as for a turn later.
CALL_WAIT_SECONDS: Final = 45.0
#: Connections at a time, below the usual limit of 1,024 open files; callers share them evenly.
MAX_CONNECTIONS: Final = 900
#: Connections, or sessions, that a token may have however many tokens there are, if there are any left: a client has a
#: stream and some calls.
LEAST_SHARE: Final = 8
#: Key of the caller in the ASGI scope.
PRINCIPAL_SCOPE_KEY: Final = "glovebox.principal"
HEALTH_PATH: Final = "/health"
#: Answers 200 if the server can serve calls.
READY_PATH: Final = "/ready"
METRICS_PATH: Final = "/metrics"
#: The reason for an ended request, in records and answers.
REMOVED: Final = "token removed"
EXPIRED: Final = "token expired"
CLOSED: Final = "stream closed"
#: Paths of the older transport, for the record.
_SSE_PATHS: Final = ("/sse", "/messages")

Look = Callable[[], Awaitable[Readiness]]


@dataclass(slots=True, eq=False, kw_only=True)
class _OpenRequest:
    """A request past the gate, until it is answered."""

    principal: Principal
    grant: TokenGrant
    asks: bool
    """False if it is a stream for later messages of the server."""
    closed: anyio.Event = field(default_factory=anyio.Event)
    """Set when its client has closed the stream."""
    running: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    identity: tuple[str, str] | None = None
    """Its session and its id as text, if it has both."""


@dataclass(eq=False)
class AuthMiddleware:
    """The ASGI application around the application."""

    inner: ASGIApp
    hosts: Collection[str]
    callers: Callers
    authority: TokenAuthority | None = None
    refusals: Refusals = field(default_factory=Refusals)
    look: Look | None = None
    scrape: "Scrape | None" = None
    """Answers ``/metrics``; None if that is off."""

    def __post_init__(self) -> None:
        """Begin with no request."""
        self._hosts = frozenset(host.lower() for host in self.hosts)
        self._origins = frozenset(f"{scheme}://{host}" for scheme in ("http", "https") for host in self._hosts)
        self._requests: defaultdict[str, set[_OpenRequest]] = defaultdict(set)
        """By caller: what others have open costs a request nothing."""
        self._alike = Counter[str]()
        self._shares = Shares(MAX_CONNECTIONS, self.callers, subjects=self.authority is not None)
        self._reading, self._calling = RequestTurns(), RequestTurns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through or answer it; close anything but HTTP and the lifespan."""
        if scope["type"] == "lifespan":
            await self.inner(scope, receive, send)
        elif scope["type"] == "http":
            try:
                answer = await self._public(scope)
                if answer is None:
                    await self._admit(await self._identify(scope), scope, receive, send)
                    return
            except GateRefusal as refusal:
                caller: Principal | None = scope.get(PRINCIPAL_SCOPE_KEY)
                self.refusals.note(refusal.rule, None if caller is None else caller.id)
                answer = Response(refusal.detail, refusal.status_code, refusal.headers)
            await answer(scope, receive, send)

    async def _public(self, scope: Scope) -> Response | None:
        """Answer a request that needs no caller; return None for one that may continue."""
        if _values(scope, b"content-length") and _values(scope, b"transfer-encoding"):
            raise GateRefusal("message", 400, "The body has two lengths", {"Connection": "close"})
        host, origin = _values(scope, b"host"), _values(scope, b"origin")
        if len(host) != 1 or host[0].lower() not in self._hosts:
            raise GateRefusal("http.host", 421, "Unknown Host")
        if origin and (len(origin) != 1 or origin[0].lower() not in self._origins):
            raise GateRefusal("http.origin", 403, "Foreign Origin")
        if scope["method"] != "GET":
            return None
        if self.authority and scope["path"].startswith(METADATA_PATH):
            return self.authority.metadata(host[0], scope["path"])
        if self.scrape is not None and scope["path"] == METRICS_PATH:
            text = await self.scrape.answer((scope.get("client") or ("",))[0], _presented(scope))
            if text is None:
                raise GateRefusal("http.token", 401, "A token for /metrics is needed", {"WWW-Authenticate": "Bearer"})
            return text
        if _values(scope, b"authorization"):
            return None
        if scope["path"] == READY_PATH and self.look is not None:
            return readiness_answer(await self.look(), told=False)
        return JSONResponse({"status": "ok"}) if scope["path"] == HEALTH_PATH else None

    async def _identify(self, scope: Scope) -> _OpenRequest:
        """Put the caller into the scope; raise GateRefusal for an unidentified one."""
        presented = _presented(scope)
        grant = self.callers.grant(presented)
        if grant is None and self.authority:
            address = address_of((scope.get("client") or ("",))[0])
            grant = await self.authority.enter(presented, _values(scope, b"host")[0], scope["path"], address)
        if grant is None:
            raise GateRefusal("http.token", 401, "A bearer token is needed", {"WWW-Authenticate": "Bearer"})
        scope[PRINCIPAL_SCOPE_KEY] = principal = Principal(
            id=grant.principal, transport="sse" if scope["path"].startswith(_SSE_PATHS) else "http",
            workflow=grant.workflow, user=grant.user, roles=grant.roles, scopes=grant.scopes,
        )  # fmt: skip
        # The SDK binds a session to the client that opened it through this; it never needs the token itself.
        scope["user"] = AuthenticatedUser(AccessToken(token="", client_id=grant.principal, scopes=[]))
        request = _OpenRequest(principal=principal, grant=grant, asks=scope["method"] != "GET")
        endings = {REMOVED: grant.removed, CLOSED: request.closed}
        # Each event costs a call a task of its own.
        scope[ENDINGS_SCOPE_KEY] = endings if grant.expires is None else {**endings, EXPIRED: grant.expired}
        return request

    async def _admit(self, request: _OpenRequest, scope: Scope, receive: Receive, send: Send) -> None:
        who, kind = request.principal.id, kind_of(request.principal.id)
        if not self._shares.allows(who, len(self._requests.get(who, ())), self._alike[kind]):
            raise GateRefusal("busy.requests", 429, "Too many requests of this caller are open")
        self._requests[who].add(request)
        self._alike[kind] += 1
        try:
            with request.running:
                await self._pass(request, scope, receive, send)
            if request.running.cancelled_caught:
                try:
                    await Response("The token was removed, or expired", status_code=401)(scope, receive, send)
                except RuntimeError:  # of uvicorn: an answer was begun
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._alike[kind] -= 1
            self._requests[who].discard(request)
            if not self._requests[who]:
                del self._requests[who]

    def expire(self, now: float) -> bool:
        """Expire the tokens of requests under way; return whether any expired."""
        over = [each.grant.expire(now) for own in self._requests.values() for each in own]
        return any(over)

    def cut(self) -> None:
        """End what is still open with tokens that are no longer in effect: streams, and unanswered requests."""
        for each in [each for own in self._requests.values() for each in own]:
            if each.grant.removed.is_set() or each.grant.expired.is_set():
                each.closed.set()
                each.running.cancel()

    async def _pass(self, request: _OpenRequest, scope: Scope, receive: Receive, send: Send) -> None:
        body: bytes | None = await _body(scope, receive)
        if body is None:  # the client left
            return
        principal = request.principal
        value = await self._parse(scope["method"], principal, body)
        if self.authority and (tool := stdio.tool_of(value)):
            host = _values(scope, b"host")[0]
            self.authority.step_up(principal, host, scope["path"], tool)
        # The SDK keeps one answer per id as text: two requests with one id would get each other's.
        identity = stdio.known_id(value) if isinstance(value, dict) and "method" in value else None
        session = "".join(_values(scope, b"mcp-session-id"))
        if session and identity is not None:
            asked = session, str(identity)
            if any(each.identity == asked for each in self._requests[principal.id]):
                reason = "a request of this session has this id, as text, and is not answered yet; use another"
                raise _malformed(stdio.MessageError(types.INVALID_REQUEST, reason, identity))
            request.identity = asked

        async def observed() -> Message:
            nonlocal body
            if body is not None:
                message: Message = {"type": "http.request", "body": body, "more_body": False}
                body = None
                return message
            message = await receive()
            if message["type"] == "http.disconnect":
                request.closed.set()
            return message

        await self.inner(scope, observed, send)

    async def _parse(self, method: str, principal: Principal, body: bytes) -> object:
        """Return the message of a body, read in its caller's turn; raise GateRefusal if it is none."""
        caller = principal.id
        try:
            with anyio.fail_after(BODY_SECONDS):
                async with self._reading.turn(caller):
                    # A caller that waits for each of its requests delays others by no more than that request.
                    beside = sum(method == "GET" or each.asks for each in self._requests[caller])
                    charged = beside > 1 or principal.transport == "sse"
                    if charged:
                        self._reading.charge(caller, REQUEST_SECONDS)
                    value: object = stdio.parse_message(body) if method == "POST" else None
            if stdio.tool_of(value) is not None:
                with anyio.fail_after(CALL_WAIT_SECONDS):
                    async with self._calling.turn(caller):
                        if charged:
                            self._calling.charge(caller, CALL_SECONDS)
        except TimeoutError:
            raise GateRefusal("busy.requests", 429, "Too many requests of this caller are waiting") from None
        except stdio.MessageError as error:
            raise _malformed(error) from None
        return value


def readiness_answer(found: Readiness, *, told: bool) -> Response:
    """Answer a readiness request; ``told`` includes what is missing."""
    content = {"status": "ok" if found.ready else "not ready"} | (asdict(found) if told else {})
    return JSONResponse(content, HTTPStatus.OK if found.ready else HTTPStatus.SERVICE_UNAVAILABLE)


def _malformed(error: stdio.MessageError) -> GateRefusal:
    content = error.answer.model_dump_json(by_alias=True, exclude_unset=True)
    return GateRefusal("message", 400, content, {"Content-Type": "application/json"})


async def _body(scope: Scope, receive: Receive) -> bytes | None:
    """Return the whole body; None when the client left. Raises GateRefusal for one that is too long or too slow."""
    declared = "".join(_values(scope, b"content-length")[:1])
    too_large = GateRefusal("message.size", 413, "The body is too large")
    is_number = declared.isdecimal() and len(declared) <= len(str(MAX_BODY_BYTES))
    if declared and (not is_number or int(declared) > MAX_BODY_BYTES):
        raise too_large
    body = bytearray()
    with anyio.move_on_after(BODY_SECONDS):
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            body += message.get("body", b"")
            if len(body) > MAX_BODY_BYTES:
                raise too_large
            if not message.get("more_body", False):
                return bytes(body)
    raise GateRefusal("http.slow", 408, "The body took too long")


def _presented(scope: Scope) -> str:
    """Return the bearer token of a request; empty for none, or several."""
    authorization = _values(scope, b"authorization")
    kind, _, presented = authorization[0].partition(" ") if len(authorization) == 1 else ("", "", "")
    return presented.strip() if kind.lower() == "bearer" else ""


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


#: Share of the loop's time for one caller's requests. Ordinary ones take a thousandth of it.
SHARE = 0.25
#: Total cost of a body, as a multiple of its first reading: the SDK reads it again, models check it, and report all
#: errors (measured: up to 5.4).
WHOLE = 6.0
#: Seconds of the loop that any request takes beside its body: `ping` 1.3 ms, `tools/list` 1.7 (measured).
REQUEST_SECONDS = 0.0015
#: Seconds of the loop that a call takes in addition: records, sandbox, answer (measured, `print(1)`).
CALL_SECONDS = 0.008
#: Seconds since another caller's request after which a caller is alone, and delays no other.
ALONE_SECONDS = 10.0
#: Callers with remembered debts, more than arrive in the time in which one could have any.
MAX_ACCOUNTS = 4096
#: Seconds of the loop that a caller may be ahead of its share.
AHEAD_SECONDS = 0.02


@dataclass(slots=True)
class _Account:
    turn: anyio.Lock = field(default_factory=lambda: anyio.Lock(fast_acquire=True))
    paid: float = 0.0
    """Time at which the spending so far equals the caller's share."""
    seen: float = 0.0


class RequestTurns:
    """Reads the requests of all callers. One per server."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    @asynccontextmanager
    async def turn(self, caller: str) -> AsyncIterator[None]:
        """Wait for a caller's turn to have a request served; charge it for the time of the context's body."""
        account = self._seen(caller)
        async with account.turn:
            debt = account.paid - self._clock() - AHEAD_SECONDS / SHARE
            if debt > 0:
                await anyio.sleep(debt)
            began = self._clock()
            account.paid = max(account.paid, began)
            try:
                yield
            finally:
                account.paid += (self._clock() - began) * WHOLE / SHARE

    def charge(self, caller: str, seconds: float) -> None:
        """Charge a caller who is not alone, in its turn, for its request: seconds of the loop."""
        account = self._accounts.get(caller)
        if account is not None and not self._alone(caller):  # None: forgotten while it waited
            account.paid += seconds / SHARE

    def _seen(self, caller: str) -> _Account:
        account = self._accounts.pop(caller, None) or _Account()
        account.seen = self._clock()
        self._accounts[caller] = account
        if len(self._accounts) > MAX_ACCOUNTS:
            del self._accounts[next(iter(self._accounts))]
        return account

    def _alone(self, caller: str) -> bool:
        # Of the two latest, one is another caller.
        latest = islice(reversed(self._accounts.items()), 2)
        return all(name == caller or each.seen < self._clock() - ALONE_SECONDS for name, each in latest)


class Shares:
    """Shares out a bounded number of places among the callers.

    Tokens are counted, so each has an even share; of very many, each may have ``LEAST_SHARE`` while there are any left,
    as not all are in use at once. The subjects of an authorization server are not. Beside tokens they have half of the
    places, and of those one may hold as many as are left. So something is always left, and each newcomer gets part of
    it: the dynamic threshold of ``glovebox_sandboxes.sharing``.
    """

    def __init__(self, most: int, callers: Sized, *, subjects: bool) -> None:
        self._most = most
        self._callers = callers
        self._subjects = subjects

    def allows(self, principal: str, held: int, alike: int) -> bool:
        """Return whether a caller may take one more place: it has ``held``, and all of its kind have ``alike``."""
        theirs = 0
        if self._subjects:
            theirs = self._most // 2 if len(self._callers) else self._most
        if kind_of(principal) != "token":
            return held < theirs - alike
        even = (self._most - theirs) // max(1, len(self._callers))
        return held < even if even >= LEAST_SHARE else held < LEAST_SHARE and alike < self._most - theirs


def kind_of(principal: str) -> str:
    """Return ``token``, or what else stands before the colon of a caller's id."""
    return principal.partition(":")[0]
