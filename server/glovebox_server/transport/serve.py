"""Streamable HTTP and HTTP with SSE, behind one gate; and the public ``serve_stdio``.

Both return on a signal that would end the process (stdio also when the client is gone), after every call under way has
been cancelled and answered. The caller then closes the app and exits with 0. Knows no tool.
"""

import ipaddress
import re
import shlex
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import mcp_types as types
import structlog
import uvicorn
from mcp.server.auth.middleware.bearer_auth import AuthorizationContext
from mcp.server.sse import SseServerTransport
from mcp.server.streamable_http import StreamableHTTPServerTransport
from mcp.server.streamable_http_manager import StreamableHTTPASGIApp, StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.exceptions import MCPError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from glovebox_sandboxes.contract.errors import DiagnosedError
from glovebox_server import event_loop
from glovebox_server.app import App
from glovebox_server.calls import Principal
from glovebox_server.failures import with_own_command
from glovebox_server.mcp.delivery import Context
from glovebox_server.mcp.server import MESSAGES_PATH, McpServer
from glovebox_server.transport import auth, downloads, logs, processes, tokens
from glovebox_server.transport.auth import MAX_BODY_BYTES, MAX_CONNECTIONS, AuthMiddleware, Shares, kind_of
from glovebox_server.transport.http_timeouts import TimeoutProtocol
from glovebox_server.transport.oauth.authority import Scopes, TokenAuthority
from glovebox_server.transport.oauth.issuer import OAuth
from glovebox_server.transport.processes import Seat, SharedProtocol
from glovebox_server.transport.stdio import GRACE_SECONDS, client_of, end_on_signal, observe, serve_stdio, serve_stream
from glovebox_server.transport.tokens import Callers, TokenFiles
from glovebox_server.upkeep.readiness import ReadinessProbe

if TYPE_CHECKING:
    from glovebox_server.telemetry.prometheus import Scrape

#: Sessions of the handshake era over streamable HTTP, which callers share evenly; each costs about 100 kB.
MAX_SESSIONS = 1024
#: Seconds without a request after which such a session ends: most clients leave without a word.
SESSION_IDLE_SECONDS = 1800
#: Seconds between two checks of the token files: a removed one ends within that time.
TOKEN_SECONDS = 1.0
__all__ = ["OAuth", "by_token", "http_application", "log_address", "serve_http", "serve_stdio", "take_seat"]
_log = structlog.get_logger(__name__)
#: Connections accepted at a time before one is examined; all of them are open files by then.
_ACCEPTED = 32


async def serve_http(
    app: App,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    allowed_hosts: Collection[str] = (),
    trusted_proxies: Collection[str] = (),
    oauth: OAuth | None = None,
    workflow: str | None = None,
    seat: Seat | None = None,
    metrics: str | None = None,
    on_ready: Callable[[str], None] = lambda _: None,
) -> str:
    """Serve any number of clients: streamable HTTP at ``/mcp``, HTTP with SSE at ``/sse``, both eras, one port.

    Bearer tokens lie in ``tokens`` below the state directory. Returns the signal's name, for the audit log. Raises
    DiagnosedError: the address is taken or not ours, or it is open to others without ``allowed_hosts``; others could
    read the tokens, or ``metrics``; a token is bound to a missing role; the authorization server returns no keys.

    ``allowed_hosts`` are further values of ``Host``, required, and then the only ones, if ``host`` is not a loopback
    address. ``trusted_proxies`` are addresses or networks of proxies whose ``X-Forwarded-For`` names the client. Tokens
    that are bound to no workflow have ``workflow``. ``seat`` is this process's place among several, whose listener it
    has. ``metrics`` names who may read those. ``on_ready`` gets the base URL, once connections are accepted.
    """
    logs.to_stderr_by_default()
    files = tokens.TokenFiles(app.settings.state_dir / tokens.DIRECTORY, _roles(app))
    callers, proxies = Callers(files.tokens), proxy_networks(trusted_proxies)
    with closing(open_listener(host, port) if seat is None else seat.seats.listener) as listener:
        address, bound = listener.getsockname()[:2]
        names = host_names(address, bound, allowed_hosts)
        surface = McpServer(app, partial(by_token, workflow=workflow))
        # With a configured name, not its loopback address too: tokens for other servers there would be valid here.
        authority = None
        if oauth is not None:
            scopes = Scopes(
                roles=lambda: app.in_force.scopes,
                refuses=lambda who, tool: app.guards.rights_of(who).refusal(tool) is not None,
            )
            authority = TokenAuthority(oauth, allowed_hosts or names, scopes)
            await authority.issuer.fetch()
        look = ReadinessProbe(app.settings.data_dir, app.settings.state_dir / "audit", app.audit, app.in_force).look
        application, sessions = http_application(surface, callers, look=look, subjects=authority is not None, seat=seat)
        scrape = None if metrics is None else _scrape(metrics, [*allowed_hosts, *proxies])
        gate = AuthMiddleware(
            application, hosts=names, callers=callers, authority=authority, refusals=app.refusals, look=look,
            scrape=scrape,
        )  # fmt: skip
        server = _Uvicorn(gate, proxies, seat, lambda: on_ready(url_of(listener)))

        async def end() -> None:
            server.should_exit = True

        async with observe(surface, scrape), end_on_signal(surface, end) as signals, anyio.create_task_group() as tasks:
            tasks.start_soon(_follow_tokens, app, files, callers, gate, sessions)
            if authority is not None:
                tasks.start_soon(authority.issuer.follow)
                tasks.start_soon(authority.checks.follow)
            await server.serve(sockets=[listener])
            tasks.cancel_scope.cancel()
    return signals[0] if signals else "stopped"


