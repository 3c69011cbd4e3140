"""``glovebox token`` and ``client-config``, which shows one. Nothing is written, except a token on request.

Formats: https://code.claude.com/docs/en/mcp, https://modelcontextprotocol.io/docs/develop/connect-local-servers,
https://code.visualstudio.com/docs/copilot/reference/mcp-configuration, https://cursor.com/docs/context/mcp.
"""

import json
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from glovebox_audit.events import TokenCreated, TokenRevoked
from glovebox_sandboxes.contract.errors import MisnamedError
from glovebox_server import app as apps
from glovebox_server import startup, workspace
from glovebox_server.cli import options, state
from glovebox_server.cli.groups import LazyGroup
from glovebox_server.cli.options import command, emit, err, lifetime, transport_option
from glovebox_server.cli.terminal import pick, table_of, to_minute
from glovebox_server.failures import own_command
from glovebox_server.settings import Settings
from glovebox_server.transport import tokens
from glovebox_server.upkeep.log import recording

#: Replaces a token that is not shown in a client's configuration.
PLACEHOLDER = "TOKEN"


@click.group(cls=LazyGroup)
def token() -> None:
    """Bearer tokens of callers over HTTP. A running server follows within a second."""


@command("create", token)
@click.argument("name")
@click.option("--role", help="What it may do, of policy.toml; else what policy.toml says of token:NAME.")
@click.option("--workflow", type=options.workflow_name, metavar="NAME", help="What its calls are part of.")
@click.option("--expires", type=lifetime, metavar="TIME", help="When it ends: 12h, 30d. Never, unless given.")
def token_create(
    settings: Settings, *, name: str, role: str | None, workflow: str | None, expires: timedelta | None
) -> None:
    """Make a token and show it, once: only its hash is kept. NAME is 1 to 32 of a-z 0-9 -."""
    made, secret = _made(settings, name, expires, role=role, workflow=workflow)
    ends = "It does not expire." if made.expires is None else f"It ends {to_minute(made.expires)}."
    if not emit({**_fields(made, None), "token": secret}, secret):
        err.print(f"This is {made.principal}, shown once: only its hash is kept. {ends}")


@command("list", token)
def token_list(settings: Settings) -> None:
    """Each with its role, workflow, making, last use and end."""
    place = settings.state_dir / tokens.DIRECTORY
    found = [(each, tokens.last_used(place, each.name)) for each in tokens.load(place, None).values()]
    rows = [(each.name, each.role, each.workflow, each.made, each.expires or "never", used) for each, used in found]
    table = table_of(["name", "role", "workflow", "made", "ends", "last used"], rows)
    told = table or "There are no tokens. `glovebox token create NAME` makes one."
    emit({"tokens": [_fields(each, used) for each, used in found]}, told)


@command("revoke", token)
@click.argument("name")
def token_revoke(settings: Settings, name: str) -> None:
    """End a token, and what is under way with it."""
    place = settings.state_dir / tokens.DIRECTORY
    if not tokens.is_name(name) or not tokens.revoke(place, name):
        fix = "`glovebox token list` shows those there are."
        raise MisnamedError(f"Revoking the token {name!r}", "there is none", fix)
    with recording(settings) as record:
        record(TokenRevoked(principal=f"token:{name}", by=state.OPERATOR))
    told = f"token:{name} is revoked. A running server ends what is under way with it within seconds."
    emit({"name": name, "principal": f"token:{name}", "revoked": True}, told)


