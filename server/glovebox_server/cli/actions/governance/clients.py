"""What ``glovebox client-config`` does: lines for clients, over HTTP with a token."""

from rich.console import Console

from glovebox_server import workspace
from glovebox_server.cli.actions import client_config
from glovebox_server.cli.actions.commands import given
from glovebox_server.cli.actions.governance.tokens import to_show
from glovebox_server.exits import OK
from glovebox_server.settings import Settings
from glovebox_server.workspace import WorkspaceRefused


def show(settings: Settings, out: Console, err: Console, *, transport: str, host: str, port: int) -> int:
    """Print what to paste into clients; see ``glovebox client-config``."""
    if transport == "http":
        # The server itself speaks no TLS: on this port it is a proxy's.
        scheme = "https" if port == client_config.HTTPS_PORT else "http"
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        text = client_config.for_http(url, to_show(settings, err))
    else:
        served = workspace.find(settings, transport)
        if served.path is None:
            raise WorkspaceRefused(
                "Configuring clients", served.reason, "Name the folder that tools may read with --workspace."
            )
        options = given(settings, "profiles_dir", "policy", "data_dir", "state_dir")
        text = client_config.for_stdio([*client_config.program(), "serve", "--workspace", str(served.path), *options])
    out.print(text, markup=False, highlight=False)
    return OK
