"""One call of a server that runs already, as a client makes it: ``python -m tests.inside.asked URL TOKENFILE``.

Prints what came of it, on one line: the value, whether isolation was measured, and by what memory is limited.
"""

import sys
from pathlib import Path

import anyio
from tests.inside.place import Seen, ask_over_http


async def main(url: str, token: str) -> None:
    """Make it and print."""
    seen = Seen()
    await ask_over_http(seen, url, Path(token).read_text().strip())
    if "value" not in seen.result:
        sys.exit(seen.words)
    isolation, limits = seen.result["isolation"], seen.tool["limits"]["memory_bytes"]
    sys.stdout.write(f"{seen.result['value']}, verified: {isolation['verified']}, memory by {limits['by']}\n")


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2])