def _to_show(
    settings: Settings, *, token: str | None, token_file: str | None, role: str | None, expires: timedelta | None
) -> str:
    """Return the token for a client's configuration: of a file, or one that is made; else what stands for it.

    Raises MisnamedError if there is one of that name, or the file holds none of this server's tokens.
    """
    if token is None and (role or expires):
        raise click.UsageError("--role and --expires go with --token NAME, which makes a token.")
    if token is not None and token_file is not None:
        raise click.UsageError("--token and --token-file both name the token: leave one out.")
    if token is not None:
        made, secret = _made(settings, token, expires, role=role, workflow=None)
        err.print(f"Made {made.principal}. It is shown here alone: only its hash is kept.")
        return secret
    if token_file is None:
        told = f"No token was made: put one in the place of {PLACEHOLDER}. `--token NAME` makes one"
        err.print(f"{told}, and `--token-file FILE` shows one that was saved in a file.")
        return PLACEHOLDER
    known = tokens.load(settings.state_dir / tokens.DIRECTORY, None).values()
    if not any(each.sha256 == tokens.digest_of(token_file) for each in known):
        fix = "`glovebox token list` shows those there are; name the file in which one of them was saved."
        raise MisnamedError("Reading the token of --token-file", "it is none of this server's tokens", fix)
    return token_file


def _made(settings: Settings, name: str, lifetime: timedelta | None, **bound: str | None) -> tuple[tokens.Token, str]:
    doing = f"Making the token {name!r}"
    if not tokens.is_name(name):
        raise MisnamedError(doing, "its name is not 1 to 32 of a-z 0-9 -", "Give it another.")
    _require_known(settings, doing, **bound)
    place = settings.state_dir / tokens.DIRECTORY
    made = None
    if name not in tokens.load(place, None):
        expires = None if lifetime is None else (datetime.now(UTC) + lifetime).isoformat(timespec="seconds")
        with recording(settings) as record:
            record(TokenCreated(principal=f"token:{name}", by=state.OPERATOR, expires=expires, **bound))
        made = tokens.create(place, name, lifetime=lifetime, **bound)
    if made is None:
        fix = f"`glovebox token revoke {name}` ends it; or give this one another name."
        raise MisnamedError(doing, "there is one of this name, of which only the hash is kept", fix)
    return made


def _require_known(settings: Settings, doing: str, *, role: str | None, workflow: str | None) -> None:
    """Refuse an unknown role, and a workflow that the policy, if any, does not know."""
    policy = None
    if (role or workflow) and (path := startup.policy_file(settings)) is not None:
        policy = startup.load(path, apps.load_profiles(settings))
    known = {"role": policy.roles if policy else {}, "workflow": policy.workflows if policy else {workflow: None}}
    for what, bound in (("role", role), ("workflow", workflow)):
        if bound is not None and bound not in known[what]:
            fix = f"Those of policy.toml are {', '.join(map(str, known[what])) or 'none'}."
            raise MisnamedError(doing, f"there is no {what} {bound!r}", fix)


def _fields(token: tokens.Token, used: datetime | None) -> dict[str, object]:
    return pick(token, "name", "principal", "role", "workflow", "made", "expires") | {"last_used": used}


#: Of web servers with TLS, RFC 9110, 4.2.2.
HTTPS_PORT = 443

BRIDGE = "mcp-remote@0.15.1"
"""Pinned, because npx starts an older installed one: before 0.1.16 a server could run commands on the client's machine
(CVE-2025-6514)."""

_FLEETING = (
    "These lines work until uv cleans its cache",
    "# This Glovebox lies there. Install it (uv tool install), and call client-config of that one.",
)


TOKEN_FILE = options.parsed_file("token", lambda data: data.decode("utf-8", "replace").strip(), tokens.MAX_FILE_BYTES)


