"""The MCP surface: the only place that turns clients' requests into calls of the broker, and answers into MCP's.

``McpServer(app, identify).server`` is the SDK's server, which ``transport`` serves in both protocol eras.
"""

from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic
from typing import Any
from uuid import UUID

import anyio
import mcp_types as types
import structlog
from mcp.server.context import CallNext, HandlerResult
from mcp.server.lowlevel import Server
from mcp.server.subscriptions import PromptsListChanged, ServerEvent, ToolsListChanged
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError
from structlog.contextvars import bound_contextvars

from glovebox_audit.chain import new_call_id
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server.app import App
from glovebox_server.calls import CallResult, Principal, Trace
from glovebox_server.core.rights import MAX_KEYS
from glovebox_server.errors import InvalidArgumentsError, UnknownToolError
from glovebox_server.failures import failure_of, with_own_command
from glovebox_server.mcp import asking, catalogue, delivery, prompts, resources
from glovebox_server.mcp.delivery import Context, Identify
from glovebox_server.mcp.resources import TEMPLATES, Resources, Watches
from glovebox_server.receipts.recorder import whose
from glovebox_server.requests import trace_of

#: Sent to a model once per connection; clients cut longer texts.
INSTRUCTIONS = (
    "Glovebox runs narrow tools in sealed single-use sandboxes. Nothing is kept between calls: files written to "
    "/output come back as artifact:// links, which later calls can take as inputs. Pages are fetched with fetch_url; "
    "programs have no network unless their tool says so. A refusal names its rule and what is allowed instead; do not "
    "retry it unchanged."
)

#: Key of the tool list's digest in the ``_meta`` of ``tools/list``.
DIGEST_META_KEY = "dev.glovebox/digest"
#: Key of the run in ``_meta``, for clients of the modern era, which has no sessions.
RUN_META_KEY = "dev.glovebox/run"
#: Key of the events that end a request, by who sets them, which ``transport.auth`` puts into the ASGI scope.
ENDINGS_SCOPE_KEY = "glovebox.endings"
#: Where clients of HTTP with SSE post; the address names their session, and the transport has checked it.
MESSAGES_PATH = "/messages/"
#: Rule of a request whose state this state directory's servers did not issue to its caller for it, or not lately.
STATE_RULE = "approval.state"
_STATE_HINT = "Make the call without requestState: it is asked anew."
#: The word in the SDK's refusals of states.
_INVALID_STATE = "invalid_request_state"
_LIST_METHODS = {"tools/list", "prompts/list", "resources/list", "resources/templates/list"}
_Page = types.PaginatedRequestParams | None
_Answer = types.CallToolResult | types.InputRequiredResult
_log = structlog.get_logger(__name__)


class ClaimingServer(Server[Any]):
    """The SDK's server, which claims the notifications that are sent."""

    lists_change = False
    """True if the lists of tools and prompts may change; that of resources never does."""

    def get_capabilities(self, *given: Any, **named: Any) -> types.ServerCapabilities:
        """Return the capabilities for a handshake or ``server/discover``."""
        found = super().get_capabilities(*given, **named)
        for claims, change in (
            (found.tools, self.lists_change), (found.prompts, self.lists_change), (found.resources, False)
        ):  # fmt: skip
            if claims is not None:
                claims.list_changed = change
        return found


