"""What every test may rely on: which sandbox drivers are here, and where the embedded runtime is.

A test marked ``driver("bubblewrap")`` or ``driver("docker")`` is skipped, with the reason, on a machine that cannot run
it. Where ``GLOVEBOX_MUST_RUN`` (names with commas between) names the driver, it fails instead. This comes before any
fixture: a skip that is raised inside of an event loop's portal would end the portal for the tests after it.
"""

import functools
import os
from pathlib import Path

import anyio
import pytest

from sandboxes import drivers, runtime
from sandboxes.docker import DockerDriver
from server.settings import Settings
from tests.must_run import GVISOR_DOCKER, NAMES, forbidden_to_skip, unusable


def pytest_configure() -> None:
    """Refuse a name that nothing asks for: misspelt, it would forbid nothing."""
    unknown = forbidden_to_skip() - NAMES
    if unknown:
        known = ", ".join(sorted(NAMES))
        raise pytest.UsageError(f"GLOVEBOX_MUST_RUN names {', '.join(sorted(unknown))}; there are: {known}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip or fail a test whose driver is not usable here, before any of its fixtures."""
    for marker in item.iter_markers("driver"):
        name = marker.args[0]
        reason = why_unusable(name)
        if reason:
            unusable(name, reason)


@functools.cache
def why_unusable(name: str) -> str:
    """What the driver's own probe misses on this machine; empty if it is usable. Asked once per run."""

    async def probe() -> str:
        if name == GVISOR_DOCKER:
            async with DockerDriver.connect("runsc") as engine:
                found = engine.capabilities
        else:
            async with drivers.opened(Settings().data_dir, f"tests{os.getpid()}") as available:
                found = (await available.get(name)).capabilities
        return (
            ""
            if found.usable
            else "; ".join(f"{each.what} ({each.fix})" for each in found.missing) or "no reason given"
        )

    return anyio.run(probe)


@pytest.fixture(scope="session")
def runtime_dir() -> Path:
    """The data directory with the embedded runtime and this version's guest; built now if `make test` did not."""
    data = Settings().data_dir
    anyio.run(runtime.build, data, lambda _: None)
    return data
