"""Serve the console on a loopback address until a signal ends it."""

from collections.abc import Callable
from contextlib import closing

import uvicorn

from glovebox_server.console import people
from glovebox_server.console.application import Console
from glovebox_server.secret_files import prepare_state
from glovebox_server.settings import Settings
from glovebox_server.transport.serve import open_listener, url_of

_MAX_CONNECTIONS = 128
_GRACE_SECONDS = 1


def serve_console(settings: Settings, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; ``on_ready`` gets the base URL. Raises DiagnosedError if the port is taken."""
    prepare_state(settings.state_dir)
    with people.opened(settings.state_dir) as database, closing(open_listener("127.0.0.1", port)) as listener:
        bound = listener.getsockname()[1]
        hosts = frozenset(f"{name}:{bound}" for name in ("127.0.0.1", "localhost"))
        console = Console(settings=settings, database=database, hosts=hosts)
        config = uvicorn.Config(
            console.gate, ws="none", lifespan="on", log_config=None, access_log=False, server_header=False,
            proxy_headers=False, limit_concurrency=_MAX_CONNECTIONS, timeout_graceful_shutdown=_GRACE_SECONDS,
        )  # fmt: skip
        server = uvicorn.Server(config)
        console.ends = lambda: server.should_exit
        on_ready(url_of(listener))
        server.run(sockets=[listener])
