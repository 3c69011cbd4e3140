"""``make bench``: every promise about time and memory, measured beside what people do otherwise, in one run.

Exit code 1 if a bound that was measured is not met, 2 if there is no such row or revision. What each row means, and how
to read the table: docs/performance.md. The rows are in rows.py; what measures them in a module for each part.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from server.settings import Settings
from tests.perf import against, bare, clients, idle, latency, load, machine, peers, plot, report, where, wire
from tests.perf.rows import ROWS, Part, Row, Verdict, chosen, judge
from tests.perf.series import Series
from tests.perf.where import Parts

ROUNDS, QUICK_ROUNDS = 20, 2
PANDAS_ROWS = frozenset({"pandas-p50", "pandas-p99", "throughput-pandas"})


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

    async def measure(self) -> list[Verdict]:
        """Every part that a row needs, one after another; what fails is a reason beside its rows."""
        workspace = self.directory / "workspace"
        workspace.mkdir(mode=0o755)
        bare.write_csv(workspace)
        usable = await clients.usable()
        self.facts = machine.facts(usable)
        self.tick("looking for the fastest interpreter")
        plain, pandas = bare.fastest(), self._pandas()
        self.facts |= {"bare": plain.told, "bare with pandas": pandas.told if pandas else "none"}
        wanted = {row.part for row in self.rows}
        async with self._part("latency", wanted), AsyncExitStack() as stack:
            bench = latency.Bench(
                directory=self.directory, stack=stack, bare=plain, pandas=pandas, usable=usable, image=self.image,
                quick=self.quick, wanted={key for row in self.rows for key in row.needs}, reasons=self.reasons,
            )  # fmt: skip
            if "latency" in wanted:
                self.series |= await latency.measured(bench, self.rounds, self.tick)
                self.facts |= bench.versions
        async with self._part("broker", wanted):
            if "broker" in wanted:
                self.tick("parts of a call")
                self.parts = await where.measured(self.directory, count=50 if self.quick else where.CALLS)
                self.series |= {each.key: each for each in self.parts.broker()}
        async with self._part("load", wanted):
            if "load" in wanted:
                seconds = load.QUICK_SECONDS if self.quick else load.SECONDS
                needs_pandas = any(row.key in PANDAS_ROWS for row in self.rows)
                self.series |= await load.throughput(
                    self.directory, plain, pandas if needs_pandas else None, seconds, self.tick
                )
        async with self._part("burst", wanted):
            if "burst" in wanted:
                self.tick(f"{load.BURST} calls at once")
                self.series |= await load.burst(self.directory)
        for driver, preload in (("bubblewrap", False), ("bubblewrap", True), ("docker", False), ("docker", True),
                                ("gvisor", False)):  # fmt: skip
            await self._idle(driver, preload=preload, can=driver in usable)
        async with self._part("wire", wanted):
            if "wire" in wanted:
                self.tick("32 MiB through the wire")
                self.series |= await wire.measured(3 if self.quick else wire.ROUNDS)
        return [judge(row, self.series, self.reasons) for row in self.rows]

    async def _idle(self, driver: str, *, preload: bool, can: bool) -> None:
        keys = {row.judged for row in self.rows if row.part == "idle"}
        memory = idle.memory_key(driver, preload=preload)
        if not keys & {memory, f"idle-{driver}"}:
            return
        if not can:
            self.reasons |= dict.fromkeys((memory, f"idle-{driver}"), f"{driver} cannot be used here")
            return
        try:
            seconds = idle.QUICK_CPU_SECONDS if self.quick else idle.CPU_SECONDS
            self.series |= await idle.measured(self.directory, driver, preload=preload, seconds=seconds, tick=self.tick)
        except Exception as problem:  # noqa: BLE001 - the other rows are still worth having
            self.reasons |= dict.fromkeys((memory, f"idle-{driver}"), f"{type(problem).__name__}: {problem}"[:300])

    def _pandas(self) -> bare.Bare | None:
        try:
            return bare.with_pandas(Settings().data_dir)
        except RuntimeError as problem:
            self.reasons |= dict.fromkeys(("pandas", "bare-pandas", "throughput-pandas"), str(problem))
            return None

    @asynccontextmanager
    async def _part(self, part: Part, wanted: set[Part]) -> AsyncIterator[None]:
        """Have a part that fails be a reason for its rows, and no end of the run."""
        try:
            yield
        except Exception as problem:
            if part not in wanted:
                raise
            for row in self.rows:
                if row.part == part and row.judged not in self.series:
                    self.reasons.setdefault(row.judged, f"{type(problem).__name__}: {problem}"[:300])


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


async def compare(options: argparse.Namespace, console: Console, tick: Callable[[str], None]) -> int:
    """This tree against another revision; the exit code is 0 whatever is found."""
    async with scratch() as directory, against.checked_out(options.against, directory) as other:
        tick("asking both which drivers can be used")
        both = [name for name in await clients.usable() if name in await clients.usable(other)]
        reasons: dict[str, str] = {}
        try:
            pandas = bare.with_pandas(Settings().data_dir)
        except RuntimeError:
            pandas = None
        rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
        series = await against.measured(
            other, directory, drivers=both, pandas=pandas, rounds=rounds, reasons=reasons, tick=tick
        )
        against.show(series, options.against, console)
        for key, reason in reasons.items():
            console.print(f"[yellow]{key}: {reason}[/]")
        if options.json:
            found = {key: each.summary() for key, each in series.items()}
            options.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def parsed() -> argparse.Namespace:
    """The command line."""
    options = argparse.ArgumentParser(
        prog="make bench", description=__doc__, epilog="rows: " + ", ".join(row.key for row in ROWS)
    )
    options.add_argument("--rows", nargs="+", default=[], metavar="ROW", help="only these; patterns like 'cold-*' too")
    options.add_argument("--quick", action="store_true", help="few rounds and short loads: to see that it runs")
    options.add_argument("--rounds", type=int, help=f"of the rows about time; {ROUNDS} unless given")
    options.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    options.add_argument("--plot", type=Path, metavar="FILE", help="draw the times there, as PNG")
    options.add_argument("--docs", action="store_true", help="renew docs/performance.md, .json and .png")
    options.add_argument("--image", default="python:3.11-slim", help="of the peers on Docker; it must have python3")
    options.add_argument("--against", metavar="REV", help="compare with this revision of git instead")
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
            if not errors.is_terminal and os.environ.get("CI"):
                errors.print(text)

        try:
            chosen(options.rows)
            return anyio.run(compare if options.against else bench, options, console, tick)
        except (ValueError, against.NoRevisionError) as problem:
            errors.print(str(problem), style="red", markup=False)
            return 2


if __name__ == "__main__":
    sys.exit(main())
