"""``python -m tests.perf.fairness``: what one caller pays for another who takes all it can get, over HTTP.

In each round a peer first makes trivial calls alone, then as many beside 250 connections of another token that do one
thing over and over: shipped numbers, real sandboxes, ratios within one run. Exit code 1 if a kind whose bound
is promised is above ``BOUND``, or if a call of the peer's is lost.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from rich.console import Console
from rich.table import Table
from tests.perf import clients, machine, sides
from tests.perf.bare import CODE, PRINTED
from tests.perf.clients import Caller, Listening, Setup, succeeded
from tests.perf.series import Series, compared, rounded
from tests.perf.sides import OURS, Side

BOUND = 3.0  # what the peer's median beside others may be, in medians of its own alone
CONNECTIONS = 250  # of the other token: as many calls at one time as one principal may have under way, but for a few
CALLS = 25  # of the peer's in one half of a round
ROUNDS, QUICK_ROUNDS = 12, 2
SETTLE_SECONDS = 4.0  # after which the other's programs have all they will get, and after which nothing of them is left
PAUSE_SECONDS = 0.02  # of the peer's between two calls: a person's client thinks in between
HALF_SECONDS = 100.0
"""After which half a round ends, however few calls there were: a peer that starves makes two in that time."""

KINDS = {
    "sleep": "import time; time.sleep(29)",
    "burn": "while True: pass",
    "memory": "held = []\nwhile True: held.append(b'x' * 2**24)",
    "flood": "text = 'x' * 65535\nwhile True: print(text)",
    "quick": CODE,
}  # programs of the other token; ``mixed`` runs one of each
MIXED = "mixed"
REQUESTS = "requests"  # runs none, and asks for the list of tools instead
EVERY = (*KINDS, MIXED, REQUESTS)


@dataclass(slots=True, kw_only=True)
class Kind:
    """What came of one kind of program."""

    name: str
    alone: list[tuple[float, ...]] = field(default_factory=list)
    beside: list[tuple[float, ...]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)  # answers that the peer did not get, or that were refusals
    theirs: int = 0  # calls of the other token that came to an end meanwhile

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        alone, beside = (
            Series(key=name, what=f"{CODE} {name}", unit="ms", rounds=tuple(rounds))
            for name, rounds in (("alone", self.alone), ("beside", self.beside))
        )
        found: dict[str, Any] = {"kind": self.name, "alone": alone.summary(), "beside": beside.summary()}
        found |= {"ratio": rounded(beside.get("p50") / alone.get("p50")), "theirs": self.theirs}
        if len(self.alone) > 1:
            interval = compared(beside, alone)
            found |= {"low": rounded(interval.low), "high": rounded(interval.high)}
        met = found["ratio"] <= BOUND and not self.lost
        return found | {"lost": len(self.lost), "first_lost": self.lost[:1], "met": met}


class Peer:
    """The caller whose calls are timed."""

    def __init__(self, caller: Caller, kind: Kind) -> None:
        self._caller = caller
        self._kind = kind

    async def times(self, calls: int) -> tuple[float, ...]:
        """Milliseconds of so many calls one after another; fewer where the time is over before."""
        found: list[float] = []
        request = self._caller.request(CODE)
        end = anyio.current_time() + HALF_SECONDS
        while len(found) < calls and anyio.current_time() < end:
            await anyio.sleep(PAUSE_SECONDS)
            began = time.perf_counter()
            answer = await self._caller.call(request)
            found.append((time.perf_counter() - began) * 1000)
            if not succeeded(answer, PRINTED):
                self._kind.lost.append(answer[:300].decode("utf-8", "replace"))
        return tuple(found)


@asynccontextmanager
async def crowd(listening: Listening, token: str, kind: Kind) -> AsyncIterator[None]:
    """Have the other token's connections call over and over, for the length of the block."""
    programs = [KINDS[kind.name]] if kind.name in KINDS else list(KINDS.values())

    async def one(number: int) -> None:
        # Each its own program: the same call again and again is what a server takes for a client's retry.
        code = f"# {number}\n{programs[number % len(programs)]}"
        while True:
            with suppress(RuntimeError, OSError, anyio.EndOfStream, anyio.BrokenResourceError):
                async with await anyio.connect_tcp("127.0.0.1", listening.port) as stream:
                    caller = Caller(stream, listening.port, token)
                    request = caller.listing() if kind.name == REQUESTS else caller.request(code)
                    while True:
                        await caller.call(request)
                        kind.theirs += 1
            await anyio.sleep(1)

    async with anyio.create_task_group() as tasks:
        for number in range(CONNECTIONS):
            tasks.start_soon(one, number)
        await anyio.sleep(SETTLE_SECONDS)
        yield
        tasks.cancel_scope.cancel()
    await anyio.sleep(SETTLE_SECONDS)