class McpServer:
    """One MCP server over one app. Serves any number of connections."""

    def __init__(self, app: App, identify: Identify) -> None:
        self.app = app
        self._identify = identify
        self._stopping = anyio.Event()
        self.new_call_id = new_call_id
        """Names each call, before it is one."""
        self._resources = Resources(app, self._stopping, self._lists)
        self._connection = app.runs.new()
        """The run of the caller over stdio, where this server has one connection."""
        self._offers: OrderedDict[tuple[object, ...], tuple[list[types.Tool], str]] = OrderedDict()
        self.server = ClaimingServer(
            "glovebox", version=app.version, title="Glovebox", instructions=INSTRUCTIONS, lifespan=_lifespan,
            on_list_tools=self._list_tools, on_call_tool=self._call_tool, on_list_resources=self._list_resources,
            on_list_resource_templates=self._list_templates, on_read_resource=self._read_resource,
            on_subscribe_resource=self._subscribe, on_unsubscribe_resource=self._unsubscribe,
            on_subscriptions_listen=self._listen_resources, on_list_prompts=self._list_prompts,
            on_get_prompt=self._get_prompt, on_completion=self._complete,
        )  # fmt: skip
        self.server.lists_change = app.in_force.follows
        # Not the constructor's parameter, which warns: logging is deprecated, and the handshake eras still need it.
        self.server.add_request_handler("logging/setLevel", types.SetLevelRequestParams, self._set_level)
        self.server.middleware += [self._counted, _refuse_cursor, asking.seal_states(app.states_key, identify)]

    def stop(self) -> None:
        """End every call and listen stream under way; each still gets an answer. Idempotent."""
        self._stopping.set()

    async def _list_tools(self, ctx: Context, _params: _Page) -> types.ListToolsResult:
        principal = self._identify(ctx)
        self._resources.follow_lists(ctx, principal)
        listed, digest = self._listed(principal)
        return types.ListToolsResult(tools=listed, _meta={DIGEST_META_KEY: digest})

    def _listed(self, principal: Principal) -> tuple[list[types.Tool], str]:
        rights = self.app.guards.rights_of(principal)
        if rights.key not in self._offers:
            tools = [self.app.tools[name] for name in rights.offered(self.app.tools)]
            environments = catalogue.environments_of(rights.profiles, self.app.environments)
            listed = catalogue.list_tools(tools, rights.profiles, environments)
            self._offers[rights.key] = listed, catalogue.digest_tools(listed)
            if len(self._offers) > MAX_KEYS:
                self._offers.popitem(last=False)
        return self._offers[rights.key]

    def _lists(self, principal: Principal) -> Mapping[ServerEvent, object]:
        return {ToolsListChanged(): self._listed(principal)[1], PromptsListChanged(): self._prompts(principal)}

    async def _call_tool(self, ctx: Context, params: types.CallToolRequestParams) -> _Answer:
        """Make a call, and log one line about it without its arguments, paths or URLs."""
        principal, call_id, began = self._identify(ctx), self.new_call_id(), monotonic()
        outcome, run = "cancelled", None
        try:
            try:
                run = self._run_of(ctx, principal, session_of(ctx))
            except RefusedError as refused:
                result: _Answer = self._failed(refused, call_id, principal, None)
            else:
                with bound_contextvars(call_id=call_id, run=run):  # whatever is logged on its behalf says so
                    result = await self._call(ctx, params, principal, call_id, run)
            outcome = _outcome_of(result)
        except MCPError as error:
            outcome = {types.INVALID_PARAMS: "denied", types.CONNECTION_CLOSED: outcome}.get(error.error.code, "error")
            raise
        else:
            return result
        finally:
            tool = params.name if params.name in self.app.tools else "unknown"
            kind, _, name = principal.id.partition(":")
            caller = f"{kind}:{name.rpartition('#')[2]}"  # of an OAuth subject without its issuer's URL
            seconds = round(monotonic() - began, 3)
            _log.info("call", tool=tool, outcome=outcome, caller=caller, call_id=call_id, run=run, seconds=seconds)

    async def _call(
        self, ctx: Context, params: types.CallToolRequestParams, principal: Principal, call_id: str, run: str
    ) -> _Answer:
        outcome: CallResult | Exception | None = None
        async with anyio.create_task_group() as tasks:
            endings: dict[str, anyio.Event] = {"server stopping": self._stopping}
            if ctx.request is not None:
                endings |= ctx.request.scope.get(ENDINGS_SCOPE_KEY, {})  # stream closed, token removed or expired
            for event in endings.values():
                tasks.start_soon(delivery.call_when, event, tasks.cancel_scope.cancel)
            ask = partial(asking.ask_client, ctx, principal, params)
            async with delivery.deliver_messages(ctx, self.app.audit, call_id, endings, ask) as reporter:
                try:
                    outcome = await self.app.broker.submit(
                        principal, params.name, params.arguments or {}, reporter, call_id=call_id,
                        session=session_of(ctx), run=run, trace=_trace_of(ctx),
                    )  # fmt: skip
                except Exception as error:  # noqa: BLE001 - a value, because a task group would wrap it
                    outcome = error
                    reporter.goes_on = isinstance(error, asking.ClientMustAnswerError)
            tasks.cancel_scope.cancel()
        if outcome is None:
            text = f"Call {call_id} was ended: {reporter.ended_by()}. Its sandbox is gone. Call again later."
            raise MCPError(types.CONNECTION_CLOSED, text)
        if isinstance(outcome, asking.ClientMustAnswerError):
            return outcome.result
        if isinstance(outcome, Exception):
            result = self._failed(outcome, call_id, principal, run)
        else:
            result = delivery.tool_result(outcome, ctx.protocol_version)
        if principal.transport == "stdio" or ctx.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            return result
        handle = self.app.runs.handle(principal.id, run)  # for a client without a session
        return result.model_copy(update={"meta": {**(result.meta or {}), RUN_META_KEY: handle}})

    def _failed(self, error: Exception, call_id: str, principal: Principal, run: str | None) -> types.CallToolResult:
        """Turn an exception into what the model reads; the details of internal errors stay in our log."""
        failure = failure_of(error)
        if failure is None:
            if isinstance(error, MCPError):
                raise error
            _log.error("a call failed with an unexpected error", call_id=call_id, exc_info=error)
            text = f"Internal error in call {call_id}; the server's log has the details."
            raise MCPError(types.INTERNAL_ERROR, text) from error
        refused: dict[str, Any] | None = None
        sentence = failure.sentence(error, call_id)
        if isinstance(error, UnknownToolError):
            raise MCPError(types.INVALID_PARAMS, sentence, {"tools": list(error.tools)})
        if isinstance(error, InvalidArgumentsError):
            hint = "Nothing was started; correct these fields and call again."
            refused = {"rule": "arguments", "reason": str(error), "hint": hint, "fields": list(error.fields)}
        elif isinstance(error, RefusedError):
            refused = {"rule": error.rule, "reason": error.reason, "hint": error.hint}
        elif failure.classed == "unavailable":
            # Host paths are for the operator.
            reason = with_own_command(str(error))
            _log.error("unavailable", call_id=call_id, error=type(error).__name__, reason=reason)
            if principal.transport == "stdio":  # whoever started the server
                sentence = with_own_command(sentence)
        told: dict[str, Any] = {"error": {"kind": type(error).__name__, "message": sentence, "line": None}}
        if refused is not None:  # the broker began no call; what it decided is a result
            self.app.refusals.note(refused["rule"], principal.id)
            told = {"error": None, "refused": refused}
        return types.CallToolResult(
            content=[types.TextContent(text=sentence)],
            structured_content={"call_id": call_id, **told},
            is_error=True,
            _meta={delivery.CALL_META_KEY: {"call_id": call_id, **whose(principal, run)}},
        )

    async def _counted(self, ctx: Context, call_next: CallNext) -> HandlerResult:
        """Count protocol errors that are the caller's fault, as a middleware of the SDK."""
        try:
            return await call_next(ctx)
        except (MCPError, ValidationError) as error:
            if isinstance(error, MCPError) and _data_of(error).get("reason") == _INVALID_STATE:
                error.error.data = {**_data_of(error), "rule": STATE_RULE, "hint": _STATE_HINT}
            rule = _rule_of(error)
            if rule is not None:
                self.app.refusals.note(rule, self._identify(ctx).id)
            raise

    def _run_of(self, ctx: Context, principal: Principal, session: str | None) -> str:
        """Return the run a request belongs to; raise RefusedError if it names one that this caller was never given."""
        if principal.transport == "stdio":
            return self._connection
        if session is not None:
            return self.app.runs.of_session(principal.id, session)
        named = (ctx.meta or {}).get(RUN_META_KEY)
        if named is not None:
            return self.app.runs.named(principal.id, named)
        return self.app.runs.of_client(principal.id, principal.client)

    async def _set_level(self, ctx: Context, params: types.SetLevelRequestParams) -> types.EmptyResult:
        delivery.connection_of(ctx).state[delivery.LEVEL] = params.level
        return types.EmptyResult()

    async def _list_resources(self, _ctx: Context, _params: _Page) -> types.ListResourcesResult:
        # Each result gives the caller its addresses of artifacts and calls; a list would only repeat them.
        return types.ListResourcesResult(resources=[resources.CAPABILITIES, resources.BUDGET])

    async def _list_templates(self, _ctx: Context, _params: _Page) -> types.ListResourceTemplatesResult:
        return types.ListResourceTemplatesResult(resource_templates=list(TEMPLATES))

    async def _read_resource(self, ctx: Context, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
        principal = self._identify(ctx)
        try:
            run = self._run_of(ctx, principal, session_of(ctx))
        except RefusedError as refused:
            raise MCPError(types.INVALID_PARAMS, str(refused), {"rule": refused.rule}) from None
        return await self._resources.read(principal, params.uri, run)

    async def _list_prompts(self, ctx: Context, _params: _Page) -> types.ListPromptsResult:
        principal = self._identify(ctx)
        self._resources.follow_lists(ctx, principal)
        return types.ListPromptsResult(prompts=self._prompts(principal))

    def _prompts(self, principal: Principal) -> list[types.Prompt]:
        return prompts.list_prompts(self._offered(principal))

    async def _get_prompt(self, ctx: Context, params: types.GetPromptRequestParams) -> types.GetPromptResult:
        principal = self._identify(ctx)
        read = partial(self._resources.read, principal)
        return await prompts.fill_prompt(params.name, params.arguments, read, self._offered(principal))

    async def _complete(self, ctx: Context, params: types.CompleteRequestParams) -> types.CompleteResult:
        principal = self._identify(ctx)
        offered = self._offered(principal)
        return await prompts.complete(params, principal, self.app.broker.submit, self._resources.owned, offered)

    def _offered(self, principal: Principal) -> tuple[str, ...]:
        return self.app.guards.rights_of(principal).offered(self.app.tools)

    async def _subscribe(self, ctx: Context, params: types.SubscribeRequestParams) -> types.EmptyResult:
        await self._resources.subscribe(ctx, self._identify(ctx), session_of(ctx), params.uri)
        return types.EmptyResult()

    async def _unsubscribe(self, ctx: Context, params: types.UnsubscribeRequestParams) -> types.EmptyResult:
        await self._resources.unsubscribe(ctx, self._identify(ctx), session_of(ctx), params.uri)
        return types.EmptyResult()

    async def _listen_resources(
        self, ctx: Context, params: types.SubscriptionsListenRequestParams
    ) -> types.SubscriptionsListenResult:
        return await self._resources.listen_resources(ctx, self._identify(ctx), params)


@asynccontextmanager
async def _lifespan(_server: Server[Any]) -> AsyncIterator[Watches]:
    """Hold subscriptions: of one connection over stdio and SSE, of all of them over streamable HTTP."""
    async with anyio.create_task_group() as tasks:
        yield Watches(tasks)
        tasks.cancel_scope.cancel()


def session_of(ctx: Context) -> str | None:
    """Return the transport's name for the session of the request, if any.

    The modern era has none, and a header that claims one is unchecked. Neither counts one in the address, which can be
    spelled in many ways.
    """
    if ctx.request is None or ctx.protocol_version in MODERN_PROTOCOL_VERSIONS:
        return None
    if ctx.request.url.path.startswith(MESSAGES_PATH):
        return UUID(hex=ctx.request.query_params["session_id"]).hex
    named: str | None = ctx.request.headers.get("mcp-session-id")
    return named or None


def _trace_of(ctx: Context) -> Trace | None:
    """Return the trace of a request: from ``_meta``, else from HTTP headers."""
    meta: Mapping[str, Any] = ctx.meta or {}
    if meta.get("traceparent") is not None:
        return trace_of(meta["traceparent"], meta.get("tracestate"))
    if ctx.request is None:
        return None
    parents: list[str] = ctx.request.headers.getlist("traceparent")
    return trace_of(parents[0], ",".join(ctx.request.headers.getlist("tracestate"))) if len(parents) == 1 else None


async def _refuse_cursor(ctx: Context, call_next: CallNext) -> HandlerResult:
    """Refuse a cursor, as a middleware of the SDK: each list is one page, so no cursor was issued."""
    if ctx.method in _LIST_METHODS and (ctx.params or {}).get("cursor") is not None:
        raise MCPError(types.INVALID_PARAMS, "Unknown cursor: the list has one page. Ask without a cursor.")
    return await call_next(ctx)


def _data_of(error: MCPError) -> Mapping[str, Any]:
    return error.error.data if isinstance(error.error.data, dict) else {}


def _rule_of(error: MCPError | ValidationError) -> str | None:
    """Return the rule that the request broke; None if the request is not at fault."""
    if isinstance(error, ValidationError):
        return "parameters"
    said = _data_of(error)
    if error.error.code == types.INVALID_PARAMS:
        return str(said.get("rule", "tool.unknown" if "tools" in said else "parameters"))
    return {types.METHOD_NOT_FOUND: "method", types.INVALID_REQUEST: "parameters"}.get(error.error.code)


def _outcome_of(result: _Answer) -> str:
    """Return how a call ended for its caller; ``audit query --outcome`` has finer words."""
    if isinstance(result, types.InputRequiredResult):
        return "ask"
    if (result.structured_content or {}).get("refused"):
        return "denied"
    return "failed" if result.is_error else "succeeded"