def _scrape(who: str, open_to: Collection[str]) -> "Scrape":
    from glovebox_server.telemetry import prometheus  # noqa: PLC0415 - what is off is not imported

    if who == prometheus.LOOPBACK and open_to:  # a proxy on this machine would pass requests of others on
        fix = "Name a file with a token: --metrics FILE."
        raise DiagnosedError("Cannot serve /metrics to this machine alone", "others come through a proxy", fix)
    return prometheus.Scrape(who)


def take_seat(count: int | None, host: str, port: int, on_up: Callable[[str], None]) -> Seat | None:
    """Return None for one process alone, else see ``processes.share``; ``count`` is None for the usual number."""
    count = count or processes.usual()
    if count == 1:
        return None
    listener = open_listener(host, port)
    return processes.share(count, listener, lambda: on_up(url_of(listener)))


def url_of(listener: socket.socket) -> str:
    """Return the base URL of a listening socket."""
    address, port = listener.getsockname()[:2]
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def log_address(url: str, allowed_hosts: Collection[str], options: Collection[str]) -> None:
    """Log the server's address, and the command that prints the client configuration for it."""
    place = urlsplit(url)
    host, port = place.hostname or "", place.port
    if allowed_hosts and not ipaddress.ip_address(host).is_loopback:
        named = urlsplit(f"//{next(iter(allowed_hosts))}")
        # A name without a port is used with the scheme's own: a proxy in front has it, and TLS.
        host, port = named.hostname or "", named.port or 443
    command = ["glovebox", "client-config", "--transport", "http", "--host", host, "--port", str(port), *options]
    _log.info("listening", url=url, clients=with_own_command(f"`{shlex.join(command)}`").strip("`"))


class Sessions(StreamableHTTPSessionManager):
    """The SDK's sessions, shared among callers: one that opens too many does not keep the others out."""

    def __init__(self, surface: McpServer, checked: TransportSecuritySettings, shares: Shares) -> None:
        super().__init__(
            surface.server, security_settings=checked, session_idle_timeout=SESSION_IDLE_SECONDS,
            max_request_body_size=MAX_BODY_BYTES, max_sessions=MAX_SESSIONS,
        )  # fmt: skip
        self._shares = shares
        self._refusals = surface.app.refusals

    def _admit_session(self, requestor: AuthorizationContext | None) -> StreamableHTTPServerTransport | None:
        # None is the SDK's own word for "there are too many"; it answers 503.
        held = Counter(owner["client_id"] for owner in self._session_owners.values())
        alike = Counter(map(kind_of, held.elements()))
        who = "" if requestor is None else requestor["client_id"]
        if requestor is None or not self._shares.allows(who, held[who], alike[kind_of(who)]):
            self._refusals.note("busy.sessions", requestor and requestor["client_id"])
            return None
        return super()._admit_session(requestor)

    def __len__(self) -> int:
        return len(self._session_owners)

    def of(self, principals: Collection[str]) -> list[str]:
        """Return the ids of these callers' open sessions."""
        return [each for each, owner in self._session_owners.items() if owner["client_id"] in principals]

    async def end(self, ids: Collection[str]) -> None:
        """End sessions, as their clients can."""
        for each in ids:
            if each in self._server_instances:
                await self._discard_session(each, self._server_instances[each])


