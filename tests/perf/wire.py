"""How fast output comes through the wire, and what the host holds of it meanwhile: one job, no server around it."""

import re
import time
from pathlib import Path

import anyio
from tests.perf.series import Series

from glovebox_sandboxes.contract.base import Limits, SandboxSpec
from glovebox_sandboxes.contract.outcome import Job
from glovebox_sandboxes.drivers import registry
from glovebox_sandboxes.session.connection import attest
from glovebox_sandboxes.session.run import Hooks, run
from glovebox_server.settings import Settings

MIB = 32
WINDOW = 2**20  # bytes of one stream that may be on their way (sandboxes/_glovebox_guest/wire.py)
ROUNDS, QUICK_ROUNDS = 10, 3
WARM_UP = 2
_CODE = f"""
import os
piece = b"x" * 65536
for _ in range({MIB * 2**20 // 65536}):
    left = memoryview(piece)
    while left:
        left = left[os.write(1, left):]
"""
_LIMITS = Limits(
    wall_seconds=60, cpu_seconds=60, memory_bytes=512 * 2**20, pids=16, scratch_bytes=2**20, output_bytes=2**20,
    output_files=1, stream_bytes=256 * 1024,
)  # fmt: skip


class _Heard:
    """When the first and the last byte came, and how many."""

    def __init__(self) -> None:
        self.first = self.last = 0.0
        self.bytes = 0

    def __call__(self, data: bytes) -> None:
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.bytes += len(data)


async def _refused(_name: str, _size: int) -> None:
    return None


def _resident(field: str) -> int:
    """Of this process, in bytes; see proc_pid_status(5)."""
    found = re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


async def measured(rounds: int = ROUNDS, driver: str = "bubblewrap") -> dict[str, Series]:
    """Print 32 MiB in sandboxes, one after another."""
    rates: list[float] = []
    grown: list[float] = []
    async with registry.opened(Settings().data_dir, "bench") as available:
        found = await available.get(driver)
        plan = found.plan(SandboxSpec(limits=_LIMITS))
        for number in range(WARM_UP + rounds):
            async with found.open(plan) as sandbox:
                proved = await attest(sandbox, plan)
                # proc_pid_clear_refs(5): 5 has the peak begin again at what is resident now.
                await anyio.Path("/proc/self/clear_refs").write_text("5")
                before, heard = _resident("VmRSS"), _Heard()
                job = Job(kind="python", payload={"code": _CODE})
                outcome = await run(proved, job, inputs=(), hooks=Hooks(file=_refused, printed=heard))
                peak = _resident("VmHWM")
            if heard.bytes != MIB * 2**20 or outcome.ended != "exited":
                raise RuntimeError(f"{heard.bytes} bytes came; it ended by {outcome.ended}, {outcome.reason}")
            if number >= WARM_UP:
                rates.append(heard.bytes / 1e6 / (heard.last - heard.first))
                grown.append(max(0, peak - before) / WINDOW)
    note = f"{MIB} MiB of standard output, {driver}"
    return {
        "wire": Series(key="wire", what="rate", unit="MB/s", rounds=(tuple(rates),), note=note),
        "wire-memory": Series(
            key="wire-memory", what="peak above before", unit="windows", rounds=(tuple(grown),), note=note
        ),
    }
