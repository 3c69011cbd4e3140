"""A server to be killed: opens containers, tells their names, and waits for its end.

Usage: python -m tests.docker_victim running|created [without-janitor]
"""

import sys

import anyio
from tests.docker_sandboxes import spec

from glovebox_sandboxes.drivers.docker.driver import DockerDriver
from glovebox_sandboxes.drivers.docker.engine import Engine
from glovebox_sandboxes.drivers.docker.janitor import Janitor

COUNT = 3
"""Containers open at the moment of death."""


async def tell_and_wait(_: Engine, name: str) -> None:
    """In place of starting a container."""
    sys.stdout.write(f"{name}\n")
    sys.stdout.flush()
    await anyio.sleep_forever()


async def no_janitor(_: Janitor) -> None:
    """In place of starting the janitor."""


async def hold(driver: DockerDriver) -> None:
    """Open a container and stay in it."""
    async with driver.open(driver.plan(spec())) as sandbox:
        await tell_and_wait(driver, f"glovebox-{sandbox.id}")  # type: ignore[arg-type]


async def main() -> None:
    """See the module."""
    if "created" in sys.argv:
        Engine.start = tell_and_wait  # type: ignore[method-assign, assignment]
    if "without-janitor" in sys.argv:
        Janitor.start = no_janitor  # type: ignore[method-assign, assignment]
    async with DockerDriver.connect() as driver, anyio.create_task_group() as tasks:
        for _ in range(COUNT):
            tasks.start_soon(hold, driver)


if __name__ == "__main__":
    anyio.run(main)
