"""Every row about how long one thing takes, all in one run and interleaved: a slow moment falls on all of them alike.

A way is one thing to time and how often a round does it. Rounds take the ways in turn, each beginning with another.
"""

import subprocess  # noqa: TID251 - one way is an import in a bare interpreter
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
from mcp import Client
from tests.perf import bare, clients, peers, workspace
from tests.perf.bare import CODE, PANDAS_CODE, PRINTED, Bare
from tests.perf.clients import Setup
from tests.perf.rows import told
from tests.perf.series import Series
from tests.perf.sides import OURS, Side

Once = Callable[[], Awaitable[float]]  # do it once; milliseconds
_Ready = TypeVar("_Ready")
ONE_CALL_SECONDS = 120.0  # for one call: what takes longer has failed
QUICK_PART = 5  # a quick run does one part in so many of each block
IN_A_ROW = 200  # calls without a pause, each round, where they are to be sustained
PAUSE_SECONDS = 0.02
"""Between calls that are not in a row: in less than a model takes to its next word, the next sandbox is there."""
FULL_QUEUE = 16
"""Sandboxes that the pool may have ready (glovebox_sandboxes.pool.pool): so many calls in a row may profit from
the pause before them, and are not counted where calls are to be sustained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One thing to time."""

    key: str
    what: str
    once: Once
    block: int = 1  # times in a row, each round
    uncounted: int = 0  # of these, how many at the beginning do not count
    every: int = 1  # rounds from one to the next that does it; for what takes seconds
    rest: float = 0.0
    """Seconds after each time in which nothing is measured: what it left to be done must not fall on the next."""
    note: str = ""
    unit: str = "ms"
    turn: str = ""  # what it takes turns with, call by call: others with the same word
    apart: float = 0.0  # seconds before the next turn: what it left to be done must not fall on another's call

    @property
    def run(self) -> int:
        """Times in a row before another of its turn: what is to be sustained is not interrupted."""
        return self.block if self.uncounted else 1


