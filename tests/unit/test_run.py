"""How a job ended, by the strongest evidence; and a job in a sandbox that does not behave. No real sandbox."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import pytest
from tests.fixtures.channels import OUTCOME, READY, Channel, Guest, Weightless

from glovebox_sandboxes.contract.base import Limits, Plan, SandboxSpec, SandboxStats
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.contract.measure import Expected
from glovebox_sandboxes.contract.outcome import Ended, Job, Outcome
from glovebox_sandboxes.host.host_view import HostView, unseen
from glovebox_sandboxes.session import connection
from glovebox_sandboxes.session import run as running
from glovebox_sandboxes.session.connection import AttestedSandbox, GuestOutcome, attest
from glovebox_sandboxes.session.run import Hooks, run

LIMITS = Limits(
    wall_seconds=2.5, cpu_seconds=4, memory_bytes=512 * 2**20, pids=64, scratch_bytes=2**20, output_bytes=2**20,
    output_files=8, stream_bytes=2**14,
)  # fmt: skip
PLAN = Plan(
    driver="fake",
    level="namespaces",
    spec=SandboxSpec(limits=LIMITS),
    action={},
    expected=Expected(uid=65532, interfaces=("lo",), writable=(), mounts=(), namespaces=()),
    rlimits=("memory_bytes",),
)
JOB = Job(kind="python", payload={"code": "1"})
OOM = SandboxStats(out_of_memory=True)
QUIET = SandboxStats()
MEMORY_ERROR = {"error": {"type": "MemoryError", "message": "", "line": 1}}


def told(**changes: Any) -> GuestOutcome:
    """A guest's outcome with these changes."""
    return GuestOutcome.model_validate({**OUTCOME, **changes})


@pytest.mark.parametrize(
    ("guest", "facts", "value", "ended", "code", "words"),
    [
        (told(), QUIET, None, "exited", 0, ""),
        (told(status=3), QUIET, None, "exited", 3, ""),
        (told(status=1), QUIET, {"error": {"type": "ValueError"}}, "exited", 1, ""),
        (told(status=1), QUIET, MEMORY_ERROR, "out_of_memory", 1, "more than the 512 MiB"),
        (told(status=0), QUIET, MEMORY_ERROR, "exited", 0, ""),
        (told(status=1), QUIET, {"error": ["MemoryError"]}, "exited", 1, ""),
        (told(status=1), QUIET, ["error"], "exited", 1, ""),
        (told(stopped="time", status=-9), QUIET, None, "timed_out", None, "after 2.5 seconds"),
        (told(stopped="time", status=-9), OOM, None, "timed_out", None, "after 2.5 seconds"),
        (told(stopped="output", status=-9), QUIET, None, "limit", None, "printed more than 4 MiB"),
        (told(status=-11), QUIET, None, "signalled", 11, "signal 11"),
        (told(status=-9), QUIET, None, "signalled", 9, "signal 9"),
        (told(status=-9), OOM, None, "out_of_memory", None, "more than the 512 MiB"),
        (told(status=-11), OOM, None, "signalled", 11, "signal 11"),
        (told(status=-24), QUIET, None, "limit", None, "more than 4 seconds of processor time"),
        (told(status=-9, cpu_ms=4000.0), QUIET, None, "limit", None, "processor time"),
        (told(status=-9, cpu_ms=3999.0), QUIET, None, "signalled", 9, "signal 9"),
        (told(status=0), OOM, None, "exited", 0, ""),  # a child of the program died, the program coped
        (None, QUIET, None, "timed_out", None, "after 2.5 seconds"),
        (None, OOM, None, "out_of_memory", None, "more than the 512 MiB"),
    ],
)
def test_how_it_ended(
    *, guest: GuestOutcome | None, facts: SandboxStats, value: Any, ended: Ended, code: int | None, words: str
) -> None:
    """Every row of the table: the kernel's word, the clock's, then the guest's, and the program's about itself."""
    found = running._ending(PLAN, guest, facts, LIMITS.wall_seconds, value)
    assert found[:2] == (ended, code)
    assert words in found[2]
    assert (found[2] == "") == (ended == "exited")


def test_a_program_cannot_say_that_the_kernel_found_no_memory_for_it() -> None:
    """F9: with control groups the kernel's word counts alone. The control is above: limits per process."""
    grouped = replace(PLAN, rlimits=("pids",))
    for facts, ended in ((QUIET, "exited"), (OOM, "out_of_memory")):
        assert running._ending(grouped, told(status=1), facts, 2.5, MEMORY_ERROR)[:2] == (ended, 1)


class Sandbox(Weightless):
    """A sandbox that is a channel."""

    id = "s1"

    def __init__(self, facts: SandboxStats = QUIET) -> None:
        self.channel = Channel()
        self.killed = 0
        self._facts = facts

    def cpu_seconds(self) -> float | None:
        """What the kernel has counted."""
        return self._facts.cpu_seconds

    async def kill(self) -> None:
        """Count, and close the guest's end."""
        self.killed += 1
        self.channel.to_host.close()

    async def stats(self) -> SandboxStats:
        """What the host saw."""
        return self._facts

    async def host_view(self) -> HostView:
        """Nothing: there is no process."""
        return unseen("there is no process")


@asynccontextmanager
async def guarded(sandbox: Sandbox, script: Callable[[Guest], Awaitable[None]]) -> AsyncIterator[AttestedSandbox]:
    """A sandbox that is ready, with a guest that runs ``script`` when it has its job."""

    async def guest() -> None:
        with_wire = Guest(sandbox.channel)
        try:
            await with_wire.start()
            await script(with_wire)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream):
            return

    problem: Exception | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(guest)
        try:
            yield await attest(sandbox, PLAN)
        except Exception as raised:  # noqa: BLE001 - raised again below, outside of the group
            problem = raised
        tasks.cancel_scope.cancel()
    await sandbox.channel.aclose()
    if problem is not None:
        raise problem


