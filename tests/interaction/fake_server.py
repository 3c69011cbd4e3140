"""``python -m tests.interaction.fake_server stdio|http|http*2 DIRECTORY [NAME…]``: real transports, no sandboxes.

Over HTTP, with ``*2`` by two processes, it prints one line of JSON to stdout: the base URL and the tokens, one per
NAME. Each of two processes adds a line to the file ``up``, and each process at its end to ``ended``. $FAKE_METRICS says
who may read /metrics.
"""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
from tests.interaction.fakes import as_app, fake_app, give_tokens

from glovebox_sandboxes.host.owner import server_id
from glovebox_server.transport.processes import Seat
from glovebox_server.transport.serve import serve_http, serve_stdio, take_seat


async def _main(transport: str, directory: Path, seat: Seat | None, ready: Callable[[str], None]) -> None:
    async with fake_app(directory, server=server_id()) as app:
        if transport == "stdio":
            why = await serve_stdio(as_app(app))
        else:
            why = await serve_http(
                as_app(app), seat=seat, metrics=os.environ.get("FAKE_METRICS"),
                on_ready=ready if seat is None else partial(_note, directory),
            )  # fmt: skip
        with (directory / "ended").open("a") as ended:
            ended.write(f"{why} cancelled={len(app.broker.cancelled)}\n")


def _tell(tokens: dict[str, str], url: str) -> None:
    sys.stdout.write(json.dumps({"url": url, "tokens": tokens}) + "\n")
    sys.stdout.flush()


def _note(directory: Path, _url: str) -> None:
    with (directory / "up").open("a") as up:
        up.write("up\n")


if __name__ == "__main__":
    transport, _, count = sys.argv[1].partition("*")
    directory = Path(sys.argv[2])
    ready = partial(_tell, give_tokens(directory, tuple(sys.argv[3:])) if transport == "http" else {})
    seat = take_seat(int(count), "127.0.0.1", 0, ready) if count else None
    anyio.run(_main, transport, directory, seat, ready)