async def measured(setup: Setup, kinds: Sequence[str], rounds: int, console: Console) -> list[Kind]:
    """Every kind, its rounds one after another on one server."""
    other = setup.make_token("other")
    found = [Kind(name=name) for name in kinds]
    async with clients.over_http(setup) as listening:
        for kind in found:
            for _ in range(rounds):
                async with AsyncExitStack() as stack:
                    peer = Peer(await stack.enter_async_context(listening.connected()), kind)
                    kind.alone.append(await peer.times(CALLS))
                    async with crowd(listening, other, kind):
                        kind.beside.append(await peer.times(CALLS))
            said = kind.as_json()
            alone, beside = (said[half]["p50"] for half in ("alone", "beside"))
            console.print(f"{kind.name}: {alone} ms alone, {beside} ms beside, {said['lost']} lost")
    return found


def show(found: Sequence[dict[str, Any]], console: Console) -> None:
    """The table."""
    table = Table(title=f"{CODE} of one token, alone and beside {CONNECTIONS} connections of another")
    for name in ("the other's", "calls", "alone p50", "beside p50", "p95", "max", f"ratio, at most {BOUND:g}", "lost"):
        table.add_column(name, justify="right")
    for each in found:
        beside = each["beside"]
        low = f" [{each['low']}, {each['high']}]" if "low" in each else ""
        table.add_row(
            each["kind"], str(beside["count"]), f"{each['alone']['p50']} ms", f"{beside['p50']} ms",
            f"{beside['p95']} ms", f"{beside['max']} ms", f"{each['ratio']}{low}", str(each["lost"]),
        )  # fmt: skip
    console.print(table)


def main() -> None:
    """Measure, print, and exit with 1 if a bound is not met."""
    parser = argparse.ArgumentParser(prog="python -m tests.perf.fairness", description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds instead of {ROUNDS}")
    parser.add_argument("--kind", action="append", choices=EVERY, help="only this kind; may be repeated")
    parser.add_argument("--driver", default="bubblewrap")
    parser.add_argument("--revision", help="measure another revision, as git names it")
    parser.add_argument("--json", type=Path, help="where to keep everything")
    given = parser.parse_args()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="glovebox-fairness-") as name:
        directory = Path(name)
        (directory / "workspace").mkdir(mode=0o755)
        directory.chmod(0o755)

        def run(side: Side) -> list[Kind]:
            setup = Setup(
                directory=directory / "server", workspace=directory / "workspace", driver=given.driver, side=side
            )
            kinds = given.kind or EVERY
            return anyio.run(measured, setup, kinds, QUICK_ROUNDS if given.quick else ROUNDS, console)

        if given.revision:
            with sides.checked_out(given.revision, directory) as root:
                side = sides.made(sides.THERE, root, directory)
                sides.set_up(side, base=None)
                found = run(side)
        else:
            found = run(OURS)
    rows = [kind.as_json() for kind in found]
    show(rows, console)
    report = {"format": 1, "revision": given.revision or "here", "machine": machine.facts({}), "kinds": rows}
    text = json.dumps(report, indent=1)
    if given.json:
        given.json.write_text(f"{text}\n")
    else:
        sys.stdout.write(f"{text}\n")
    sys.exit(not all(row["met"] for row in rows))


if __name__ == "__main__":
    main()
