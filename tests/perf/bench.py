"""``make bench``: every promise about time and memory, measured beside what people do otherwise, in one run.

Exit code 1 if a bound that was measured is not met, or if this tree is slower than the revision of ``--against``; 2 if
there is no such row or revision; 3 if a row could not be compared. What each row means, and how to read the table:
docs/internals/performance.csv. The rows are in rows.py; what measures them in a module for each part.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from tests.perf import (
    against,
    bare,
    growth,
    idle,
    latency,
    load,
    machine,
    peers,
    plot,
    processes,
    report,
    sides,
    where,
    wire,
    work,
)
from tests.perf.bare import Bare
from tests.perf.clients import Setup
from tests.perf.rows import BETWEEN, ROWS, Part, Row, Verdict, chosen, judge, told
from tests.perf.series import Series
from tests.perf.where import Parts

from glovebox_server.settings import Settings

ROUNDS, QUICK_ROUNDS = 20, 2


@dataclass(slots=True, kw_only=True)
class Run:
    """One run: what is asked of it, and what it has found so far."""

    rows: tuple[Row, ...]
    directory: Path
    rounds: int
    quick: bool
    image: str
    tick: Callable[[str], None]
    series: dict[str, Series] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    parts: Parts | None = None
    facts: dict[str, str] = field(default_factory=dict)
    usable: dict[str, str] = field(default_factory=dict)
    fastest: Bare = field(init=False)
    pandas: Bare | None = None

    async def measure(self) -> list[Verdict]:
        """Every part that a row needs, one after another; what fails is a reason beside its rows."""
        workspace = self.directory / "workspace"
        workspace.mkdir(mode=0o755)
        bare.write_csv(workspace)
        self.usable = sides.OURS.usable()
        self.facts = machine.facts(self.usable)
        self.tick("looking for the fastest interpreter")
        self.fastest, self.pandas = bare.fastest(), self._with_pandas()
        self.facts |= {"bare": self.fastest.told, "bare with pandas": self.pandas.told if self.pandas else "none"}
        steps: dict[Part, Callable[[], Awaitable[dict[str, Series]]]] = {
            "latency": self._latency,
            "work": self._work,
            "broker": self._broker,
            "load": self._load,
            "burst": self._burst,
            "idle": self._idle,
            "wire": self._wire,
            "growth": partial(growth.measured, self.directory, quick=self.quick, tick=self.tick),
        }
        for part in (each for each in steps if each in {row.part for row in self.rows}):
            try:
                self.series |= await steps[part]()
            except Exception as problem:  # noqa: BLE001 - the other parts are still worth having
                keys = [row.judged for row in self.rows if row.part == part]
                self.reasons = dict.fromkeys(keys, told(problem)) | self.reasons
        return [judge(row, self.series, self.reasons) for row in self.rows]

    async def _latency(self) -> dict[str, Series]:
        async with AsyncExitStack() as stack:
            bench = latency.Bench(
                directory=self.directory, stack=stack, bare=self.fastest, pandas=self.pandas, usable=self.usable,
                image=self.image, quick=self.quick, wanted={key for row in self.rows for key in row.needs},
                reasons=self.reasons,
            )  # fmt: skip
            # Before the servers end: one that ends badly must not take the numbers of all with it.
            self.series |= await latency.measured(bench, self.rounds, self.tick)
            self.facts |= bench.versions
        return {}

    async def _work(self) -> dict[str, Series]:
        """With no other server beside, which would be counted too."""
        setup = Setup(directory=self.directory / "work", workspace=self.directory / "workspace")
        async with AsyncExitStack() as stack:
            ways = await work.ways(stack, setup, self.fastest, self.reasons, quick=self.quick)
            wanted = {key for row in self.rows for key in row.needs}
            ways = [way for way in ways if way.key in wanted]
            return await latency.interleaved(ways, self.rounds, self.reasons, self.tick)

    async def _broker(self) -> dict[str, Series]:
        self.tick("parts of a call")
        self.parts = await where.measured(self.directory, count=where.QUICK_CALLS if self.quick else where.CALLS)
        # Beside it, since a disk is as fast as what others do to it lets it be.
        flushed = where.disk(self.directory, len(self.parts.whole))
        return {each.key: each for each in (*self.parts.broker(), flushed)}

    async def _load(self) -> dict[str, Series]:
        seconds = load.QUICK_SECONDS if self.quick else load.SECONDS
        wanted = [row.key for row in self.rows]
        found = await load.throughput(
            self.directory, self.fastest, self.pandas, wanted=wanted, seconds=seconds, tick=self.tick
        )
        return found | await processes.measured(self.directory, wanted=wanted, seconds=seconds, tick=self.tick)

    async def _burst(self) -> dict[str, Series]:
        self.tick(f"{load.BURST} calls at once")
        return await load.burst(Setup(directory=self.directory / "burst", workspace=self.directory / "workspace"))

    async def _idle(self) -> dict[str, Series]:
        wanted = {row.judged for row in self.rows}
        found: dict[str, Series] = {}
        seconds = idle.QUICK_CPU_SECONDS if self.quick else idle.CPU_SECONDS
        for look in idle.LOOKS:
            if not wanted.intersection(look.keys):
                continue
            if look.driver not in self.usable:
                reason = f"{look.driver} cannot be used here: `glovebox doctor` says why"
                self.reasons |= dict.fromkeys(look.keys, reason)
                continue
            self.tick(look.memory)
            try:
                found |= await idle.measured(self.directory, look, seconds)
            except Exception as problem:  # noqa: BLE001 - the other drivers are still worth having
                self.reasons |= dict.fromkeys(look.keys, told(problem))
        return found

    async def _wire(self) -> dict[str, Series]:
        self.tick(f"{wire.MIB} MiB through the wire")
        return await wire.measured(wire.QUICK_ROUNDS if self.quick else wire.ROUNDS)

    def _with_pandas(self) -> Bare | None:
        try:
            return bare.with_pandas(Settings().data_dir)
        except RuntimeError as problem:
            self.reasons |= dict.fromkeys(("pandas", "bare-pandas", "throughput-pandas"), str(problem))
            return None


@asynccontextmanager
async def scratch() -> AsyncIterator[Path]:
    """A directory for servers and their workspaces."""
    with tempfile.TemporaryDirectory(prefix="glovebox-bench-", ignore_cleanup_errors=True) as place:
        Path(place).chmod(0o755)  # as root, sandboxes run as another user
        yield Path(place)


async def bench(options: argparse.Namespace, console: Console, tick: Callable[[str], None]) -> int:
    """Measure, show, keep; the exit code."""
    async with scratch() as directory:
        rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
        run = Run(
            rows=chosen(options.rows), directory=directory, rounds=rounds, quick=options.quick, image=options.image,
            tick=tick,
        )  # fmt: skip
        verdicts = await run.measure()
        run.facts["run"] = f"{rounds} rounds{', quick' if options.quick else ''}"
        found = report.as_json(verdicts, run.series, run.facts, run.parts)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        report.show(found, console)
        if run.parts is not None:
            console.print(where.table(run.parts, "where the time of one warm call goes"))
        if options.plot or options.docs:
            tick("drawing")
            picture = await plot.drawn(found, peers.KEYS, directory)
            if options.plot and picture:
                options.plot.write_bytes(picture)
            if options.docs:
                report.keep(found, picture)
    return int(any(each.met is False for each in verdicts))


def parsed() -> argparse.Namespace:
    """The command line."""
    options = argparse.ArgumentParser(
        prog="make bench",
        description=__doc__,
        epilog=f"rows: {', '.join(row.key for row in ROWS)}; --against has {', '.join(row.key for row in BETWEEN)}",
    )
    options.add_argument("--rows", nargs="+", default=[], metavar="ROW", help="only these; patterns like 'cold-*' too")
    options.add_argument("--quick", action="store_true", help="few rounds and short loads: to see that it runs")
    options.add_argument(
        "--rounds", type=int, help=f"of the rows about time; {ROUNDS} unless given, {against.ROUNDS} between two"
    )
    options.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    options.add_argument("--plot", type=Path, metavar="FILE", help="draw the times there, as PNG")
    options.add_argument("--docs", action="store_true", help="renew docs/internals/performance.csv, .json and .png")
    options.add_argument(
        "--image", default="python:3.11-slim",
        help="with python3: what the peers on Docker run, and with --against what both sides build their image from",
    )  # fmt: skip
    options.add_argument("--against", metavar="REV", help="compare with this revision of git instead")
    options.add_argument("--drivers", nargs="+", default=[], metavar="NAME", help="between two, only rows of these")
    return options.parse_args()


def main() -> int:
    """Measure, show, and say whether every bound holds."""
    options = parsed()
    console = Console(width=None if sys.stdout.isatty() else 160)
    errors = Console(stderr=True)
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=errors, transient=True
    ) as progress:
        task = progress.add_task("")

        def tick(text: str) -> None:
            progress.update(task, description=text)

        try:
            chosen(options.rows, BETWEEN if options.against else ROWS)
            return anyio.run(against.compare if options.against else bench, options, console, tick)
        except (ValueError, sides.NoRevisionError) as problem:
            errors.print(str(problem), style="red", markup=False)
            return 2


if __name__ == "__main__":
    sys.exit(main())
