"""Many stops at random moments, under load, over two server processes: what each names ends in time, and nothing else.

Each of two workers is a server process of its own, on one state directory, and keeps the calls of several runs under
way, whose programs compute without end; a bystander's short calls go on beside them. Which run is stopped, and when, is
drawn from a seed. A call has ended once its caller has the answer and no process of its program is left on the host.
Usage: ``python -m tests.soak.stops --stops 1000 --driver bubblewrap``; prints what it found as JSON; exit code 1 if a
call of a stopped run ended late, or any other ended.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
from anyio.streams.buffered import BufferedByteReceiveStream
from tests.fixtures.brokered import Heard, profile
from tests.fixtures.leftovers import until

from glovebox_audit.chain import new_call_id
from glovebox_audit.verify import verify
from glovebox_sandboxes.drivers.registry import NAMES
from glovebox_server import app as apps
from glovebox_server.app import App
from glovebox_server.calls import Principal
from glovebox_server.guards.stops.stops import new_stop, stops_of
from glovebox_server.settings import Settings

BOUND: Mapping[str, float] = {"bubblewrap": 1.0, "gvisor": 3.0, "docker": 3.0}
"""Seconds that a call may go on after its stop, by driver."""
WORKERS = 2
RUNS = 3  # runs of each worker, each with one call under way
STAGES = ("begun", "starts", "runs")
"""After which word of a run's its stop comes, in turn: the call waits, its sandbox is started, or its program runs."""
SETTLED_SECONDS = 0.2  # a stop comes within so long after that
LONG = """
import ctypes
ctypes.CDLL(None).prctl(15, b"{mark}")
print(flush=True)
while True:
    pass
"""
"""Names its process, see PR_SET_NAME in prctl(2), and computes. gVisor shows the host no name; there the driver answers
once the control group, in which everything was, could be removed."""


