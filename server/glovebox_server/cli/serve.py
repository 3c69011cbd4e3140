"""``glovebox serve``: the server, over stdio or HTTP."""

from functools import partial
from typing import Literal

import click
import structlog

from glovebox_profiles.policy.rights import order_conflicts
from glovebox_server import app as apps
from glovebox_server import event_loop
from glovebox_server.app import App
from glovebox_server.cli.options import command, given, require_http, transport_option, workflow_option
from glovebox_server.settings import Settings
from glovebox_server.transport import logs
from glovebox_server.transport.stdio import serve_stdio

_LEVELS = ("debug", "info", "warning", "error")


@command("serve", makes_calls=True, json="")
@transport_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on (http).")
@click.option("--port", type=click.IntRange(0, 65535), default=8321, show_default=True, help="Port (http); 0: any.")
@click.option(
    "--processes", type=click.IntRange(1, 32), help="Server processes (http); else one per two processors, at most 4."
)
@click.option("--allowed-host", multiple=True, help="Host header to accept, for addresses that are not this machine's.")
@click.option("--log-level", type=click.Choice(_LEVELS), default="info", show_default=True, help="Lowest logged.")
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Of the log."
)
@click.option("--trusted-proxy", multiple=True, help="Address of a proxy whose X-Forwarded-For names clients.")
@click.option("--metrics", metavar="WHO", help="Who may read /metrics (http): `loopback`, or a FILE with a token.")
@click.option("--oauth-issuer", metavar="URL", help="Let in callers with access tokens of this issuer, too (http).")
@click.option("--oauth-audience", multiple=True, help="What such tokens are for, if not this server's addresses.")
@click.option("--oauth-any-type", is_flag=True, help="Accept tokens whose `typ` is not at+jwt.")
@workflow_option
def serve(
    settings: Settings,
    *,
    transport: str,
    host: str,
    port: int,
    processes: int | None,
    allowed_host: tuple[str, ...],
    log_level: str,
    log_format: Literal["text", "json"],
    trusted_proxy: tuple[str, ...],
    metrics: str | None,
    oauth_issuer: str | None,
    oauth_audience: tuple[str, ...],
    oauth_any_type: bool,
    workflow: str | None,
) -> None:
    """Serve MCP clients until they leave or a signal ends it."""
    named = ("host", "port", "processes", "allowed_host", "trusted_proxy", "metrics")
    require_http(transport, *named, "oauth_issuer", "oauth_audience", "oauth_any_type")
    if oauth_issuer is None and (oauth_audience or oauth_any_type):
        raise click.UsageError("--oauth-audience and --oauth-any-type go with --oauth-issuer.")
    logs.to_stderr(log_level, log_format)

    oauth, seat = None, None
    if transport == "http":
        from glovebox_server.transport import serve as http  # noqa: PLC0415 - imports what a server over stdio never needs

        if oauth_issuer is not None:
            oauth = http.OAuth(issuer=oauth_issuer, audiences=oauth_audience, any_type=oauth_any_type)
        told = partial(http.log_address, allowed_hosts=allowed_host, options=given(settings, "state_dir"))
        seat = http.take_seat(processes, host, port, told)

    def announce(url: str) -> None:
        event_loop.settled()
        if seat is None:
            told(url)

    async def start() -> None:
        """Start the server's parts, warn of oddities in them, and serve with them."""
        # Of several processes, one anchors the log and warns.
        first = seat is None or seat.number == 0
        own = settings if first else settings.model_copy(update={"audit_anchor": None})
        async with apps.opened(own, transport, worker=True) as app:
            app.in_force.require(workflow)
            if first:
                _warn(app)
            if transport == "stdio":
                event_loop.settled()
                end = await serve_stdio(app, workflow=workflow)
            else:
                end = await http.serve_http(
                    app, host=host, port=port, allowed_hosts=allowed_host, trusted_proxies=trusted_proxy, oauth=oauth,
                    workflow=workflow, seat=seat, metrics=metrics, on_ready=announce,
                )  # fmt: skip
            app.ended.append(end)

    event_loop.run(start)


def _warn(app: App) -> None:
    policy = app.in_force.policy
    log_lines = structlog.get_logger(__name__)
    for warning in order_conflicts(policy) if policy else ():
        log_lines.warning(f"Policy: {warning}")
    named = policy is not None and all(role.workspace for role in policy.roles.values())
    if (app.workspace.path is None and not named) or app.workspace.closed:
        log_lines.warning(str(app.workspace))