@dataclass(slots=True, kw_only=True)
class Bench:
    """What ways are made of; ``ways`` and ``reasons`` fill as servers come up."""

    quick: bool  # whether blocks are to be short

    directory: Path
    stack: AsyncExitStack
    bare: Bare
    pandas: Bare | None
    usable: Collection[str]
    image: str
    wanted: Collection[str]
    side: Side = OURS
    ways: list[Way] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)  # series that cannot be measured here, and why
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def workspace(self) -> Path:
        """The small one, with the CSV file."""
        return self.directory / "workspace"

    async def build(self) -> None:
        """Have every way that is wanted ready; a server that cannot be had is a reason, not an end."""
        self._bare()
        await self._warm()
        await self._cold()
        self._start()
        if {"list", "search", "read"} & set(self.wanted):
            await self._large()
        for key in peers.KEYS:
            if key in self.wanted:
                await self._try(key, peers.ready(key, self.directory, self.image), self._peer)

    def _add(self, way: Way) -> None:
        if way.key in self.wanted:
            block = max(1, way.block // QUICK_PART) if self.quick else way.block
            self.ways.append(replace(way, block=block))

    def _bare(self) -> None:
        async def plain() -> float:
            return self.bare.milliseconds(CODE, PRINTED)

        self._add(Way(key="bare", what=f"bare {self.bare.python} -I -c", once=plain, block=50))
        if self.pandas is None:
            return
        pandas = self.pandas
        expected = pandas.run(PANDAS_CODE, self.workspace)

        async def grouped() -> float:
            return pandas.milliseconds(PANDAS_CODE, expected, self.workspace)

        self._add(Way(key="bare-pandas", what="bare, the program with pandas", once=grouped, block=4))

    async def _warm(self) -> None:
        setup = self._setup("bubblewrap")
        if {"print", "paused", "pandas"} & set(self.wanted):
            await self._try("print", clients.over_stdio(setup), self._sustained)
        for driver, rest in clients.RESTS.items():
            made = partial(self._called, key=driver, driver=driver, block=2, rest=rest)
            await self._one(driver, self._setup(driver), made)

    async def _sustained(self, client: Client) -> None:
        once = partial(clients.printed, client, CODE, PRINTED, "bubblewrap")
        self._in_a_row("print", "print(1), bubblewrap", once)
        note = f"{PAUSE_SECONDS * 1000:g} ms after each call"
        self._add(
            Way(
                key="paused",
                what="print(1), bubblewrap, with pauses",
                once=once,
                block=20,
                rest=PAUSE_SECONDS,
                note=note,
            )
        )
        if self.pandas is None:
            self.reasons["pandas"] = self.reasons["bare-pandas"]
            return
        expected = self.pandas.run(PANDAS_CODE, self.workspace)
        once = partial(clients.printed, client, PANDAS_CODE, expected, "bubblewrap")
        self._in_a_row("pandas", "pandas, bubblewrap", once)

    def _in_a_row(self, key: str, what: str, once: Once) -> None:
        note = f"{IN_A_ROW} in a row each round; the first {FULL_QUEUE}, which a full pool had ready, do not count"
        self._add(Way(key=key, what=what, once=once, block=IN_A_ROW, uncounted=FULL_QUEUE, note=note))

    async def _cold(self) -> None:
        for driver, block, rest in (("bubblewrap", 10, 0.0), ("docker", 2, 0.3), ("gvisor", 2, 0.3)):
            key = f"cold-{driver}"
            made = partial(self._called, key=key, driver=driver, block=block, rest=rest)
            await self._one(key, self._setup(driver, cold=True), made)

    async def _one(self, key: str, setup: Setup, made: Callable[[Client], Awaitable[None]]) -> None:
        """A server for both programs, where either is wanted and the driver is here."""
        keys = {key, f"{key}-pandas"} & set(self.wanted)
        if keys and setup.driver not in self.usable:
            self.reasons |= dict.fromkeys(keys, f"{setup.driver} cannot be used here: `glovebox doctor` says why")
        elif keys:
            await self._try(key, clients.over_stdio(setup), made, also=(f"{key}-pandas",))

    async def _called(self, client: Client, *, key: str, driver: str, block: int, rest: float) -> None:
        once = partial(clients.printed, client, CODE, PRINTED, driver)
        await once()  # the first call probes the driver
        note = f"{rest:g} s after each call, for what it left to be made or removed" if rest else ""
        self._add(Way(key=key, what=f"print(1), {key}", once=once, block=block, rest=rest, note=note))
        if self.pandas is not None:
            expected = self.pandas.run(PANDAS_CODE, self.workspace)
            once = partial(clients.printed, client, PANDAS_CODE, expected, driver)
            # Cold, each imports pandas: as many as without would take most of the round.
            half = block if rest == clients.RESTS.get(driver) else max(1, block // 2)
            self._add(Way(key=f"{key}-pandas", what=f"pandas, {key}", once=once, block=half, rest=rest, note=note))

    def _start(self) -> None:
        setup = self._setup("bubblewrap", name="start")

        async def start() -> float:
            began = time.perf_counter()
            async with clients.over_stdio(setup) as client:
                await clients.printed(client, CODE, PRINTED, "bubblewrap")
                return (time.perf_counter() - began) * 1000

        async def ended(argv: list[str]) -> float:
            began = time.perf_counter()
            subprocess.run(  # noqa: ASYNC221 - measured so
                argv, check=True, cwd=self.side.root, env={}, stdout=subprocess.DEVNULL, timeout=ONE_CALL_SECONDS
            )
            return (time.perf_counter() - began) * 1000

        def to_end(key: str, what: str, argv: list[str]) -> None:
            self._add(Way(key=key, what=what, once=partial(ended, argv), block=1 if key == "import-mcp" else 3))

        python, layout = self.side.python, self.side.layout
        self._add(Way(key="start", what="server started, first call answered", once=start))
        to_end("import-mcp", "the server's interpreter -c 'import mcp.server'", [python, "-c", "import mcp.server"])
        to_end("help", "glovebox --help", self.side.command("--help"))
        to_end("import", f"import {layout.app}", [python, "-c", f"import {layout.app}"])

    async def _large(self) -> None:
        place = self.directory / "files"
        if not place.exists():  # another side's server may be looking at it already
            place.mkdir(mode=0o755)
            await anyio.to_thread.run_sync(workspace.build, place)
        setup = self._setup("bubblewrap", name="large", place=place)

        async def made(client: Client) -> None:
            for key, question in workspace.questions().items():

                async def on_host(question: workspace.Question = question) -> float:
                    return workspace.on_host(question, place)

                # The host's first, and its first does not count: a file that nobody has read lately is read from disk.
                self._add(Way(key=f"host-{key}", what=" ".join(question.command), once=on_host, block=3, uncounted=1))
                self._add(Way(key=key, what=question.tool, once=partial(workspace.asked, client, question), block=2))

        await self._try("list", clients.over_stdio(setup), made, also=("search", "read"))

    async def _peer(self, peer: peers.Peer | peers.StandingPeer) -> None:
        key = peer.key
        self.versions[f"peer {key}"] = peer.version
        self._add(Way(key=key, what=f"print(1), {key}", once=peer.once, every=4, rest=0.5, note="every fourth round"))

    def _setup(self, driver: str, *, cold: bool = False, name: str = "", place: Path | None = None) -> Setup:
        directory = self.directory / f"{self.side.name}-{name or ('cold' if cold else 'warm')}-{driver}"
        return Setup(directory=directory, workspace=place or self.workspace, driver=driver, cold=cold, side=self.side)

    async def _try(
        self,
        key: str,
        manager: AbstractAsyncContextManager[_Ready],
        then: Callable[[_Ready], Awaitable[None]],
        also: tuple[str, ...] = (),
    ) -> None:
        try:
            await then(await self.stack.enter_async_context(manager))
        except Exception as problem:  # noqa: BLE001 - whatever it is, the other rows are still worth having
            for each in (key, *also):
                self.reasons[each] = told(problem)


async def interleaved(
    ways: list[Way], rounds: int, reasons: dict[str, str], tick: Callable[[str], None]
) -> dict[str, Series]:
    """Time every way, round by round; the first round warms up and does not count."""
    taken: dict[str, list[tuple[float, ...]]] = {way.key: [] for way in ways}
    turns: dict[str, list[Way]] = {}
    for way in ways:
        turns.setdefault(way.turn or way.key, []).append(way)
    order = list(turns.values())
    for number in range(rounds + 1):
        first = number % len(order) if order else 0
        for turn in order[first:] + order[:first]:
            due = [way for way in turn if way.key not in reasons and not (number and (number - 1) % way.every)]
            if due:
                tick(f"round {number} of {rounds}: {due[0].what}" if number else f"warming up: {due[0].what}")
            times = await _in_turn(due, number, reasons)
            for way in turn:
                if number and way.key not in reasons:
                    taken[way.key].append(tuple(times.get(way.key, ())[way.uncounted :]))
    return {
        way.key: Series(key=way.key, what=way.what, unit=way.unit, rounds=tuple(taken[way.key]), note=way.note)
        for way in ways
        if way.key not in reasons and any(taken[way.key])
    }


async def _in_turn(ways: list[Way], number: int, reasons: dict[str, str]) -> dict[str, list[float]]:
    """The block of one round of each, call by call; who is first alternates."""
    times: dict[str, list[float]] = {way.key: [] for way in ways}
    for turn in range(max((way.block // way.run for way in ways), default=0)):
        for way in ways if (number + turn) % 2 == 0 else ways[::-1]:
            try:
                for _ in range(way.run if turn < way.block // way.run and way.key not in reasons else 0):
                    times[way.key].append(await _timed(way))
                await anyio.sleep(way.apart)
            except Exception as problem:  # noqa: BLE001 - as when it was made
                reasons[way.key] = told(problem)
    return times


async def _timed(way: Way) -> float:
    with anyio.fail_after(ONE_CALL_SECONDS):
        spent = await way.once()
    if way.rest:
        await anyio.sleep(way.rest)
    return spent


async def measured(bench: Bench, rounds: int, tick: Callable[[str], None]) -> dict[str, Series]:
    """Everything that is wanted of this part."""
    (bench.workspace).mkdir(exist_ok=True, mode=0o755)
    bare.write_csv(bench.workspace)
    tick("starting servers")
    await bench.build()
    return await interleaved(bench.ways, rounds, bench.reasons, tick)
