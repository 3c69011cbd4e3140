"""How long a whole call of ``print(1)`` takes in each system: in turns, so that a slow moment falls on all alike."""

import shutil
import statistics
import subprocess  # noqa: TID251 - the bare interpreter is what the others are measured against
import time
from collections.abc import Sequence
from pathlib import Path

from tests.comparison.own import Glovebox
from tests.comparison.systems import PYTHON, System, owned

from glovebox_sandboxes.conformance import host
from glovebox_sandboxes.conformance.case import LIMITS

ROUNDS = 10  # it is there to tell tenths of a second from seconds, and is no benchmark
BARE = "/usr/bin/python3"
"""Of the system, as in the controls: others on the PATH may be shell scripts that look for one."""
PROGRAM = "print(1)"


async def medians(systems: Sequence[System], folder: Path) -> dict[str, int]:
    """Milliseconds for each system by its key, and under ``python3`` for the bare interpreter."""
    times: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        times.setdefault("python3", []).append(_bare())
        for system in systems:
            times.setdefault(system.key, []).append(await _once(system, folder / f"scratch-{system.key}"))
    return {key: round(statistics.median(found) * 1000) for key, found in times.items()}


def _bare() -> float:
    began = time.perf_counter()
    subprocess.run([BARE, *PYTHON[1:], PROGRAM], check=True, capture_output=True)
    return time.perf_counter() - began


async def _once(system: System, scratch: Path) -> float:
    async with host.planted() as planted:
        owned(scratch)
        began = time.perf_counter()
        seen = await system.run(PROGRAM, LIMITS, planted, scratch=scratch)
        # Not what is looked for after a call, but the call. Of our own drivers the guest knows only its inner part.
        took = time.perf_counter() - began if isinstance(system, Glovebox) else seen.seconds
        shutil.rmtree(scratch, ignore_errors=True)
    if "1" not in seen.stdout:
        raise RuntimeError(f"{system.key} did not run {PROGRAM}: {seen}")
    return took
