"""The console's pages over HTTP: who may see and do what, and what is done. See ``gate`` for what keeps others out."""

import json
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
import jinja2
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from glovebox_audit import events
from glovebox_audit.chain import EvidenceError
from glovebox_audit.event import Event
from glovebox_audit.place import AuditError
from glovebox_audit.printable import printable
from glovebox_sandboxes.contract.errors import DiagnosedError, RefusedError
from glovebox_server.console.gate import PERSON_SCOPE_KEY, ConsoleGate, cookie_of, derived, read_form, secret_of
from glovebox_server.console.live import LiveCalls
from glovebox_server.console.people import SESSION_MS, People, Person, Role
from glovebox_server.console.views import View, Views, words_of
from glovebox_server.guards.approvals import store
from glovebox_server.guards.approvals.question import MAX_REASON, ApprovalAnswer
from glovebox_server.guards.approvals.shown import visible
from glovebox_server.guards.budgets.spending import read_clocks
from glovebox_server.guards.stops import stops
from glovebox_server.receipts import bundling
from glovebox_server.secret_files import SecretFileError
from glovebox_server.settings import Settings
from glovebox_server.stores.database import Database
from glovebox_server.transport.oauth.authority import GateRefusal
from glovebox_server.upkeep import stopping
from glovebox_server.upkeep.log import recording

_log = logging.getLogger(__name__)
_HERE: Final = Path(__file__).parent
_LOOK_SECONDS: Final = 0.25
"""Between two looks for news: what waits is on the page within a quarter of a second."""
_BEAT_SECONDS: Final = 2.0
"""Between two signs of life; a page says so when none came for five seconds."""
_MAX_STREAMS: Final = 32
_MAX_OF_SESSION: Final = 5
"""Of a browser's six connections to one address: the last one is for what it loads."""
_CALL: Final = re.compile(r"c_[0-9a-z]{1,26}", re.ASCII)

Act = Callable[[Person, Mapping[str, str]], str]
"""Does what a form says, in a worker thread; returns a sentence about it."""


