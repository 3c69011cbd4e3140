"""``make compare``: the portable cases, against every system that can be had here, as tables: comparison*.csv.

One case after another, each in a sandbox of its own with a host planted for it, so that none is stopped by what another
left. Takes some twenty minutes. With ``--system docker-run`` one is asked again and the rest is kept.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
from rich.console import Console
from tests.comparison import page
from tests.comparison.getting import PEERS, NotHereError, got
from tests.comparison.own import Glovebox, glovebox
from tests.comparison.portable import Portable, Seen, described, judge, read_json, selection, text, unpromised
from tests.comparison.systems import System, first_line, owned
from tests.comparison.timing import BARE, medians
from tests.conformance import control

from glovebox_sandboxes.conformance import case as cases
from glovebox_sandboxes.conformance import host
from glovebox_sandboxes.conformance.case import LIMITS, Case
from glovebox_sandboxes.conformance.host import Planted
from glovebox_sandboxes.drivers import registry
from glovebox_sandboxes.host import surroundings

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".compare"
DOCS = ROOT / "docs" / "internals"
NOTHING = "python3"
OWN = tuple(f"glovebox-{name}" for name in registry.NAMES)
KEYS = (NOTHING, *PEERS, *OWN)
SHOWN_CHARACTERS = 100
#: In a program: what is there only with a kernel of Linux, or is emulated so that its answers mean nothing.
LINUX = ("socket.", "/proc", "/dev", "/sys/", "libc", "os.fork", "os.kill", "signal.", "threading")
#: Before anything is asked: a system in which this does not work would seem to stop everything.
_SANE = """
if {workspace}:
    assert "a,1" in open(WORKSPACE + "/data.csv").read()
open(SCRATCH + "/sane", "w").write("sane")
assert open(SCRATCH + "/sane").read() == "sane"
if {forks}:
    child = os.fork()
    if child == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print("sa" + "ne")
