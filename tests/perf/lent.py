"""What looking for a lent key costs per MiB of an answer: `python -m tests.perf.lent`, without a server.

Ordinary texts, and those of a server that knows the key and repeats how it begins, in each of its forms. Exit code 1
means that a text took more than its bound.
"""

import json
import random
import string
import sys
import time
from collections.abc import Iterator

from glovebox_server.egress.request import PIECE_SEARCHED
from glovebox_server.guards.redaction.detector import KeyMasker, derive_forms, squeeze

MIB = 1 << 20
SECONDS, STALL = 0.2, 0.05  # per MiB, and of the event loop at once
_LETTERS = string.ascii_letters + string.digits


def keys(chosen: random.Random) -> Iterator[tuple[str, str]]:
    """A token, one with signs behind many letters, which has the most forms alike, and the longest."""
    yield "token", "ghp_" + "".join(chosen.choices(_LETTERS, k=36))
    yield "signs", "".join(chosen.choices(_LETTERS, k=30)) + "+/=&<>'\"`" + "".join(chosen.choices(_LETTERS, k=8))
    yield "longest", "".join(chosen.choices(_LETTERS + "+/", k=8192))
    yield "sevens", "7" * 8192


def texts(value: str, chosen: random.Random) -> Iterator[tuple[str, bytes]]:
    """Ordinary ones first."""
    every, plain = list(derive_forms("key", value)), squeeze(value.encode())
    yield "JSON", json.dumps([{"id": chosen.random(), "of": chosen.random()} for _ in range(8000)]).encode()
    yield "letters", "".join(chosen.choices(_LETTERS, k=200_000)).encode()
    yield "the key", value.encode() + b"\n"
    yield "15 letters of it", plain[:15]
    yield "30 letters of it", plain[:30] + b" "
    yield "15 letters of each form", b"".join(form[:15] for form in every)
    yield "each form but a letter", b"".join(form[:-1] for form in every)
    yield "each form", b"".join(every)
    yield "a repeated letter", b"7"


def main() -> int:
    """Print a line for each; return 1 if a bound is not kept."""
    chosen, kept = random.Random(1), True  # noqa: S311 - the same each time
    for name, value in keys(chosen):
        for what, text in texts(value, chosen):
            data = (text * (MIB // len(text) + 1))[:MIB]
            redactor, took = KeyMasker(derive_forms("key", value)), list[float]()
            for at in range(0, MIB, PIECE_SEARCHED):
                begun = time.process_time()
                redactor.feed(data[at : at + PIECE_SEARCHED])
                took.append(time.process_time() - begun)
            kept = kept and sum(took) <= SECONDS and max(took) <= STALL
            line = f"{name:8} {what:24} {sum(took):6.3f} s per MiB, at most {max(took) * 1000:5.1f} ms at once"
            print(line, flush=True)  # noqa: T201 - a program
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
