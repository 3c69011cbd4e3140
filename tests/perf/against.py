"""``make bench AGAINST=rev``: this tree and another revision in one run, every row that is ours, call by call.

Both run with the same packages, each in an environment, with a runtime and from files of its own (``sides.py``). What
measures a row is what measures it for this tree alone; here it takes turns. What is made of the numbers, and the exit
code, is in contrast.py.
"""

import argparse
import json
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import anyio
from rich.console import Console
from tests.perf import bare, clients, idle, latency, load, machine, sides, where, wire, work
from tests.perf.bare import CODE, PANDAS_CODE, PRINTED, Bare
from tests.perf.clients import Setup
from tests.perf.contrast import Contrast, code, contrast, show
from tests.perf.rows import BETWEEN, Part, Row, chosen, told
from tests.perf.series import Series
from tests.perf.sides import HERE, THERE, Side, alternating

ROUNDS, QUICK_ROUNDS = 6, 2
MOST_REPEATS = 6  # of what takes a server's start or seconds of load for one value; so many are enough for a bootstrap
LOOKS = 3  # times that waiting sandboxes are looked at: memory hardly differs between two of them
LOAD_SECONDS, QUICK_LOAD_SECONDS = 5.0, 3.0
CPU_SECONDS = 5.0
APART_SECONDS, SETTLE_SECONDS = 0.05, 0.5
"""Between one side's call and the other's, in which a sandbox is made and one removed; and after calls in a row, in
which a whole queue is."""
_WIRE = """
import anyio, json
from tests.perf import wire
print(json.dumps({{key: each.values for key, each in anyio.run(wire.measured, {rounds}).items()}}))
"""
Values = dict[str, list[tuple[float, ...]]]  # by ``KEY SIDE``: rounds


