"""Starts one sandbox on a runtime that was just built: what its Python cannot find inside, only trying tells.

Knows drivers by their contract alone.
"""

from pathlib import Path

import anyio

from glovebox_sandboxes.contract.base import Driver
from glovebox_sandboxes.contract.errors import SandboxUnavailable, UnsupportedSpec
from glovebox_sandboxes.contract.measure import describe
from glovebox_sandboxes.contract.spec import Limits, SandboxSpec
from glovebox_sandboxes.runtime.environments import Environment
from glovebox_sandboxes.runtime.packages import RuntimeProblem
from glovebox_sandboxes.runtime.runtime import Runtime
from glovebox_sandboxes.session import run

_LIMITS = Limits(
    wall_seconds=30, cpu_seconds=30, memory_bytes=1024**3, pids=32, scratch_bytes=16 * 1024**2,
    output_bytes=0, output_files=0, stream_bytes=0,
)  # fmt: skip
_FIX = (
    "Install the distribution's own Python (3.11 or newer) as /usr/bin/python3, or make Glovebox's environment from "
    "another Python, and run `glovebox setup` again."
)


async def check(driver: Driver, built: Runtime, python: Path, environment: Environment) -> None:
    """Start a sandbox that imports every package of an environment; take its runtime back if that fails.

    Args:
        driver: one that starts sandboxes on the runtime. Where it cannot be used at all, `glovebox doctor` says why.
        built: the runtime.
        python: the interpreter the runtime was built from.
        environment: whose runtime it is.

    Raises:
        RuntimeProblem: no sandbox can run it.
    """
    if not driver.capabilities.usable:
        return
    try:
        plan = driver.plan(SandboxSpec(limits=_LIMITS, environment=environment.name, preload=environment.modules))
        async with driver.open(plan) as sandbox:
            trouble = describe((await run.attest(sandbox, plan)).attestation.differences)
    except (SandboxUnavailable, UnsupportedSpec) as problem:
        # Of a traceback the last line: it names what is missing.
        trouble = problem.reason.strip().splitlines()[-1]
    if trouble:
        # The next set-up builds anew, and until then every call is told that there is nothing to run it.
        await anyio.Path(built.root.parent / "manifest.json").unlink(missing_ok=True)
        raise RuntimeProblem(f"No sandbox can run what was built from {python}", trouble.rstrip("."), _FIX)
