"""Starts one sandbox on a new runtime or mechanism: only a trial finds what is lacking inside.

Knows drivers by their contract alone.
"""

from collections.abc import Sequence
from pathlib import Path

import anyio

from glovebox_sandboxes.contract.attestation import describe
from glovebox_sandboxes.contract.base import DEFAULT, Driver, Limits, SandboxSpec
from glovebox_sandboxes.contract.errors import SandboxError, UnsupportedSpecError
from glovebox_sandboxes.runtime.environments import Environment
from glovebox_sandboxes.runtime.runtime import Runtime
from glovebox_sandboxes.session import connection

_LIMITS = Limits(
    wall_seconds=30, cpu_seconds=30, memory_bytes=1024**3, pids=32, scratch_bytes=16 * 1024**2,
    output_bytes=0, output_files=0, stream_bytes=0,
)  # fmt: skip
_FIX = (
    "Install the distribution's own Python (3.11 or newer) as /usr/bin/python3, or make Glovebox's environment from "
    "another Python, and run `glovebox setup` again."
)


async def find_trouble(driver: Driver, environment: str = DEFAULT, modules: Sequence[str] = ()) -> str:
    """Return why no sandbox starts as planned with these modules imported, in one line; empty if one does."""
    try:
        plan = driver.plan(SandboxSpec(limits=_LIMITS, environment=environment, preload=tuple(modules)))
        async with driver.open(plan) as sandbox:
            return describe((await connection.attest(sandbox, plan)).attestation.differences)
    except (SandboxError, UnsupportedSpecError) as problem:
        # Of an import the last line names what is missing; what runsc says first, as in a panic, may be what counts.
        return " ".join(problem.reason.strip().splitlines()[-1 if modules else 0 :])


async def check(driver: Driver, built: Runtime, python: Path, environment: Environment) -> None:
    """Start a sandbox that imports every package of an environment; invalidate its runtime if that fails.

    The runtime was built from ``python``. If the driver is unusable, `glovebox doctor` says why.

    Raises:
        SandboxError: no sandbox can run it, or a package cannot be imported; names which.
    """
    if not driver.capabilities.usable:
        return
    trouble = await find_trouble(driver, environment.name, environment.modules)
    if not trouble:
        return
    # The next set-up builds anew, and until then every call is refused for the missing runtime.
    await anyio.Path(built.root.parent / "manifest.json").unlink(missing_ok=True)
    if without := await find_trouble(driver, environment.name):
        raise SandboxError(f"No sandbox can run what was built from {python}", without.rstrip("."), _FIX)
    for module in () if trouble.startswith(tuple(f"{name}: " for name in environment.modules)) else environment.modules:
        if alone := await find_trouble(driver, environment.name, (module,)):  # it ended Python without an exception
            trouble = f"{module}: {alone}"
            break
    fix = (
        f"Install what it lacks on this host, or change {environment.path} and run "
        f"`glovebox environment update {environment.name}`; then run `glovebox setup --environment {environment.name}`."
    )
    if environment.shipped:
        fix = f"Install what it lacks on this host; then run `glovebox setup --environment {environment.name}`."
    raise SandboxError(f"An import of the environment {environment.name} failed", trouble.rstrip("."), fix)
