"""``python -m tests.perf.attestation``: what the host's look and the receipt add to a call, by pairs of whole calls.

A pair is one call with both, and one in which the host does not look and the last record is written alone; which comes
first alternates. What they add is the median of the pairs' differences, with the interval in which it lies at 95 %: of
elapsed time, and of the server's own processor time, which other work on the machine touches less. No bound: the noise
of a shared machine is as large as what is measured.
"""

import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
from rich.console import Console
from tests.fixtures.brokered import profile, submitted

from glovebox_sandboxes.host.host_view import HostView, unseen
from glovebox_sandboxes.host.process import ProcessSandbox
from glovebox_server import app as apps
from glovebox_server.app import App
from glovebox_server.receipts.recorder import CallRecorder, Receipt, TerminalEvent
from glovebox_server.settings import Settings

PAIRS = 300
WARM_UP = 5


async def once(app: App) -> tuple[float, float]:
    """Milliseconds of one call: elapsed, and of the server's processor time in all its threads."""
    began, worked = time.perf_counter(), time.process_time()
    await submitted(app, "run_python", {"code": "1"})
    return (time.perf_counter() - began) * 1000, (time.process_time() - worked) * 1000


async def blind(_sandbox: ProcessSandbox) -> HostView:
    """No look at the sandbox."""
    return unseen("left out")


async def plain(recorder: CallRecorder, last: TerminalEvent) -> Receipt:
    """The last record, and no receipt."""
    await recorder.record(last)
    return Receipt(uri="", digest="", head=recorder.head)


async def timed(parts: dict[str, list[float]], name: str, action: Callable[..., Any], *arguments: Any) -> Any:
    """One step of a call, its time kept."""
    began = time.perf_counter()
    done = await action(*arguments)
    parts.setdefault(name, []).append((time.perf_counter() - began) * 1000)
    return done


def added(full: list[float], bare: list[float]) -> str:
    """The median difference of pairs, and the order statistics between which the true one lies at 95 %."""
    differences = sorted(one - other for one, other in zip(full, bare, strict=True))
    middle, reach = len(differences) / 2, 0.98 * math.sqrt(len(differences))
    low, high = (
        differences[max(0, math.floor(middle - reach))],
        differences[min(len(differences), math.ceil(middle + reach)) - 1],
    )
    return f"{statistics.median(differences):+.2f} ms ({low:+.2f} to {high:+.2f})"


async def main() -> None:
    """Measure and print."""
    console = Console()
    look, finish = ProcessSandbox.host_view, CallRecorder.finish
    parts: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        directory.chmod(0o755)
        (directory / "profiles").mkdir()
        (directory / "workspace").mkdir(mode=0o755)
        (directory / "profiles" / "run_python.toml").write_text(profile("run_python", "bubblewrap"))
        settings = Settings(
            workspace=directory / "workspace", profiles_dir=directory / "profiles", state_dir=directory / "state"
        )
        async with apps.opened(settings, "cli") as app:
            taken: dict[str, list[float]] = {"with": [], "without": []}
            worked: dict[str, list[float]] = {"with": [], "without": []}
            for number in range(WARM_UP + PAIRS):
                for name in sorted(taken, reverse=bool(number % 2)):
                    full = name == "with"

                    async def see(sandbox: ProcessSandbox, *, full: bool = full) -> HostView:
                        found: HostView = await timed(parts, f"look {name}", look if full else blind, sandbox)  # noqa: B023
                        return found

                    async def end(recorder: CallRecorder, last: TerminalEvent, *, full: bool = full) -> Receipt:
                        found: Receipt = await timed(parts, f"end {name}", finish if full else plain, recorder, last)  # noqa: B023
                        return found

                    with (
                        mock.patch.object(ProcessSandbox, "host_view", see),
                        mock.patch.object(CallRecorder, "finish", end),
                    ):
                        elapsed, own = await once(app)
                    if number >= WARM_UP:
                        taken[name].append(elapsed)
                        worked[name].append(own)
    for what, each in (("elapsed", taken), ("processor", worked)):
        console.print(f"added, {what:9} {added(each['with'], each['without'])}")
    calls = {f"{what} {name}": times[name] for what, times in (("call", taken), ("cpu", worked)) for name in times}
    for name, times in {**calls, **parts}.items():
        console.print(
            f"{name:14} p50 {statistics.median(times):6.2f} ms, p95 {statistics.quantiles(times, n=20)[-1]:6.2f}"
        )


if __name__ == "__main__":
    anyio.run(main)