async def outcome_of(script: Callable[[Guest], Awaitable[None]], sandbox: Sandbox | None = None) -> Outcome:
    """One job, with hooks that take nothing."""
    sandbox = sandbox or Sandbox()

    async with guarded(sandbox, script) as proved:
        return await run(proved, JOB, inputs=(), hooks=Hooks(file=_refuse))


async def test_a_job_carries_its_limits() -> None:
    """Those a process of the guest's must set for itself, and no others."""
    jobs: list[Any] = []
    sandbox = Sandbox()

    async def guest(channel: Channel) -> None:
        end = Guest(channel)
        await end.say(end.wire.message("ready", READY))
        jobs.extend(await end.hear())
        await end.done()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(guest, sandbox.channel)
        proved = await attest(sandbox, PLAN)
        job = Job(kind="python", payload={"code": "1"}, wall_seconds=1.5)
        await run(proved, job, inputs=(), hooks=Hooks(file=_refuse))
    await sandbox.channel.aclose()
    assert jobs[0][2]["body"]["limits"] == {
        "wall_seconds": 1.5, "cpu_seconds": 4, "output_bytes": 2**20, "output_files": 8, "memory_bytes": 512 * 2**20,
        "printed_bytes": 256 * 2**14,
    }  # fmt: skip


async def _refuse(_name: str, _size: int) -> None:
    return None


async def test_a_guest_that_says_nothing_more_is_ended_by_the_hosts_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall time and the grace are the host's: the sandbox is killed, what was printed is kept."""
    monkeypatch.setattr(running, "GRACE_SECONDS", -2.3)
    sandbox = Sandbox()

    async def script(guest: Guest) -> None:
        stream, frames = guest.wire.open("stdout", {})
        await guest.say(frames + guest.wire.data(stream, b"so far"))
        await anyio.sleep_forever()

    outcome = await outcome_of(script, sandbox)
    assert (outcome.ended, outcome.stdout.text, sandbox.killed) == ("timed_out", "so far", 1)


async def test_a_sandbox_that_died_of_its_memory_limit_is_an_outcome() -> None:
    """The program's doing. Otherwise it is our failure, never a program's end, with the runtime's last words."""

    async def script(guest: Guest) -> None:
        guest.channel.to_host.close()

    assert (await outcome_of(script, Sandbox(OOM))).ended == "out_of_memory"
    with pytest.raises(SandboxError, match="out of file descriptors"):
        await outcome_of(script, Sandbox(SandboxStats(detail="out of file descriptors")))


async def test_many_streams_of_one_kind_are_one_bounded_stream() -> None:
    """A guest that opens a thousand standard outputs and results gains nothing by it."""

    async def script(guest: Guest) -> None:
        for n in range(1000):
            for kind in ("stdout", "result", "unknown", "file"):
                stream, frames = guest.wire.open(kind, {"n": n})
                frames += guest.wire.data(stream, bytes([65 + n % 26]) * 1000) + guest.wire.end(stream)
                await guest.say(frames)
            while guest.channel.to_host.statistics().current_buffer_used:
                await anyio.lowlevel.checkpoint()
            with anyio.move_on_after(0):
                await guest.hear()
        await guest.done()

    outcome = await outcome_of(script)
    assert outcome.stdout.total_bytes == 1_000_000
    assert outcome.stdout.dropped_bytes == 1_000_000 - LIMITS.stream_bytes
    assert outcome.value is None


@pytest.mark.parametrize(
    "meta", [{}, {"name": 1, "bytes": 1}, {"name": "a"}, {"name": "a", "bytes": True}, {"name": "a", "bytes": 1.0}]
)
async def test_a_file_without_name_and_size_is_refused(meta: dict[str, Any]) -> None:
    """It never reaches the store."""
    asked: list[str] = []

    async def file(name: str, _size: int) -> None:
        asked.append(name)

    async def script(guest: Guest) -> None:
        _, frames = guest.wire.open("file", meta)
        await guest.say(frames)
        while not any(event[0] == "reset" for event in await guest.hear()):
            continue
        await guest.done()

    sandbox = Sandbox()
    async with guarded(sandbox, script) as proved:
        await run(proved, JOB, inputs=(), hooks=Hooks(file=file))
    assert asked == []


async def test_a_guest_that_never_gets_ready_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded; and one that ends first is told with the runtime's words."""
    monkeypatch.setattr(connection, "READY_SECONDS", 0.05)
    sandbox = Sandbox()
    with pytest.raises(SandboxError, match="not ready after"):
        await attest(sandbox, PLAN)
    await sandbox.channel.aclose()
    sandbox = Sandbox(SandboxStats(detail="bwrap: no"))
    sandbox.channel.to_host.close()
    with pytest.raises(SandboxError, match="bwrap: no"):
        await attest(sandbox, PLAN)
    assert sandbox.killed == 1
    await sandbox.channel.aclose()


async def test_a_damaged_guest_is_one_sentence_with_the_command_that_mends_it() -> None:
    """Not its traceback: of that, what happened."""
    story = "Traceback (most recent call last):\n  File ...\nModuleNotFoundError: No module named 'wire'"
    sandbox = Sandbox(SandboxStats(detail=story))
    sandbox.channel.to_host.close()
    with pytest.raises(SandboxError) as raised:
        await attest(sandbox, PLAN)
    assert "\n" not in str(raised.value)
    assert "ended before it was ready (ModuleNotFoundError: No module named 'wire')" in raised.value.reason
    assert "`glovebox setup`" in raised.value.fix
    await sandbox.channel.aclose()
