"""Helpers for tests that run programs in real containers."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio

import docker
from glovebox_sandboxes.contract.base import Plan, SandboxStats
from glovebox_sandboxes.contract.measure import Difference
from glovebox_sandboxes.contract.outcome import Job, Outcome
from glovebox_sandboxes.contract.spec import Limits, Mount, SandboxSpec
from glovebox_sandboxes.drivers.docker.driver import OWNER_LABEL, SANDBOX_LABEL, DockerDriver, DockerSandbox
from glovebox_sandboxes.drivers.docker.engine import host_from_environment
from glovebox_sandboxes.session import run

#: Real seconds a test waits for something that takes well below one.
PATIENCE = 20
MIB = 2**20


def limits(**changes: int) -> Limits:
    """Small limits, with some of them changed."""
    small = Limits(
        wall_seconds=20,
        cpu_seconds=10,
        memory_bytes=128 * MIB,
        pids=32,
        scratch_bytes=8 * MIB,
        output_bytes=4 * MIB,
        output_files=8,
        stream_bytes=64 * 2**10,
    )
    return replace(small, **changes)


def spec(workspace: Path | None = None, **changes: int) -> SandboxSpec:
    """A sandbox with output and inputs, and the workspace if there is one."""
    mounts = (Mount(source=str(workspace), target="/workspace"),) if workspace else ()
    return SandboxSpec(limits=limits(**changes), mounts=mounts, output=True, inputs=True)


async def no_files(name: str, size: int) -> None:
    """Refuse every output file."""


async def program(
    driver: DockerDriver, code: str, plan: Plan | None = None
) -> tuple[Outcome, SandboxStats, tuple[Difference, ...]]:
    """Run one Python program as a call would."""
    plan = plan or driver.plan(spec())
    async with driver.open(plan) as sandbox:
        proved = await run.prove(sandbox, plan)
        job = Job(kind="python", payload={"code": code})
        outcome = await run.run(proved, job, inputs=[], hooks=run.Hooks(file=no_files))
        return outcome, await sandbox.stats(), proved.attestation.differences


def instead_of_guest(plan: Plan, argv: Sequence[str], change: Callable[[dict[str, Any]], object] | None = None) -> Plan:
    """The same container with another program in the guest's place; ``change`` may alter its HostConfig."""
    host = dict(plan.action["HostConfig"])
    if change is not None:
        change(host)
    return replace(plan, action={**plan.action, "Entrypoint": list(argv), "HostConfig": host})


@asynccontextmanager
async def python(driver: DockerDriver, code: str, plan: Plan | None = None) -> AsyncIterator[DockerSandbox]:
    """A container whose process 1 is plain Python running ``code``."""
    alone = instead_of_guest(plan or driver.plan(spec()), ["/usr/bin/python3", "-I", "-c", code])
    async with driver.open(alone) as sandbox:
        yield sandbox


async def read_all(sandbox: DockerSandbox) -> str:
    """Everything the container prints until it ends."""
    text = b""
    with anyio.fail_after(PATIENCE):
        while True:
            try:
                text += await sandbox.channel.receive()
            except anyio.EndOfStream:
                return text.decode()


def client() -> Any:
    """The SDK's client, to look from outside at what the driver did."""
    return docker.APIClient(base_url=host_from_environment(), version="auto", timeout=PATIENCE)


def sandboxes(driver: DockerDriver | None = None) -> set[str]:
    """Ids of all sandboxes that are containers now, running or not; of all servers, or of one driver."""
    label = SANDBOX_LABEL if driver is None else f"{OWNER_LABEL}={mark(driver)}"
    with client() as api:
        return {each["Labels"][SANDBOX_LABEL] for each in api.containers(all=True, filters={"label": label})}


def mark(driver: DockerDriver) -> str:
    """What tells a driver's containers from those of every other."""
    if driver._connection is None:
        raise TypeError("the driver is not connected")
    return driver._connection.mark


def wait_until_removed(names: Sequence[str]) -> None:
    """Return once the Engine has removed these containers; at most PATIENCE seconds."""
    left = set(names)
    with client() as api:
        now = int(time.time())
        # Told from the past too, so a removal that was faster than this question is not missed.
        told = api.events(
            since=now - PATIENCE,
            until=now + PATIENCE,
            filters={"type": "container", "event": "destroy"},
            decode=True,
        )
        for event in told:
            left.discard(event["Actor"]["Attributes"]["name"])
            if not left:
                told.close()
                return
    raise AssertionError(f"still there: {left}")
