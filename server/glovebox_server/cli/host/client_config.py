"""Ready-to-paste configuration for common clients. Nothing is written, except a token on request.

Formats: https://code.claude.com/docs/en/mcp, https://modelcontextprotocol.io/docs/develop/connect-local-servers,
https://code.visualstudio.com/docs/copilot/reference/mcp-configuration, https://cursor.com/docs/context/mcp.
"""

import json
import shlex
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from glovebox_server import workspace
from glovebox_server.cli.options import command, emit, given, lifetime, regular_file, require_http, transport_option
from glovebox_server.cli.rules.token import to_show
from glovebox_server.errors import MisnamedError
from glovebox_server.failures import own_command
from glovebox_server.settings import Settings

#: Of web servers with TLS, RFC 9110, 4.2.2.
HTTPS_PORT = 443

BRIDGE = "mcp-remote@0.15.1"
"""Pinned, because npx starts an older installed one: before 0.1.16 a server could run commands on the client's machine
(CVE-2025-6514)."""

_FLEETING = (
    "These lines work until uv cleans its cache",
    "# This Glovebox lies there. Install it (uv tool install), and call client-config of that one.",
)


@command("client-config")
@transport_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Name clients reach the server by (http).")
@click.option("--port", type=click.IntRange(1, 65535), default=8321, show_default=True, help="Its port; 443 is https.")
@click.option("--token", metavar="NAME", help="Make this token and show it, or show one whose file holds it (http).")
@click.option("--role", help="What the token that is made may do, as of `token create`.")
@click.option("--expires", type=lifetime, help="When it ends: 12h, 30d.")
@click.option("--token-file", metavar="FILE", type=regular_file, help="Show the token saved in this file (http).")
def client_config(
    settings: Settings,
    *,
    transport: str,
    host: str,
    port: int,
    token: str | None,
    role: str | None,
    expires: timedelta | None,
    token_file: Path | None,
) -> None:
    """Print configuration to paste into clients.

    Claude Code, Claude Desktop, VS Code and Cursor.
    """
    require_http(transport, "host", "port", "token", "role", "expires", "token_file")
    if token is None and (role or expires):
        raise click.UsageError("--role and --expires go with --token NAME, which makes a token.")
    if token is not None and token_file is not None:
        raise click.UsageError("--token and --token-file both name the token: leave one out.")
    if host.strip("[]") in ("0.0.0.0", "::", ""):  # noqa: S104 - what must not be shown to clients
        told = f"{host} is where a server listens, not a name that leads to it. Name the host that clients will use:"
        raise click.BadParameter(f"{told} the one given to `glovebox serve --allowed-host`.", param_hint="--host")
    if transport == "http":
        # The server itself speaks no TLS: on this port it is a proxy's.
        scheme = "https" if port == HTTPS_PORT else "http"
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        secret = to_show(settings, name=token, file=token_file, role=role, lifetime=expires)
        server: dict[str, Any] = {"type": "http", "url": f"{url}/mcp", "headers": {"Authorization": f"Bearer {secret}"}}
        text = for_http(url, secret)
    else:
        served = workspace.find(settings, transport)
        if served.path is None:
            raise MisnamedError(
                "Configuring clients", served.reason, "Name the folder that tools may read with --workspace."
            )
        options = given(settings, "profiles_dir", "policy", "data_dir", "state_dir")
        command = [*own_command(), "serve", "--workspace", str(served.path), *options]
        server = {"command": command[0], "args": command[1:]}
        text = for_stdio(command)
    emit({"mcpServers": {"glovebox": server}}, text)


def for_stdio(command: Sequence[str]) -> str:
    """Return set-up text for clients that start the absolute ``command``: desktop applications have another PATH."""
    program, *arguments = command
    server = {"command": program, "args": list(arguments)}
    # Where uvx puts an environment for one run.
    fleeting = [_FLEETING] if "/archive-v" in program else []
    return _joined(
        *fleeting,
        ("Claude Code", f"claude mcp add glovebox -- {shlex.join(command)}"),
        ("Claude Desktop: claude_desktop_config.json", _json({"mcpServers": {"glovebox": server}})),
        ("VS Code: .vscode/mcp.json", _json({"servers": {"glovebox": {"type": "stdio", **server}}})),
        ("Cursor: ~/.cursor/mcp.json", _json({"mcpServers": {"glovebox": server}})),
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
        ("Claude Desktop: claude_desktop_config.json", _json({"mcpServers": {"glovebox": desktop}})),
        (
            f"VS Code: .vscode/mcp.json; it asks for the token, which is {token}",
            _json({"inputs": [asked], "servers": {"glovebox": code}}),
        ),
        ("Cursor: ~/.cursor/mcp.json", _json({"mcpServers": {"glovebox": {"url": f"{url}/mcp", "headers": headers}}})),
        ("Clients that only know HTTP with SSE", f"{url}/sse\nAuthorization: {bearer}"),
    )


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2)


def _joined(*parts: tuple[str, str]) -> str:
    return "\n\n".join(f"# {title}\n{text}" for title, text in parts) + "\n"
