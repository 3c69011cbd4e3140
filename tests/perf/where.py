"""``python -m tests.perf.where``: a table of where the time of one warm call goes, and what the broker adds to it.

The server times its own parts (tests/perf/spans.py); what the client measured beyond their sum is the last line: the
answer written and read, and the client's own work. Medians of many calls, so the lines add up to the whole only nearly.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import anyio
from mcp import Client
from rich.console import Console
from rich.table import Table
from tests.perf import clients
from tests.perf.bare import CODE, PRINTED
from tests.perf.clients import Setup
from tests.perf.series import Series, quantile
from tests.perf.sides import OURS, Side, alternating
from tests.perf.spans import AUDIT, POLICY, RECEIPT

CALLS, QUICK_CALLS = 300, 50
REST_SECONDS = 0.02
"""Between two calls at least: about what a bare interpreter takes, between which the bench's calls are made."""
WARM_UP = 20
"""Calls before any counts: the pool finds out how many are wanted, and files and pages are where they will be."""
RECORD_BYTES = 4096  # about what a call's longest record has, which is the one of its sandbox
OUTSIDE = "answer: written, read; the client's own work"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Calls in milliseconds: as the client saw each, and its parts by the server's clock."""

    whole: tuple[float, ...]
    calls: tuple[dict[str, float], ...]

    def named(self) -> list[str]:
        """Parts in the order in which they cost, the client's last."""
        names = {name for each in self.calls for name in each}
        return [*sorted(names, key=lambda name: -statistics.median(self.of(name))), OUTSIDE]

    def of(self, part: str) -> list[float]:
        """One part in every call, 0 in those that did not have it."""
        if part == OUTSIDE:
            return [whole - sum(each.values()) for whole, each in zip(self.whole, self.calls, strict=True)]
        return [each.get(part, 0.0) for each in self.calls]

    def broker(self) -> tuple[Series, ...]:
        """What the broker adds to running a program: policy, audit, receipt, and together."""
        audit = [sum(ms for name, ms in each.items() if name.startswith(AUDIT.partition("{}")[0]) and name != RECEIPT)
                 for each in self.calls]  # fmt: skip
        parts = {"broker-policy": self.of(POLICY), "broker-audit": audit, "broker-receipt": self.of(RECEIPT)}
        parts["broker"] = [sum(each) for each in zip(*parts.values(), strict=True)]
        note = "by the server's own clock, in calls over stdio one after another"
        return tuple(
            Series(key=key, what=key.replace("-", ": "), unit="ms", rounds=(tuple(values),), note=note)
            for key, values in parts.items()
        )


async def measured(directory: Path, driver: str = "bubblewrap", count: int = CALLS) -> Parts:
    """Make calls one after another, with a pause for the next sandbox, on a server that times its parts."""
    return (await beside(directory, (OURS,), driver, count))[OURS.name]


async def beside(directory: Path, sides: Sequence[Side], driver: str, count: int) -> dict[str, Parts]:
    """The same on a server of each side, call by call; each times the parts by its own list of where they are."""
    workspace = directory / "workspace"
    workspace.mkdir(exist_ok=True, mode=0o755)
    files = {side.name: directory / f"{side.name}-spans.json" for side in sides}
    whole: dict[str, list[float]] = {side.name: [] for side in sides}
    async with AsyncExitStack() as stack:
        ready: dict[str, Client] = {}
        for side in sides:
            place, file = directory / f"{side.name}-where-{driver}", files[side.name]
            setup = Setup(directory=place, workspace=workspace, driver=driver, spans=file, side=side)
            ready[side.name] = await stack.enter_async_context(clients.over_stdio(setup))
        for number in range(WARM_UP + count):
            for side in alternating(sides, number):
                whole[side.name].append(await clients.printed(ready[side.name], CODE, PRINTED, driver))
                await anyio.sleep(clients.RESTS.get(driver, REST_SECONDS))
    found: dict[str, Parts] = {}
    for name, file in files.items():
        # The server ends when its client has gone, and writes the file last.
        with anyio.fail_after(clients.END_SECONDS):
            while not file.exists():  # noqa: ASYNC110 - another process writes it
                await anyio.sleep(0.05)
        calls = json.loads(file.read_text())
        found[name] = Parts(whole=tuple(whole[name][WARM_UP:]), calls=tuple(calls[WARM_UP:]))
    return found


def disk(directory: Path, count: int) -> Series:
    """What the disk alone asks for a record: an append and an fdatasync(2); the audit log makes two for a call."""
    times: list[float] = []
    with (directory / "disk").open("ab", buffering=0) as file:
        for _ in range(count):
            began = time.perf_counter()
            file.write(b"x" * RECORD_BYTES)
            os.fdatasync(file)
            times.append((time.perf_counter() - began) * 1000)
    note = f"{RECORD_BYTES} bytes, one after another"
    return Series(key="disk", what="write and fdatasync", unit="ms", rounds=(tuple(times),), note=note)


def table(parts: Parts, title: str) -> Table:
    """For a terminal."""
    shown = Table(title=title, title_justify="left")
    for name in ("", "p50 µs", "p95 µs", "of the call"):
        shown.add_column(name, justify="left" if not name else "right")
    whole = statistics.median(parts.whole)
    for name in parts.named():
        values = parts.of(name)
        middle = statistics.median(values)
        shown.add_row(name, f"{middle * 1000:.0f}", f"{quantile(values, 0.95) * 1000:.0f}", f"{middle / whole:.0%}")
    shown.add_section()
    shown.add_row("whole call", f"{whole * 1000:.0f}", f"{quantile(parts.whole, 0.95) * 1000:.0f}", "")
    return shown


def main() -> int:
    """Measure and print."""
    options = argparse.ArgumentParser(prog="python -m tests.perf.where", description=__doc__)
    options.add_argument("--driver", default="bubblewrap")
    options.add_argument("--calls", type=int, default=CALLS)
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="glovebox-where-") as scratch:
        Path(scratch).chmod(0o755)  # as root, sandboxes run as another user
        parts = anyio.run(measured, Path(scratch), given.driver, given.calls)
    console = Console()
    console.print(table(parts, f"{CODE} on {given.driver}, {given.calls} calls over stdio, one after another"))
    for each in parts.broker():
        console.print(f"{each.key:16} p50 {each.get('p50'):6.3f} ms, p95 {each.get('p95'):6.3f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
