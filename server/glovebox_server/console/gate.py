"""The gate of every request to the console: Host, Origin, session, form, role; and the headers of every answer.

Rule 1  It wraps the whole application. Without a session there are the sign-in page and the files it needs.
Rule 2  Host must be a loopback name with our port, as against DNS rebinding; Origin, if sent, one of the same. What
        changes anything is a POST, which browsers send an Origin with.
Rule 3  A cookie is sent to every port of a host, so to servers of others too: the session's is bound to a path that
        only its own pages name. Path and form token are derived from the session's secret.
Rule 4  A form has the token of its session, and the role that its action wants.
Rule 5  Refusals are counted on record by their rule, and by the name where it is known.
"""

import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qs

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glovebox_server.console.people import People, Person, Role
from glovebox_server.guards.budgets.spending import read_clocks
from glovebox_server.requests import Refusals
from glovebox_server.stores.database import Database
from glovebox_server.transport.auth import PRINCIPAL_SCOPE_KEY
from glovebox_server.transport.oauth.authority import GateRefusal

PERSON_SCOPE_KEY: Final = PRINCIPAL_SCOPE_KEY
"""That of callers: connections of a session do not give way to those of strangers."""
MAX_FORM_BYTES: Final = 64 * 1024
_FORM_SECONDS: Final = 10.0
_MAX_FIELDS: Final = 32
#: https://www.w3.org/TR/CSP3/ and https://www.w3.org/TR/trusted-types/.
HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " form-action 'self'; base-uri 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'; trusted-types glovebox"
    ),
    "X-Content-Type-Options": "nosniff",
    # With `no-referrer` browsers send `Origin: null` with forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(eq=False, kw_only=True)
class ConsoleGate:
    """The ASGI application around the pages, and what they ask about a request."""

    database: Database
    hosts: frozenset[str]
    inner: ASGIApp = field(init=False)
    refuse: Callable[[GateRefusal, Person | None], Response] = field(init=False)
    refusals: Refusals = field(default_factory=Refusals)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.inner(scope, receive, send)
            return

        async def framed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            self._require_ours(Headers(scope=scope), scope["method"])
        except GateRefusal as refusal:
            await self.answer(refusal, scope)(scope, receive, framed)
        else:
            await self.inner(scope, receive, framed)

    def answer(self, refusal: GateRefusal, scope: Scope) -> Response:
        """Count a refusal of a request, and return a page about it."""
        person: Person | None = scope.get(PERSON_SCOPE_KEY)
        self.refusals.note(refusal.rule, None if person is None else person.principal)
        return self.refuse(refusal, person)

    async def identify(self, request: Request) -> Person:
        """Put the person whose session it is into the scope, and return them. Raises GateRefusal."""
        secret = secret_of(request)
        person = await self.database.query(lambda db: People(db, read_clocks()).find(secret)) if secret else None
        place = request.path_params["place"]
        if person is None or not hmac.compare_digest(derived(secret, "path").encode(), place.encode()):
            words = "This needs a session: have a link made with `glovebox console link`, and open it."
            raise GateRefusal("console.session", 401, words)
        request.scope[PERSON_SCOPE_KEY] = person
        return person

    async def form(self, request: Request, person: Person, role: Role) -> dict[str, str]:
        """Return the fields of a form that changes something. Raises GateRefusal."""
        fields = await read_form(request)
        token = derived(secret_of(request), "form")
        if not hmac.compare_digest(fields.pop("token", "").encode(), token.encode()):
            raise GateRefusal("console.form", 403, "This form is not of this session: load the page again.")
        if not person.may(role):
            words = f"{person.name} is a {person.role} here, and this takes an {role}."
            raise GateRefusal("console.role", 403, words)
        return fields

    def _require_ours(self, headers: Headers, method: str) -> None:
        host, origin = headers.getlist("host"), headers.getlist("origin")
        if len(host) != 1 or host[0].lower() not in self.hosts:
            raise GateRefusal("console.host", 421, "This is not a name of this console.")
        ours = {f"http://{each}" for each in self.hosts}
        if origin and (len(origin) != 1 or origin[0].lower() not in ours):
            raise GateRefusal("console.origin", 403, "This request comes from another page.")
        if method != "GET" and not origin:
            raise GateRefusal("console.origin", 403, "This request does not say which page it comes from.")
        if headers.get("sec-fetch-site", "none") not in {"none", "same-origin"} and method != "GET":
            raise GateRefusal("console.origin", 403, "This request comes from another page.")


def cookie_of(place: str) -> str:
    """Return the name of a session's cookie: one that no server on another port can set for it."""
    return f"glovebox_{place}"


def secret_of(request: Request) -> str:
    """Return the secret that came for this place; empty for none."""
    return request.cookies.get(cookie_of(request.path_params["place"]), "")


def derived(secret: str, use: str) -> str:
    """Return what stands for a session's secret in one use; nothing leads back to it."""
    return hmac.new(secret.encode(), use.encode(), hashlib.sha256).hexdigest()[:32]


async def read_form(request: Request) -> dict[str, str]:
    """Return a form's fields, each once, of at most ``MAX_FORM_BYTES``. Raises GateRefusal."""
    none = GateRefusal("console.form", 400, "This is no form of this console.")
    if request.headers.get("content-type", "") != "application/x-www-form-urlencoded":
        raise none
    body = bytearray()
    try:
        with anyio.fail_after(_FORM_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_FORM_BYTES:
                    raise GateRefusal("console.form", 413, "This form is too large.")
        found = parse_qs(body.decode("ascii"), keep_blank_values=True, max_num_fields=_MAX_FIELDS, errors="strict")
    except (ValueError, TimeoutError):
        raise none from None
    if any(len(values) != 1 for values in found.values()):
        raise none
    return {name: values[0] for name, values in found.items()}