@dataclass(slots=True, kw_only=True)
class Both:
    """One run: both sides, what is asked of them, and what was found."""

    rows: tuple[Row, ...]
    sides: tuple[Side, Side]
    directory: Path
    usable: Sequence[str]  # drivers that both can use
    pandas: Bare | None
    rounds: int
    quick: bool
    tick: Callable[[str], None]
    series: dict[str, Series] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def repeats(self) -> int:
        """Times that a server is started anew, or loaded for some seconds."""
        return min(self.rounds, MOST_REPEATS)

    async def measure(self) -> list[Contrast]:
        """Every part that a row needs, one after another; what fails is a reason beside its rows."""
        (self.directory / "workspace").mkdir(exist_ok=True, mode=0o755)
        bare.write_csv(self.directory / "workspace")
        steps: dict[Part, Callable[[], Awaitable[None]]] = {
            "latency": self._latency,
            "work": self._work,
            "broker": self._broker,
            "load": self._load,
            "burst": self._burst,
            "idle": self._idle,
            "wire": self._wire,
        }
        for part, step in steps.items():
            if self._wanted(part):
                try:
                    await step()
                except Exception as problem:  # noqa: BLE001 - the other parts are still worth having
                    self.reasons = dict.fromkeys(self._wanted(part), told(problem)) | self.reasons
        return [contrast(row, self.series, self.reasons) for row in self.rows]

    def _wanted(self, part: Part) -> list[str]:
        return list(dict.fromkeys(row.judged for row in self.rows if row.part == part))

    def _keep(self, values: Values) -> None:
        units = {row.judged: row.unit for row in self.rows}
        for key, rounds in values.items():
            unit = units.get(key.partition(" ")[0], "")
            self.series[key] = Series(key=key, what=key, unit=unit, rounds=tuple(rounds))

    async def _latency(self) -> None:
        """A few servers of each side at a time: those that are not at work cost the others nothing."""
        wanted = self._wanted("latency")
        groups = [
            ("print", "paused", "pandas"), ("docker", "docker-pandas"), ("gvisor", "gvisor-pandas"),
            *((f"cold-{each}", f"cold-{each}-pandas") for each in ("bubblewrap", "docker", "gvisor")),
            ("start", "help", "import"), ("list", "search", "read"),
        ]  # fmt: skip
        for group in (set(each) & set(wanted) for each in groups):
            async with AsyncExitStack() as stack:
                ways: list[latency.Way] = []
                for side in self.sides if group else ():
                    reasons: dict[str, str] = {}
                    if self.pandas is None:
                        keys = {"bare-pandas", *(key for key in group if "pandas" in key)}
                        reasons |= dict.fromkeys(keys, "there is no pandas beside the runtime")
                    bench = latency.Bench(
                        directory=self.directory, stack=stack, bare=Bare(python=side.python, version=""),
                        pandas=self.pandas, usable=self.usable, image="", quick=self.quick, wanted=group,
                        reasons=reasons, side=side,
                    )  # fmt: skip
                    self.tick(f"starting servers, {side.name}: {', '.join(sorted(group))}")
                    await bench.build()
                    ways += self._turns(side, bench.ways, reasons)
                # Before the servers end: one that ends badly must not take the numbers of all with it.
                self.series |= await latency.interleaved(ways, self.rounds, self.reasons, self.tick)

    async def _work(self) -> None:
        wanted, ways = self._wanted("work"), list[latency.Way]()
        async with AsyncExitStack() as stack:
            for side in self.sides:
                reasons: dict[str, str] = {}
                python = Bare(python=side.python, version="")
                found = await work.ways(stack, self._setup(side, "work"), python, reasons, quick=self.quick)
                ways += self._turns(side, [way for way in found if way.key in wanted], reasons)
            self.series |= await latency.interleaved(ways, self.rounds, self.reasons, self.tick)

    def _turns(self, side: Side, ways: Sequence[latency.Way], reasons: dict[str, str]) -> list[latency.Way]:
        """One side's ways, to take turns with the other's."""
        self.reasons |= {f"{key} {side.name}": reason for key, reason in reasons.items()}
        return [
            replace(
                way, key=f"{way.key} {side.name}", what=f"{way.key} both", turn=way.key,
                apart=SETTLE_SECONDS if way.uncounted else APART_SECONDS,
            )
            for way in ways
        ]  # fmt: skip

    async def _broker(self) -> None:
        """Start servers anew each round: where code lies in memory moves parts of some microseconds by a tenth."""
        count = (where.QUICK_CALLS if self.quick else where.CALLS) // self.repeats
        values: Values = {}
        for number in range(self.repeats):
            self.tick(f"parts of a call, {number + 1} of {self.repeats}")
            directory = self.directory / f"parts-{number}"
            directory.mkdir(mode=0o755)
            for name, parts in (await where.beside(directory, self.sides, "bubblewrap", count)).items():
                for series in parts.broker():
                    values.setdefault(f"{series.key} {name}", []).append(series.values)
        self._keep(values)

    async def _load(self) -> None:
        seconds = QUICK_LOAD_SECONDS if self.quick else LOAD_SECONDS
        programs = {"throughput": (CODE, PRINTED)}
        if self.pandas is not None:
            expected = self.pandas.run(PANDAS_CODE, self.directory / "workspace")
            programs["throughput-pandas"] = (PANDAS_CODE, expected)
        for key, (program, printed) in programs.items():
            if key not in self._wanted("load"):
                continue
            values: Values = {f"{key} {side.name}": [] for side in self.sides}
            async with AsyncExitStack() as stack:
                serving = {
                    side.name: await stack.enter_async_context(clients.over_http(self._setup(side, key)))
                    for side in self.sides
                }
                for number in range(self.repeats):
                    for side in alternating(self.sides, number):
                        self.tick(f"{key} {side.name}, {number + 1} of {self.repeats}")
                        rate = await load.served_rate(serving[side.name], program, printed, seconds)
                        values[f"{key} {side.name}"].append((rate,))
            self._keep(values)

    async def _burst(self) -> None:
        async def once(side: Side, number: int) -> dict[str, Series]:
            found = await load.burst(self._setup(side, f"burst-{number}"))
            if found["burst-lost"].get("max"):
                raise RuntimeError(f"{side.name} lost {found['burst-lost'].get('max'):g} calls of a burst")
            return found

        await self._in_turn("burst", self.repeats, once)

    async def _wire(self) -> None:
        async def once(side: Side, _number: int) -> dict[str, Series]:
            program = _WIRE.format(rounds=wire.QUICK_ROUNDS)
            values = await anyio.to_thread.run_sync(sides.parsed, side, program)
            return {key: Series(key=key, what=key, unit="", rounds=(tuple(each),)) for key, each in values.items()}

        await self._in_turn("wire", self.repeats, once)

    async def _in_turn(self, part: Part, times: int, once: Callable[[Side, int], Awaitable[dict[str, Series]]]) -> None:
        """What starts afresh each time: one side, then the other."""
        values: Values = {}
        for number in range(times):
            for side in alternating(self.sides, number):
                self.tick(f"{part} {side.name}, {number + 1} of {times}")
                for key, each in (await once(side, number)).items():
                    values.setdefault(f"{key} {side.name}", []).append(each.values)
        self._keep(values)

    async def _idle(self) -> None:
        """Memory and processor time are those of single processes: both sides are looked at together."""
        for look in idle.LOOKS:
            wanted = set(look.keys).intersection(self._wanted("idle"))
            if wanted and look.driver not in self.usable:
                reason = f"{look.driver} cannot be used here: `glovebox doctor` says why"
                self.reasons |= dict.fromkeys(look.keys, reason)
            elif wanted:
                try:
                    await self._looked(look)
                except Exception as problem:  # noqa: BLE001 - the other looks are still worth having
                    self.reasons |= dict.fromkeys(look.keys, told(problem))

    async def _looked(self, look: idle.Look) -> None:
        seconds = idle.QUICK_CPU_SECONDS if self.quick else CPU_SECONDS
        values: Values = {}

        async def once(side: Side) -> None:
            for key, each in (await idle.measured(self.directory, look, seconds, side)).items():
                values.setdefault(f"{key} {side.name}", []).append(each.values)

        times = min(self.rounds, LOOKS)
        for number in range(times):
            self.tick(f"{look.memory} both, {number + 1} of {times}")
            async with anyio.create_task_group() as tasks:
                for side in self.sides:
                    tasks.start_soon(once, side)
        self._keep(values)

    def _setup(self, side: Side, name: str) -> Setup:
        return Setup(
            directory=self.directory / f"{side.name}-{name}", workspace=self.directory / "workspace", side=side
        )