def http_application(
    surface: McpServer,
    callers: Callers,
    *,
    look: auth.Look | None = None,
    subjects: bool = False,
    seat: Seat | None = None,
) -> tuple[ASGIApp, Sessions]:
    """Return the application behind the gate, which alone checks callers, and the sessions of streamable HTTP."""
    # The gate has checked Host and Origin. Set explicitly, because otherwise the SDK decides by itself.
    checked = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    manager, app = Sessions(surface, checked, Shares(MAX_SESSIONS, callers, subjects=subjects)), surface.app
    if seat is not None:
        seat.sessions = manager
    sse = SseServerTransport(MESSAGES_PATH, security_settings=checked, max_request_body_size=MAX_BODY_BYTES)

    async def open_sse(request: Request) -> Response:
        streams = sse.connect_sse(request.scope, request.receive, request._send)  # noqa: SLF001 - the SDK's own example
        async with streams as (incoming, outgoing):
            await serve_stream(surface, incoming, outgoing)
        return Response()

    async def health(_request: Request) -> Response:
        return JSONResponse(
            {
                "status": "ok",
                "longest_stall_ms": event_loop.longest_stall_ms(),
                "unusable_token_files": callers.unusable,
                "unusable_policy": app.in_force.unusable == "policy",
                "unusable_profiles": app.in_force.unusable == "profiles",
                "refused_requests": dict(app.refusals.totals),
                **({} if seat is None else seat.health()),
            }
        )

    async def ready(_request: Request) -> Response:
        return Response(status_code=404) if look is None else auth.readiness_answer(await look(), told=True)

    routes = [
        Route("/mcp", endpoint=StreamableHTTPASGIApp(manager)),
        Route("/sse", endpoint=open_sse, methods=["GET"]),
        Mount(MESSAGES_PATH, app=sse.handle_post_message),
        Route(auth.HEALTH_PATH, endpoint=health, methods=["GET"]),
        Route(auth.READY_PATH, endpoint=ready, methods=["GET"]),
        Route(downloads.PATH, endpoint=downloads.Downloads(app.artifacts, app.refusals), methods=["GET"]),
    ]

    return Starlette(routes=routes, lifespan=lambda _: manager.run()), manager


def _roles(app: App) -> Collection[str]:
    return () if app.in_force.policy is None else app.in_force.policy.roles


async def _follow_tokens(
    app: App, files: TokenFiles, callers: Callers, gate: AuthMiddleware, sessions: Sessions
) -> None:
    """Keep the tokens in effect as their files are; end what was begun with removed ones, calls first."""

    async def end(theirs: Collection[str]) -> None:
        await anyio.sleep(GRACE_SECONDS)
        gate.cut()
        await sessions.end(theirs)

    async with anyio.create_task_group() as tasks:
        while True:
            await anyio.sleep(TOKEN_SECONDS)
            changed = await anyio.to_thread.run_sync(files.look, _roles(app))
            removed = callers.replace(files.tokens) if changed or callers.due <= time.time() else set()
            callers.unusable = len(files.problems)
            for problem in files.problems if changed else ():
                _log.warning("a token file cannot be used: what it held before stays in effect", problem=str(problem))
            if changed or removed:
                _log.info("tokens were read again", callers=sorted(files.tokens), ended=sorted(removed))
            if gate.expire(time.time()) or removed:
                tasks.start_soon(end, sessions.of(removed))
            used, callers.used = callers.used, set()
            if used:
                await anyio.to_thread.run_sync(tokens.note_used, files.directory, used)


