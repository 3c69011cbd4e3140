"""``make bench``: a whole call, from a client and back, beside what people do otherwise: run the interpreter bare.

Rounds are interleaved, so that a slow moment of the machine falls on every row alike; ratios of medians carry over to
other machines, milliseconds do not. Exit code 1 if a ratio is over its bound.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess  # noqa: TID251 - the bare interpreter is what we measure ourselves against
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import anyio
from mcp import Client, StdioServerParameters
from rich.console import Console
from rich.progress import track
from rich.table import Table

from profiles.loader import SHIPPED

GLOVEBOX = Path(sys.executable).with_name("glovebox")
PYTHON = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
CODE = "print(1)"
ROUNDS = 40
WARM_UP = 3
#: A whole call over stdio with a sandbox made for it, at most so many times the bare interpreter.
BOUNDS = {"bubblewrap": 3.0, "docker": 30.0}

Once = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one way of running the program took."""

    name: str
    p50_ms: float
    p95_ms: float
    ratio: float
    """Of its median to the bare interpreter's."""
    bound: float | None = None


async def bare() -> None:
    """What Glovebox is compared with: the interpreter as a subprocess, nothing isolated."""
    done = subprocess.run([PYTHON, "-I", "-c", CODE], capture_output=True, check=True)  # noqa: ASYNC221 - measured so
    assert done.stdout == b"1\n"


def calling(client: Client, driver: str) -> Once:
    """One whole call of a connected client."""

    async def once() -> None:
        result = await client.call_tool("run_python", {"code": CODE})
        found = result.structured_content or {}
        assert not result.is_error, found
        assert found["stdout"]["text"] == "1\n"
        assert found["isolation"]["driver"] == driver
        assert found["isolation"]["verified"]

    return once


async def usable() -> dict[str, str]:
    """Drivers this machine can run, each with its version."""
    done = await anyio.run_process([str(GLOVEBOX), "doctor", "--json"], check=False)
    return {each["driver"]: each["version"] for each in json.loads(done.stdout)["drivers"] if each["usable"]}


def server(directory: Path, driver: str) -> StdioServerParameters:
    """A server whose ``run_python`` has no other driver than this one, and is else as shipped."""
    own = directory / driver / "profiles"
    workspace = directory / driver / "workspace"
    own.mkdir(parents=True, mode=0o755)
    workspace.mkdir(mode=0o755)
    shipped = (SHIPPED / "run_python.toml").read_text()
    (own / "run_python.toml").write_text(re.sub(r"(?m)^isolation = .*$", f'isolation = ["{driver}"]', shipped))
    options = ["serve", "--profiles-dir", str(own), "--workspace", str(workspace)]
    options += ["--state-dir", str(directory / driver / "state")]
    names = ("GLOVEBOX_", "XDG_", "DOCKER_")
    environment = {name: value for name, value in os.environ.items() if name.startswith(names)}
    return StdioServerParameters(command=str(GLOVEBOX), args=options, env=environment)


async def measure(rounds: int, drivers: list[str], console: Console) -> list[Row]:
    """Every way in turn, ``rounds`` times."""
    with tempfile.TemporaryDirectory(prefix="glovebox-bench-") as scratch:
        directory = Path(scratch)
        directory.chmod(0o755)  # as root, sandboxes run as another user
        async with AsyncExitStack() as stack:
            ways: dict[str, Once] = {"bare": bare}
            for driver in drivers:
                client = await stack.enter_async_context(Client(server(directory, driver)))
                ways[driver] = calling(client, driver)
            taken: dict[str, list[float]] = {name: [] for name in ways}
            for number in track(range(WARM_UP + rounds), "Measuring", console=console, transient=True):
                for name, once in ways.items():
                    began = time.perf_counter()
                    await once()
                    if number >= WARM_UP:
                        taken[name].append((time.perf_counter() - began) * 1000)
    base = statistics.median(taken["bare"])
    return [
        Row(
            name=name,
            p50_ms=round(statistics.median(times), 2),
            p95_ms=round(statistics.quantiles(times, n=20)[-1], 2),
            ratio=round(statistics.median(times) / base, 2),
            bound=BOUNDS.get(name),
        )
        for name, times in taken.items()
    ]


def machine(drivers: dict[str, str]) -> dict[str, str]:
    """What the numbers belong to."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    python = subprocess.run([PYTHON, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    return {
        "processor": f"{os.cpu_count()} × {model[1] if model else platform.machine()}",
        "kernel": f"{platform.system()} {platform.release()}",
        "bare": f"{PYTHON} {python}",
        "server": f"glovebox {version('glovebox-mcp')}, mcp {version('mcp')}, Python {platform.python_version()}",
        **{name: found for name, found in drivers.items() if name in BOUNDS},
    }


def show(rows: list[Row], facts: dict[str, str], rounds: int, console: Console) -> None:
    """The table, and under it what it belongs to."""
    table = Table(title=f"{CODE}, {rounds} interleaved rounds, whole calls over stdio", title_justify="left")
    for title in ("", "p50 ms", "p95 ms", "× bare", "at most"):
        table.add_column(title, justify="left" if not title else "right")
    for row in rows:
        fine = row.bound is None or row.ratio <= row.bound
        ratio = f"[{'green' if fine else 'red'}]{row.ratio:.2f}[/]"
        bound = "" if row.bound is None else f"{row.bound:g}"
        table.add_row(row.name, f"{row.p50_ms:.1f}", f"{row.p95_ms:.1f}", ratio, bound)
    console.print(table)
    for name, fact in facts.items():
        console.print(f"[dim]{name:11} {fact}[/]", highlight=False)


def main() -> int:
    """Measure, show, and say whether every bound holds."""
    options = argparse.ArgumentParser(prog="make bench", description=__doc__)
    options.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there, too")
    options.add_argument("--rounds", type=int, default=ROUNDS)
    chosen = options.parse_args()
    console = Console()
    drivers = anyio.run(usable)
    rows = anyio.run(measure, chosen.rounds, [name for name in BOUNDS if name in drivers], console)
    facts = machine(drivers)
    show(rows, facts, chosen.rounds, console)
    if chosen.json:
        report = {"code": CODE, "rounds": chosen.rounds, "machine": facts, "rows": [asdict(row) for row in rows]}
        chosen.json.write_text(json.dumps(report, indent=2) + "\n")
    missing = [name for name in BOUNDS if name not in drivers]
    if missing:
        console.print(f"[yellow]Not measured: {', '.join(missing)}; `glovebox doctor` says why.[/]")
    return int(any(row.bound is not None and row.ratio > row.bound for row in rows))


if __name__ == "__main__":
    sys.exit(main())