@command("client-config")
@transport_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Name clients reach the server by (http).")
@click.option("--port", type=click.IntRange(1, 65535), default=8321, show_default=True, help="Its port; 443 is https.")
@click.option("--token", metavar="NAME", help="Make this token and show it (http).")
@click.option("--role", help="What the token that is made may do, as of `token create`.")
@click.option("--expires", type=lifetime, metavar="TIME", help="When it ends: 12h, 30d.")
@click.option("--token-file", metavar="FILE", type=TOKEN_FILE, help="Show the token saved in this file (http).")
def client_config(settings: Settings, transport: str, host: str, port: int, **shown: Any) -> None:
    """Print configuration to paste into clients.

    Claude Code, Claude Desktop, VS Code and Cursor.
    """
    options.require_http(transport, "host", "port", *shown)
    if host.strip("[]") in ("0.0.0.0", "::", ""):  # noqa: S104 - what must not be shown to clients
        told = f"{host} is where a server listens, not a name that leads to it. Name the host that clients will use:"
        raise click.BadParameter(f"{told} the one given to `glovebox serve --allowed-host`.", param_hint="--host")
    if transport == "http":
        # The server itself speaks no TLS: on this port it is a proxy's.
        scheme = "https" if port == HTTPS_PORT else "http"
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        secret = _to_show(settings, **shown)
        server: dict[str, Any] = {"type": "http", "url": f"{url}/mcp", "headers": {"Authorization": f"Bearer {secret}"}}
        text = for_http(url, secret)
    else:
        served = workspace.find(settings, transport)
        if served.path is None:
            fix = "Name the folder that tools may read with --workspace."
            raise MisnamedError("Configuring clients", served.reason, fix)
        more = options.given(settings, "profiles_dir", "policy", "data_dir", "state_dir")
        command = [*own_command(), "serve", "--workspace", str(served.path), *more]
        server = {"command": command[0], "args": command[1:]}
        text = for_stdio(command)
    emit({"mcpServers": {"glovebox": server}}, text)


def for_stdio(command: Sequence[str]) -> str:
    """Return set-up text for clients that start the absolute ``command``: desktop applications have another PATH."""
    program, *arguments = command
    server = {"command": program, "args": list(arguments)}
    # Where uvx puts an environment for one run.
    return _joined(
        *([_FLEETING] if "/archive-v" in program else []),
        ("Claude Code", f"claude mcp add glovebox -- {shlex.join(command)}"),
        ("Claude Desktop: claude_desktop_config.json", {"mcpServers": {"glovebox": server}}),
        ("VS Code: .vscode/mcp.json", {"servers": {"glovebox": {"type": "stdio", **server}}}),
        ("Cursor: ~/.cursor/mcp.json", {"mcpServers": {"glovebox": server}}),
    )


def for_http(url: str, token: str) -> str:
    """Return set-up text for clients that connect to a server. It holds the token: for the terminal only."""
    bearer = f"Bearer {token}"
    headers = {"Authorization": bearer}
    bridge = ["-y", BRIDGE, f"{url}/mcp", "--header", "Authorization:${GLOVEBOX_AUTHORIZATION}"]
    desktop = {"command": "npx", "args": bridge, "env": {"GLOVEBOX_AUTHORIZATION": bearer}}
    # VS Code keeps an input in its own secret store, so the file can be committed.
    asked = {"type": "promptString", "id": "glovebox", "description": "Glovebox token", "password": True}
    code = {"type": "http", "url": f"{url}/mcp", "headers": {"Authorization": "Bearer ${input:glovebox}"}}
    add = ["claude", "mcp", "add", "--transport", "http", "glovebox", f"{url}/mcp"]
    return _joined(
        ("Claude Code", shlex.join([*add, "--header", f"Authorization: {bearer}"])),
        ("Claude Desktop: claude_desktop_config.json", {"mcpServers": {"glovebox": desktop}}),
        (
            f"VS Code: .vscode/mcp.json; it asks for the token, which is {token}",
            {"inputs": [asked], "servers": {"glovebox": code}},
        ),
        ("Cursor: ~/.cursor/mcp.json", {"mcpServers": {"glovebox": {"url": f"{url}/mcp", "headers": headers}}}),
        ("Clients that only know HTTP with SSE", f"{url}/sse\nAuthorization: {bearer}"),
    )


def _joined(*parts: tuple[str, str | dict[str, Any]]) -> str:
    texts = [(title, json.dumps(part, indent=2) if isinstance(part, dict) else part) for title, part in parts]
    return "\n\n".join(f"# {title}\n{text}" for title, text in texts) + "\n"
