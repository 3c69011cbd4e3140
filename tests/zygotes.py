"""A real zygote and what is forked from it: helpers for tests of what forks of one process do and do not share."""

import json
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
from tests import leftovers

from glovebox_sandboxes.conformance.case import LIMITS
from glovebox_sandboxes.conformance.trial import processes
from glovebox_sandboxes.contract.base import Driver, Plan, Source
from glovebox_sandboxes.contract.outcome import Job, Outcome
from glovebox_sandboxes.contract.spec import WORKSPACE, Mount, SandboxSpec
from glovebox_sandboxes.drivers import registry
from glovebox_sandboxes.session import run
from glovebox_sandboxes.session.run import AttestedSandbox
from glovebox_server.settings import Settings


async def _refuse(_name: str, _size: int) -> None:
    return None


async def outcome_of(proved: AttestedSandbox, code: str, printed: Callable[[bytes], None] | None = None) -> Outcome:
    """Run a program in a sandbox that is ready."""
    job = Job(kind="python", payload={"code": code})
    return await run.run(proved, job, inputs=(), hooks=run.Hooks(file=_refuse, printed=printed))


async def answer(proved: AttestedSandbox, code: str) -> Any:
    """What a program printed as JSON."""
    found = await outcome_of(proved, code)
    assert found.ended == "exited", (found, found.stderr.text)
    assert found.code == 0, found.stderr.text
    return json.loads(found.stdout.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forks:
    """A zygote."""

    driver: Driver
    plan: Plan
    source: Source
    pid: int
    """Its process on the host."""

    @asynccontextmanager
    async def one(self) -> AsyncIterator[AttestedSandbox]:
        """A sandbox of its own, as it was planned."""
        async with self.source.open() as sandbox:
            proved = await run.prove(sandbox, self.plan)
            assert proved.attestation.differences == ()
            yield proved

    async def answer(self, code: str) -> Any:
        """What a program printed as JSON, in a sandbox of its own."""
        async with self.one() as proved:
            return await answer(proved, code)

    @asynccontextmanager
    async def busy(self, code: str) -> AsyncIterator[tuple[AttestedSandbox, Any]]:
        """A sandbox whose program has printed a line of JSON and goes on, for the length of the block."""
        text = bytearray()
        spoke = anyio.Event()

        def printed(data: bytes) -> None:
            text.extend(data)
            if b"\n" in text:
                spoke.set()

        async with self.one() as proved, anyio.create_task_group() as tasks:
            tasks.start_soon(outcome_of, proved, code, printed)
            with anyio.fail_after(leftovers.PATIENCE):
                await spoke.wait()
            yield proved, json.loads(text.partition(b"\n")[0])
            tasks.cancel_scope.cancel()


def plan_of(driver: Driver, workspace: Path, *, preload: tuple[str, ...] = (), before: str = "") -> Plan:
    """A plan whose zygote imports these.

    Args:
        driver: bubblewrap.
        workspace: directory to mount; modules in it can be preloaded.
        preload: modules.
        before: statements the zygote runs before it begins; ``zygote`` is its module. This is how a guard is left out.
    """
    spec = SandboxSpec(
        limits=replace(LIMITS, pids=64),
        mounts=(Mount(source=str(workspace), target=WORKSPACE),),
        output=True,
        inputs=True,
        preload=preload,
    )
    plan = driver.plan(spec)
    *argv, start, config = plan.action["zygote"]
    changed = json.loads(config)
    changed["path"].append(WORKSPACE)
    start = start.replace("; main()", f"; from _glovebox_guest import zygote; {before or 'pass'}; main()")
    assert "; main()" in start
    return replace(plan, action={**plan.action, "zygote": [*argv, start, json.dumps(changed)]})


@asynccontextmanager
async def zygote(
    workspace: Path, *, preload: tuple[str, ...] = (), before: str = "", name: str = "zygote"
) -> AsyncIterator[Forks]:
    """A driver and one zygote, for the length of the block."""
    async with AsyncExitStack() as stack:
        available = await stack.enter_async_context(registry.opened(Settings().data_dir, f"{name}{os.getpid()}"))
        driver = await available.get("bubblewrap")
        plan = plan_of(driver, workspace, preload=preload, before=before)
        known = set(running(os.getpid()))
        source = await stack.enter_async_context(driver.source(plan))
        (pid,) = set(running(os.getpid())) - known
        yield Forks(driver=driver, plan=plan, source=source, pid=pid)


def running(server: int) -> list[int]:
    """Zygotes below a process: neither what starts them nor what they forked."""
    found = [each for each in leftovers.family(server) if b"guest.zygote" in _command(each.pid)]
    numbers = {each.pid for each in found}
    tops = [each for each in found if each.parent not in numbers]
    # bwrap's own command line holds the guest's: the zygote is its child.
    below = [each.pid for each in found if each.parent in {top.pid for top in tops if top.name == "bwrap"}]
    return below or [each.pid for each in tops]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def inside(proved: AttestedSandbox) -> list[int]:
    """Numbers on the host of the processes of a sandbox."""
    found = processes(proved.measured.namespaces)
    return sorted(int(match[1]) for line in found if (match := re.match(r"process (\d+):", line)))


def descriptors(pid: int) -> Mapping[str, str]:
    """What a process has open, by number."""
    return {each.name: str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()}


def holds(pid: int, needle: bytes) -> int:
    """How often bytes occur in a process's memory; see proc_pid_mem(5)."""
    count = 0
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in maps:
            where, rights, *_ = line.split()
            if not rights.startswith("rw"):
                continue
            first, last = (int(each, 16) for each in where.split("-"))
            try:
                memory.seek(first)
                count += memory.read(last - first).count(needle)
            except (OSError, ValueError, OverflowError):
                continue  # the kernel's own pages
    return count