@dataclass(kw_only=True)
class Found:
    """What came of it."""

    stops: int = 0
    late: list[float] = field(default_factory=list)  # seconds from a stop to the end of a call that came too late
    others: list[str] = field(default_factory=list)  # ends that nothing had asked for
    seconds: list[float] = field(default_factory=list)  # from each stop to the end of its call
    bystanders: int = 0  # short calls that went well meanwhile
    log_whole: bool = False

    @property
    def good(self) -> bool:
        """Whether every promise held."""
        return not self.late and not self.others and self.log_whole and self.bystanders > 0

    def report(self) -> dict[str, Any]:
        """For people."""
        told = sorted(self.seconds)
        shares = {f"p{share}": round(told[len(told) * share // 100], 3) for share in (50, 95, 99)} if told else {}
        return {**asdict(self), "seconds": {**shares, "max": round(told[-1], 3) if told else None}, "good": self.good}


async def storm(place: Path, *, stops: int, driver: str, start: str = "warm", seed: int = 1) -> Found:
    """Stop ``stops`` runs of two servers that have their state in ``place``."""
    settings = _settings(place)
    text = profile("run_python", driver, wall=600).replace("cpu_seconds = 10", "cpu_seconds = 600")  # a stop ends it
    (place / "profiles" / "run_python.toml").write_text(f'{text}[python]\nstart = "{start}"\n')
    found = Found()
    party = _Party(settings=settings, bound=BOUND[driver], drawn=random.Random(seed), left=stops, found=found)  # noqa: S311 - no secret
    async with anyio.create_task_group() as tasks:
        for number in range(WORKERS):
            words = [sys.executable, "-m", "tests.soak.stops", "--worker", str(number), "--place", str(place)]
            tasks.start_soon(party.over, words)
    found.log_whole = verify(settings.state_dir / "audit").ok
    return found


@dataclass(kw_only=True)
class _Party:
    """Stops what the workers begin, and hears what becomes of it."""

    settings: Settings
    bound: float
    drawn: random.Random
    left: int  # stops that are still to be made
    found: Found
    stopped: dict[str, tuple[str, float]] = field(default_factory=dict)  # by which stop each run was, and when

    async def over(self, words: list[str]) -> None:
        """Start a worker, stop its runs until there were enough and all have ended, and have it end."""
        async with await anyio.open_process(words, stderr=None) as process, anyio.create_task_group() as stopping:
            assert process.stdout is not None
            assert process.stdin is not None
            lines, waiting, well = BufferedByteReceiveStream(process.stdout), dict[str, str](), 0
            while not self.found.others and (self.left or waiting or not well):
                line = json.loads(await lines.receive_until(b"\n", 1 << 16))
                run, what = line["run"], line["what"]
                if what == "begun" and self.left:
                    self.left -= 1
                    waiting[run] = STAGES[self.left % len(STAGES)]
                if what == waiting.get(run):
                    stopping.start_soon(self._stop, run)
                elif what == "ended":
                    self._note(line)
                    waiting.pop(run, None)
                well += what == "well"
            self.found.bystanders += well
            await process.stdin.aclose()
            with suppress(anyio.EndOfStream):
                while True:
                    await lines.receive(1 << 16)

    def _note(self, line: Mapping[str, Any]) -> None:
        run = line["run"]
        if line["rule"] != "stop" or run not in self.stopped:
            self.found.others.append(f"{run}: {line}")
            return
        stop, began = self.stopped[run]
        stops_of(self.settings.state_dir).remove(stop)
        seconds = line["at"] - began
        self.found.stops += 1
        self.found.seconds.append(seconds)
        if seconds > self.bound:
            self.found.late.append(seconds)

    async def _stop(self, run: str) -> None:
        await anyio.sleep(self.drawn.uniform(0, SETTLED_SECONDS))
        files = stops_of(self.settings.state_dir)
        stop = new_stop("run", run, because="drawn", by="local:0", made=datetime.now(UTC))
        self.stopped[run] = (stop.id, time.monotonic())
        await anyio.to_thread.run_sync(files.add, stop.id, stop.encoded())


def _settings(place: Path) -> Settings:
    for name in ("profiles", "workspace"):
        (place / name).mkdir(exist_ok=True)
    return Settings(workspace=place / "workspace", profiles_dir=place / "profiles", state_dir=place / "state")


# One worker.


async def _work(place: Path, number: int) -> None:
    async with apps.opened(_settings(place), "cli") as app, anyio.create_task_group() as tasks:
        for _ in range(RUNS):
            tasks.start_soon(_one_after_another, app, number)
        tasks.start_soon(_bystander, app)
        await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
        tasks.cancel_scope.cancel()


class _Told(Heard):
    """Says how far a run's call has come."""

    def __init__(self, run: str) -> None:
        self._run = run

    def progress(self, message: str) -> None:
        if message == "Getting a sandbox":
            _say(what="starts", run=self._run)

    def printed(self, _text: str) -> None:
        _say(what="runs", run=self._run)


async def _one_after_another(app: App, number: int) -> None:
    who = Principal(id=f"token:w{number}", transport="cli")
    while True:
        run = f"r_{new_call_id()[2:]}"
        _say(what="begun", run=run)
        mark = run[-15:]
        result = await app.broker.submit(who, "run_python", {"code": LONG.format(mark=mark)}, _Told(run), run=run)
        await until(lambda: not _lives(mark))  # noqa: B023 - awaited here
        refused = result.structured.get("refused") or {}
        _say(what="ended", run=run, rule=refused.get("rule"), at=time.monotonic())


def _lives(mark: str) -> bool:
    """Whether a process of this name is on the host."""
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (place / "comm").read_text().strip() == mark:
                return True
    return False


async def _bystander(app: App) -> None:
    who, run = Principal(id="token:bystander", transport="cli"), f"r_{new_call_id()[2:]}"
    while True:
        result = await app.broker.submit(who, "run_python", {"code": "print(1)"}, Heard(), run=run)
        _say(what="ended" if result.failed else "well", run=run, rule=str(result.structured), at=0.0)
        await anyio.sleep(0.5)


def _say(**words: Any) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def main() -> int:
    """See the module's header."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=1000)
    parser.add_argument("--driver", choices=NAMES, default="bubblewrap")
    parser.add_argument("--start", choices=("warm", "cold"), default="warm", help="python.start in the profile")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        anyio.run(_work, given.place, given.worker)
        return 0
    with tempfile.TemporaryDirectory(prefix="glovebox-stops-") as directory:
        place = Path(directory)
        place.chmod(0o755)
        wanted = partial(storm, place, stops=given.stops, driver=given.driver, start=given.start, seed=given.seed)
        found = anyio.run(wanted)
    sys.stdout.write(json.dumps(found.report(), indent=2) + "\n")
    return 0 if found.good else 1


if __name__ == "__main__":
    sys.exit(main())