async def compare(options: argparse.Namespace, console: Console, tick: Callable[[str], None]) -> int:
    """Measure both, show, keep; the exit code."""
    rows = tuple(row for row in chosen(options.rows, BETWEEN) if not options.drivers or row.driver in options.drivers)
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    with (
        tempfile.TemporaryDirectory(prefix="glovebox-bench-", ignore_cleanup_errors=True) as scratch,
        sides.checked_out(options.against, Path(scratch)) as other,
    ):
        directory = Path(scratch)
        directory.chmod(0o755)  # as root, sandboxes run as another user
        both = (sides.made(HERE, machine.ROOT, directory), sides.made(THERE, other, directory))
        facts = machine.facts({}) | sides.own_code(both) | {"against": options.against, "rounds": str(rounds)}
        docker = any(row.driver == "docker" for row in rows) and "docker" in sides.OURS.usable()
        for side in both:
            tick(f"building the runtime of {side.name}")
            await anyio.to_thread.run_sync(partial(sides.set_up, side, base=options.image if docker else None))
        drivers = [side.usable() for side in both]
        run = Both(
            rows=rows, sides=both, directory=directory, usable=[each for each in drivers[0] if each in drivers[1]],
            pandas=_pandas(both[0]), rounds=rounds, quick=options.quick, tick=tick,
        )  # fmt: skip
        contrasts = await run.measure()
        verdict = code(contrasts)
        if options.json:
            found = {
                "format": 1,
                "machine": facts,
                "exit": verdict,
                "slower": [each.row.key for each in contrasts if each.slower],
                "rows": [each.as_json() for each in contrasts],
                "series": {key: each.summary() for key, each in run.series.items()},
            }
            options.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        show(contrasts, facts, console)
        return verdict


def _pandas(side: Side) -> Bare | None:
    """What says what the program with pandas ought to print."""
    try:
        return bare.with_pandas(side.data) if side.data else None
    except RuntimeError:
        return None
