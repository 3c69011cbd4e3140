"""``python -m tests.interaction.fake_server stdio|http DIRECTORY [NAME…]``: real transports, no sandboxes.

Over HTTP it prints one line of JSON to stdout: the base URL and the tokens, one per NAME.
"""

import json
import sys
from pathlib import Path

import anyio
from tests.interaction.fakes import as_app, fake_app, give_tokens

from glovebox_server.transport.serve import serve_http, serve_stdio


async def _main(transport: str, directory: Path, names: list[str]) -> None:
    async with fake_app(directory) as app:
        if transport == "stdio":
            why = await serve_stdio(as_app(app))
        else:
            tokens = give_tokens(directory, tuple(names))

            def ready(url: str) -> None:
                sys.stdout.write(json.dumps({"url": url, "tokens": tokens}) + "\n")
                sys.stdout.flush()

            why = await serve_http(as_app(app), on_ready=ready)
        (directory / "ended").write_text(f"{why} cancelled={len(app.broker.cancelled)}")


if __name__ == "__main__":
    anyio.run(_main, sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
