"""``make bench AGAINST=rev``: this tree and another revision, both servers in one run, call by call.

The revision is checked out beside, in a directory that is removed afterwards; both run with the same packages.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
from rich.console import Console
from rich.table import Table
from tests.perf import bare, clients
from tests.perf.bare import CODE, PANDAS_CODE, PRINTED, Bare
from tests.perf.clients import Setup
from tests.perf.latency import Way, interleaved
from tests.perf.machine import ROOT, revision
from tests.perf.series import Interval, Series, compared

HERE, THERE = "here", "there"


class NoRevisionError(Exception):
    """The other revision cannot be run; the message says why."""


@asynccontextmanager
async def checked_out(name: str, directory: Path) -> AsyncIterator[Path]:
    """A revision's files, for the length of the block.

    Raises:
        NoRevisionError: git does not know it.
    """
    place = directory / "other"
    git = ["git", "-C", str(ROOT), "worktree"]
    done = await anyio.run_process([*git, "add", "--detach", str(place), name], check=False)
    if done.returncode:
        raise NoRevisionError(done.stderr.decode(errors="replace").strip())
    try:
        yield place
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.run_process([*git, "remove", "--force", str(place)], check=False)


async def measured(
    other: Path,
    directory: Path,
    *,
    drivers: list[str],
    pandas: Bare | None,
    rounds: int,
    reasons: dict[str, str],
    tick: Callable[[str], None],
) -> dict[str, Series]:
    """Both revisions' series, ``KEY HERE`` and ``KEY THERE``."""
    workspace = directory / "workspace"
    workspace.mkdir(exist_ok=True, mode=0o755)
    bare.write_csv(workspace)
    programs = [("print", CODE, PRINTED)]
    if pandas is not None:
        programs.append(("pandas", PANDAS_CODE, pandas.run(PANDAS_CODE, workspace)))
    ways: list[Way] = []
    async with AsyncExitStack() as stack:
        for driver in drivers:
            block, rest = 1 if driver in clients.RESTS else 20, clients.RESTS.get(driver, 0.0)
            for side, root in ((HERE, ROOT), (THERE, other)):
                setup = Setup(directory=directory / f"{driver}-{side}", workspace=workspace, driver=driver, root=root)
                client = await stack.enter_async_context(clients.over_stdio(setup))
                ways += [
                    Way(
                        key=f"{driver}: {name} {side}",
                        what=f"{name}, {driver}, {side}",
                        once=partial(clients.printed, client, code, printed, driver),
                        block=block,
                        rest=rest,
                    )
                    for name, code, printed in programs
                ]
        return await interleaved(ways, rounds, reasons, tick)


def pairs(series: dict[str, Series]) -> dict[str, Interval]:
    """What of both was measured: this tree's median as a part of the other's."""
    names = [key.removesuffix(f" {HERE}") for key in series if key.endswith(f" {HERE}")]
    return {
        name: compared(series[f"{name} {HERE}"], series[f"{name} {THERE}"])
        for name in names
        if f"{name} {THERE}" in series
    }


def show(series: dict[str, Series], name: str, console: Console) -> None:
    """The table: both medians, their ratio, and where it would lie in 95 of 100 such runs."""
    table = Table(title=f"{revision()} (here) against {name} (there)", title_justify="left")
    for title in ("", "here, p50 ms", "there, p50 ms", "ratio", "95 % interval", ""):
        table.add_column(title, justify="left" if not title else "right")
    for key, found in pairs(series).items():
        here, there = series[f"{key} {HERE}"], series[f"{key} {THERE}"]
        verdict = "no difference seen" if not found.differs else "quicker" if found.ratio < 1 else "slower"
        interval = f"{found.low:.3f} to {found.high:.3f}"
        table.add_row(key, f"{here.get('p50'):.2f}", f"{there.get('p50'):.2f}", f"{found.ratio:.3f}", interval, verdict)
    console.print(table)