"""


class Comparison:
    """All systems, one after another; results are kept as they come."""

    def __init__(self, out: Console, kept: dict[str, Any]) -> None:
        """Take where to tell progress, and the results of an earlier run."""
        self._out = out
        self._cases = {each.id: each for each in cases.load()}
        self._selection = selection()
        self._unpromised = unpromised()
        self.kept = kept

    def head(self) -> None:
        """What a reader must know of this run, beside the systems."""
        self.kept |= {
            "format": 1,
            "date": datetime.now(UTC).date().isoformat(),
            "suite": cases.digest(self._cases.values()),
            "host": surroundings.facts(),
            "cases": [described(self._cases[name], how) for name, how in self._selection.portable.items()],
            "elsewhere": dict(self._selection.elsewhere),
        }
        self.kept.setdefault("systems", {})

    async def nothing(self, only: frozenset[str]) -> None:
        """The controls: each attack without any guard."""
        found: dict[str, Any] = self._before(NOTHING, only)
        for name in self._selection.portable:
            if only and name not in only:
                continue
            async with host.planted() as planted:
                problems = await control.problems(self._cases[name], planted)
            found[name] = {"word": "unclear" if problems else "through", "shown": _clean("; ".join(problems), planted)}
            self._out.print(f"  {name}: {found[name]['word']} {found[name]['shown']}", markup=False)
        about = {
            "title": "bare `python3`",
            "version": (await first_line([BARE, "-V"])).split()[-1],
            "skipped": "",
            "notes": "",
        }
        self.kept["systems"][NOTHING] = about | {
            "command": "python3 -I -B -X utf8 -c PROGRAM",
            "median_ms": self.kept["systems"].get(NOTHING, {}).get("median_ms"),
            "results": found,
        }

    async def system(self, system: System, only: frozenset[str]) -> None:
        """One system: that it works, and every case."""
        with _scratch(system) as scratch:
            await self._sane(system, scratch)
        found: dict[str, Any] = self._before(system.key, only)
        for name, how in self._selection.portable.items():
            if only and name not in only:
                continue
            found[name] = await self._ask(system, self._cases[name], how)
            self._out.print(f"  {name}: {found[name]['word']} {found[name]['shown']}", markup=False)
        self.kept["systems"][system.key] = {
            "title": system.title,
            "version": system.version,
            "command": system.command(),
            "notes": system.notes,
            "skipped": "",
            "median_ms": self.kept["systems"].get(system.key, {}).get("median_ms"),
            "results": found,
        }

    def skipped(self, key: str, why: str) -> None:
        """A system that cannot be had here: what an earlier run found of it is no longer true."""
        self.kept["systems"][key] = {"title": key, "skipped": why, "results": {}}

    def _before(self, key: str, only: frozenset[str]) -> dict[str, Any]:
        return dict(self.kept["systems"].get(key, {}).get("results", {})) if only else {}

    async def _sane(self, system: System, scratch: Path) -> None:
        program = _SANE.format(workspace=system.workspace, forks=system.linux)
        async with host.planted() as planted:
            seen = await system.run(program, LIMITS, planted, scratch=scratch)
        if seen.ended != "ended" or "sane" not in seen.stdout:
            raise NotHereError(f"a harmless program does not run in it: {(seen.note or seen.stderr)[-300:]}")

    async def _ask(self, system: System, case: Case, how: Portable) -> dict[str, str]:
        program = text(case, how, forks=system.linux)
        if not system.workspace and "WORKSPACE" in program:
            return {"word": "absent", "shown": "no file of the host can be given to it"}
        if not system.linux and any(word in program for word in LINUX):
            return {"word": "absent", "shown": "what it attacks is Linux's"}
        async with host.planted() as planted:
            missing = next((why for name, why in planted.absent.items() if f'HOST["{name}"]' in program), "")
            if missing:
                return {"word": "unclear", "shown": missing}
            seen, again = await self._seen(system, case, how, planted)
            word, shown = judge(case, how, seen, again, planted.names)
            shown = _clean(shown, planted)
        reason = self._reason(system, case)
        if word == "through" and reason:
            return {"word": "unpromised", "shown": shown, "reason": reason}
        return {"word": word, "shown": shown}

    async def _seen(self, system: System, case: Case, how: Portable, planted: Planted) -> tuple[Seen, Seen | None]:
        before = planted.fingerprint()
        limits = case.in_force()
        program = text(case, how, forks=system.linux)
        with _scratch(system) as scratch:
            if case.before is not None:
                earlier = await system.run(case.before, limits, planted, scratch=scratch)
                if earlier.left:
                    return earlier, None
            seen = await system.run(program, limits, planted, scratch=scratch)
            again = await system.run(program, limits, planted, scratch=scratch) if how.same_twice else None
        if planted.fingerprint() != before:
            seen = replace(seen, changed=True)
        return seen, again

    def _reason(self, system: System, case: Case) -> str:
        if isinstance(system, Glovebox):
            return next((case.gaps[name] for name in system.gaps if name in case.gaps), "")
        return self._unpromised.get(system.key, {}).get(case.id, "")


@contextmanager
def _scratch(system: System) -> Iterator[Path]:
    folder = FOLDER / f"scratch-{system.key}"
    shutil.rmtree(folder, ignore_errors=True)
    yield owned(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _clean(shown: str, planted: Planted) -> str:
    names = {str(planted.root): "(host)", str(FOLDER): "(folder)", str(ROOT): "(here)"}
    names |= {planted.names["hostname"]: "(host's name)", planted.names["canary_name"]: "CANARY"}
    for name, word in names.items():
        shown = shown.replace(name, word)
    return " ".join(shown.split())[:SHOWN_CHARACTERS]


async def _main(arguments: argparse.Namespace) -> int:
    out = Console(stderr=True, highlight=False)
    again = arguments.system or arguments.case or arguments.times
    kept = read_json(arguments.json) if arguments.json.exists() and again else {}
    comparison = Comparison(out, kept)
    comparison.head()
    # Not below /tmp, which some systems are given to write in.
    tempfile.tempdir = str(owned(FOLDER / "host"))
    async with AsyncExitStack() as stack:
        systems = []
        for key in arguments.system or KEYS:
            out.print(f"[bold]{key}[/bold]")
            try:
                if key == NOTHING:
                    if not arguments.times:
                        await comparison.nothing(frozenset(arguments.case))
                    continue
                systems.append(await stack.enter_async_context(_opened(key, arguments.image)))
                if not arguments.times:
                    await comparison.system(systems[-1], frozenset(arguments.case))
            except NotHereError as problem:
                out.print(f"  skipped: {problem}", markup=False)
                comparison.skipped(key, str(problem))
            page.keep(comparison.kept, arguments.json, KEYS)
        if arguments.times or not (arguments.system or arguments.case):
            asked = [each for each in systems if not comparison.kept["systems"].get(each.key, {}).get("skipped")]
            for key, milliseconds in (await medians(asked, FOLDER)).items():
                comparison.kept["systems"].get(key, {})["median_ms"] = milliseconds
    page.keep(comparison.kept, arguments.json, KEYS)
    out.print(f"{arguments.json} and the tables beside it are written.")
    return 0


def _opened(key: str, image: str) -> AbstractAsyncContextManager[System]:
    return glovebox(key.removeprefix("glovebox-")) if key in OWN else got(key, FOLDER, image)


def _arguments() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--system", action="append", choices=KEYS, default=[], help="only this; the rest is kept")
    options.add_argument("--case", action="append", default=[], help="only this case; the rest is kept")
    options.add_argument("--times", action="store_true", help="only how long a call takes, of all systems in turns")
    options.add_argument("--image", default="python:3.11-slim", help="of the container systems; it must have python3")
    options.add_argument("--json", type=Path, default=DOCS / "comparison.json", help="where results are kept")
    return options.parse_args()


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(anyio.run(_main, _arguments()))