def by_token(ctx: Context, *, workflow: str | None = None) -> Principal:
    """Identify a caller by the gate's grant; a request that bypassed the gate has none."""
    if ctx.request is None:
        raise MCPError(types.INTERNAL_ERROR, "The request has no authenticated caller.")
    principal: Principal = ctx.request.scope[auth.PRINCIPAL_SCOPE_KEY]
    return replace(principal, client=client_of(ctx), workflow=principal.workflow or workflow)


class _Uvicorn(uvicorn.Server):
    """Uvicorn without its signal handlers, which raise the signal again after an orderly shutdown."""

    def __init__(self, application: ASGIApp, proxies: list[str], seat: Seat | None, ready: Callable[[], None]) -> None:
        protocol: Any = TimeoutProtocol if seat is None else partial(SharedProtocol, seat)
        config = uvicorn.Config(
            application, http=protocol, ws="none", lifespan="on", log_config=None, access_log=False,
            server_header=False, proxy_headers=bool(proxies), forwarded_allow_ips=proxies,
            limit_concurrency=MAX_CONNECTIONS, backlog=_ACCEPTED, timeout_graceful_shutdown=GRACE_SECONDS,
        )  # fmt: skip
        super().__init__(config)
        self._seat, self._ready = seat, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then report it."""
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(BACKLOG)  # asyncio has one number for this and for how many it accepts at a time
        if self._seat is not None:
            state = self.lifespan.state
            self._seat.open(partial(SharedProtocol, self._seat, self.config, self.server_state, state))
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take nothing more from other processes, then shut down."""
        if self._seat is not None:
            self._seat.close()
        await super().shutdown(sockets)

    capture_signals = nullcontext  # type: ignore[assignment]  # called as a method is


#: A Host header: a name or an address, and a port (RFC 9112, 3.2).
_HOST = re.compile(r"(?:[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
#: Connections that wait to be accepted; the kernel's own default bound.
BACKLOG = 4096


def open_listener(host: str, port: int) -> socket.socket:
    """Open a listening socket; raise DiagnosedError if the address is taken or not ours."""
    doing = f"Cannot listen on {host} port {port}"
    with ExitStack() as failed:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            # asyncio turns Nagle's algorithm off only if the protocol is named; with it, each answer waits 40 ms.
            listener = failed.enter_context(socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except UnicodeError:  # an empty label, or one of more than 63 characters
            raise DiagnosedError(doing, "it is no name of a host", "Name another.") from None
        except OSError as error:
            reason = error.strerror or str(error)
            raise DiagnosedError(doing, reason, "Choose another with --port or --host.") from error
        failed.pop_all()
    return listener


def host_names(address: str, port: int, allowed: Collection[str]) -> set[str]:
    """Return the values of Host that are ours.

    Raises DiagnosedError: the address is open to others and has no configured name, or that name is invalid.
    """
    for name in allowed:
        if not _HOST.fullmatch(name):
            fix = "Give the name clients will use, and its port where there is one: glovebox.example:8321"
            raise DiagnosedError(f"Cannot accept {name!r} as --allowed-host", "it is no name of a host", fix)
    if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        if not allowed:
            fix = "Name the hosts clients will use with --allowed-host, or listen on 127.0.0.1."
            raise DiagnosedError(f"Cannot listen on {address}", "it can be reached by others", fix)
        return set(allowed)
    return {f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")} | set(allowed)


def proxy_networks(proxies: Collection[str]) -> list[str]:
    """Return networks in uvicorn's form; IPv4 ones also in the form of IPv6 sockets (RFC 4291, 2.5.5.2).

    Raises DiagnosedError: one is not an address or network.
    """
    networks = []
    for name in proxies:
        try:
            network = ipaddress.ip_network(name)
        except ValueError as problem:
            fix = "Give the proxy's address, or its network: 10.0.0.0/24"
            raise DiagnosedError(f"Cannot trust {name!r} as --trusted-proxy", str(problem), fix) from None
        networks.append(str(network))
        if network.version == 4:  # noqa: PLR2004 - of the protocol
            networks.append(f"::ffff:{network.network_address}/{96 + network.prefixlen}")
    return networks