@dataclass(eq=False)
class Console:
    """All pages of one state directory."""

    settings: Settings
    database: Database
    hosts: frozenset[str]
    live: LiveCalls = field(init=False)
    ends: Callable[[], bool] = lambda: False
    """Returns true once the server is to end: streams end first."""
    _streams: Counter[str] = field(default_factory=Counter)
    """By session: its pages that hear what is new."""
    _done: dict[str, str] = field(default_factory=dict)
    """By session: what its last action came to, for its next page."""

    def __post_init__(self) -> None:
        """Set up pages and actions."""
        self.live = LiveCalls(self.settings.state_dir / "audit")
        self._views = Views(settings=self.settings, live=self.live)
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(_HERE / "templates"), autoescape=True, undefined=jinja2.StrictUndefined,
            trim_blocks=True, lstrip_blocks=True, finalize=_shown,
        )  # fmt: skip
        self.gate = ConsoleGate(database=self.database, hosts=self.hosts)
        self.gate.refuse = self._tell_refusal
        self.gate.inner = Starlette(
            routes=[
                Route("/", self._enter_page, methods=["GET"]),
                Route("/enter", self._enter_page, methods=["GET"]),
                Route("/enter", self._enter, methods=["POST"]),
                Route("/go/{to:path}", self._go, methods=["GET"]),
                Mount("/static", StaticFiles(directory=_HERE / "static")),
                Route("/{place}/now", self._page("now", lambda *_: self._views.now())),
                Route("/{place}/waiting", self._page("waiting", lambda person, _: self._views.waiting(person))),
                Route("/{place}/history", self._page("history", lambda _, asked: self._views.history(asked))),
                Route("/{place}/profiles", self._page("profiles", lambda *_: self._views.profiles())),
                Route("/{place}/artifacts", self._page("artifacts", lambda *_: self._views.artifacts())),
                Route("/{place}/health", self._page("health", lambda *_: self._views.health())),
                Route("/{place}/call/{name}", self._call),
                Route("/{place}/bundle/{name}", self._bundle),
                Route("/{place}/stop", self._page("stop", lambda _, asked: _stop_asked(asked)), methods=["GET"]),
                Route("/{place}/events", self._events, methods=["GET"]),
                Route("/{place}/answer", self._action("approver", "waiting", self._answer), methods=["POST"]),
                Route("/{place}/stop", self._action("operator", "now", self._stop), methods=["POST"]),
                Route("/{place}/resume", self._action("operator", "now", self._resume), methods=["POST"]),
                Route("/{place}/leave", self._leave, methods=["POST"]),
            ],
            exception_handlers={HTTPException: self._on_problem, DiagnosedError: self._on_problem},
            lifespan=self._running,
        )

    @asynccontextmanager
    async def _running(self, _app: Starlette) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.live.follow)
            tasks.start_soon(self.gate.refusals.follow, self)
            yield
            tasks.cancel_scope.cancel()
        await self.gate.refusals.record(self)

    async def append(self, event: Event) -> None:
        """Write an event to the audit log; see ``Refusals``."""
        try:
            await anyio.to_thread.run_sync(self._record, event)
        except SecretFileError as problem:  # of the key that signs the log's segments
            raise AuditError("write to the audit log", str(problem), "") from problem

    def _record(self, event: Event) -> None:
        with recording(self.settings) as record:
            record(event)

    # --- Coming and going ---

    async def _enter_page(self, request: Request) -> Response:
        # Nothing is used up by a GET: what previews links must not.
        return self._render("enter", None, secret=request.query_params.get("link", "")[:128])

    async def _enter(self, request: Request) -> Response:
        fields = await read_form(request)
        try:
            session, person = await self.database.transact(
                lambda db: People(db, read_clocks()).enter(fields.get("link", ""))
            )
        except RefusedError as refusal:
            raise GateRefusal(refusal.rule, 403, f"{refusal.reason} {refusal.hint}") from None
        await self.append(events.ConsoleEntered(name=person.name, role=person.role))
        place = derived(session, "path")
        answer = RedirectResponse(f"/{place}/now", status_code=303)
        answer.set_cookie(
            cookie_of(place), session, max_age=SESSION_MS // 1000, path=f"/{place}/", httponly=True, samesite="strict"
        )
        return answer

    async def _go(self, _request: Request) -> Response:
        # A link from outside knows no session's path: the page's script does, in this browser.
        return self._render("go", None)

    async def _leave(self, request: Request) -> Response:
        person = await self.gate.identify(request)
        await self.gate.form(request, person, "viewer")
        await self.database.transact(lambda db: People(db, read_clocks()).leave(secret_of(request)))
        return RedirectResponse("/", status_code=303)

    # --- Pages ---

    def _page(self, name: str, view: Callable[[Person, Mapping[str, str]], View]) -> Callable[..., Awaitable[Response]]:
        async def page(request: Request) -> Response:
            person = await self.gate.identify(request)
            if self.live.indexing is not None:
                done, most = self.live.indexing
                return self._render("indexing", person, done=f"{done / most:.0%} of {most // 2**20} MiB")
            try:
                head = await self._head()  # before: what comes in between is news to the page
                found = head | await anyio.to_thread.run_sync(view, person, request.query_params)
            except (DiagnosedError, ValueError) as problem:
                raise GateRefusal("console.page", 400, str(problem)) from None
            return await self._shown_page(name, request, person, found)

        return page

    async def _call(self, request: Request) -> Response:
        person, name = await self.gate.identify(request), request.path_params["name"]
        found = await anyio.to_thread.run_sync(self._views.call, name) if _CALL.fullmatch(name) else None
        if found is None:
            raise GateRefusal("console.page", 404, "No call, or more than one, has an id that begins so.")
        return await self._shown_page("call", request, person, await self._head() | found)

    async def _bundle(self, request: Request) -> Response:
        await self.gate.identify(request)
        name = request.path_params["name"]
        try:
            if not _CALL.fullmatch(name):
                raise EvidenceError("this is no id of a call")  # noqa: TRY301 - as of one that is not there
            content = await anyio.to_thread.run_sync(bundling.make, self.settings, "call", name)
        except EvidenceError as problem:
            raise GateRefusal("console.page", 404, f"There is no bundle: {problem}.") from None
        attached = f'attachment; filename="{name}.bundle"'
        return Response(content, media_type="application/octet-stream", headers={"Content-Disposition": attached})

    async def _head(self) -> View:
        return await anyio.to_thread.run_sync(self._views.head)

    async def _shown_page(self, name: str, request: Request, person: Person, found: View) -> Response:
        token, looks = derived(secret_of(request), "form"), request.headers.get("sec-fetch-mode") == "cors"
        # An open page that renews itself must not take the sentence that is for another.
        done = "" if looks else self._done.pop(request.path_params["place"], "")
        return self._render(name, person, page=name, token=token, done=done, **found)

    async def _events(self, request: Request) -> Response:
        await self.gate.identify(request)
        if self._streams.total() >= _MAX_STREAMS or self._streams[request.path_params["place"]] >= _MAX_OF_SESSION:
            raise GateRefusal("console.streams", 429, "Too many pages of this console are open.")
        return StreamingResponse(self._beats(request), media_type="text/event-stream")

    async def _beats(self, request: Request) -> AsyncIterator[str]:
        """Yield a sign of life with the head of the log at each change, and every two seconds, until the session ends.

        So a page whose session is over hears nothing more.
        """
        place = request.path_params["place"]
        self._streams[place] += 1
        try:
            known, since = "", 0.0
            with suppress(GateRefusal, DiagnosedError):
                while not self.ends():
                    found = await self._head()
                    if found["head"] != known or since >= _BEAT_SECONDS:
                        await self.gate.identify(request)
                        known, since = found["head"], 0.0
                        yield f"data: {json.dumps(found)}\n\n"
                    await anyio.sleep(_LOOK_SECONDS)
                    since += _LOOK_SECONDS
        finally:
            self._streams[place] -= 1
            self._streams += Counter()  # without those that are zero

    # --- Actions ---

    def _action(self, role: Role, then: str, act: Act) -> Callable[..., Awaitable[Response]]:
        async def action(request: Request) -> Response:
            person = await self.gate.identify(request)
            fields = await self.gate.form(request, person, role)
            try:
                told = await anyio.to_thread.run_sync(act, person, fields)
            except RefusedError as refusal:
                words = f"{refusal.reason} {refusal.hint}"
                return self._render("problem", person, status=409, words=words, back=then)
            except (DiagnosedError, ValueError) as problem:
                raise GateRefusal("console.action", 400, str(problem)) from None
            self._done[request.path_params["place"]] = told
            return RedirectResponse(then, status_code=303)

        return action

    def _answer(self, person: Person, fields: Mapping[str, str]) -> str:
        """Answer a question as it was shown: if it has changed since, it stays as it is."""
        said = fields.get("answer")
        if said not in {"once", "run", "deny"}:
            raise ValueError("Say first whether it may run: once, for the run, or not at all.")
        given = ApprovalAnswer(
            allow=said != "deny", by=person.principal, channel="operator", reach="run" if said == "run" else "call",
            digest=fields.get("digest", ""), reason=printable(fields.get("reason", "").strip())[:MAX_REASON],
        )  # fmt: skip
        with store.opened(self.settings.state_dir) as database, recording(self.settings) as record:
            found = store.give(database, record, fields.get("question", ""), given)
        return f"{found.question.id} is {found.state}."

    def _stop(self, person: Person, fields: Mapping[str, str]) -> str:
        asked = _stop_asked(fields)
        because = printable(fields.get("because", "").strip())[: stops.MAX_BECAUSE]
        made = stops.new_stop(
            asked["scope"], asked["name"], because=because, by=person.principal, made=datetime.now(UTC)
        )
        found = stopping.put_in_effect(self.settings, self.settings.state_dir, made)
        unrecorded = f" It has no record: {found['problem']}" if found["problem"] else ""
        return f"{words_of(made)} is stopped: {made.id}.{unrecorded}"

    def _resume(self, person: Person, fields: Mapping[str, str]) -> str:
        name = fields.get("stop", "")
        if name not in stops.stops_of(self.settings.state_dir).names():
            raise RefusedError("console.stop", "This stop is not in effect any more.", "")
        stopping.lift(self.settings, [name], person.principal)
        return f"{name} is lifted."

    # --- What answers look like ---

    def _render(self, name: str, person: Person | None, /, *, status: int = 200, **context: Any) -> Response:
        base = {"person": person, "page": "", "token": "", "done": "", "time": "", "head": "", "problem": ""}
        content = self._templates.get_template(f"{name}.html").render(base | context)
        return Response(content, status, media_type="text/html; charset=utf-8")

    def _tell_refusal(self, refusal: GateRefusal, person: Person | None) -> Response:
        return self._render("problem", person, status=refusal.status_code, words=refusal.detail, back="now")

    async def _on_problem(self, request: Request, problem: Exception) -> Response:
        told = GateRefusal("console.page", 404, "No page has this address.")
        if isinstance(problem, DiagnosedError):  # its words name paths: not to strangers
            _log.error("%s", problem)
            words = str(problem) if PERSON_SCOPE_KEY in request.scope else "Files of this console cannot be used."
            told = GateRefusal("console.page", 503, words)
        elif isinstance(problem, GateRefusal):
            told = problem
        return self.gate.answer(told, request.scope)


def _shown(value: object) -> object:
    """Return what a template writes: of a text, one line in which every character shows."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _stop_asked(asked: Mapping[str, str]) -> View:
    """Return what a form wants stopped. Raises ValueError if it is nothing that can be."""
    scope, name = asked.get("scope", ""), asked.get("name", "")
    if scope not in stops.SCOPES or (not name) is not (scope == "all"):
        raise ValueError("Say what to stop: a call, a run, a principal, a workflow, a tool, or everything.")
    return {"scope": scope, "name": name}
