"""Serve the console on a loopback address until a signal ends it."""

from collections.abc import Callable
from contextlib import closing

import uvicorn

from glovebox_server.console import people
from glovebox_server.console.application import Console
from glovebox_server.console.people import People
from glovebox_server.guards.budgets.spending import read_clocks
from glovebox_server.secret_files import prepare_state
from glovebox_server.settings import Settings
from glovebox_server.transport import auth
from glovebox_server.transport.http_timeouts import TimeoutProtocol
from glovebox_server.transport.serve import open_listener, url_of

_GRACE_SECONDS = 1


def serve_console(settings: Settings, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; ``on_ready`` gets the base URL. Raises DiagnosedError if the port is taken."""
    prepare_state(settings.state_dir)
    with people.opened(settings.state_dir) as database, closing(open_listener("127.0.0.1", port)) as listener:
        bound = listener.getsockname()[1]
        database.transact_now(lambda db: People(db, read_clocks()).begin())
        # Not `localhost`: on [::1] that port may be another user's, and a browser sends both the same cookies.
        console = Console(settings=settings, database=database, hosts=frozenset({f"127.0.0.1:{bound}"}))
        config = uvicorn.Config(
            console.gate, http=TimeoutProtocol, ws="none", lifespan="on", log_config=None, access_log=False,
            server_header=False, proxy_headers=False, limit_concurrency=auth.MAX_CONNECTIONS,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )  # fmt: skip
        server = uvicorn.Server(config)
        console.ends = lambda: server.should_exit
        on_ready(url_of(listener))
        server.run(sockets=[listener])
