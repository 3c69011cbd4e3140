"""One job in one sandbox: prove the isolation, run, bound everything that comes out, say how it ended.

The same for every driver. Files and network connections are handed to the caller's callbacks as they come.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import anyio

from _glovebox_guest.measure import namespace_number
from glovebox_sandboxes.contract.attestation import Attestation, compare
from glovebox_sandboxes.contract.base import Plan, Sandbox, SandboxStats
from glovebox_sandboxes.contract.errors import SandboxError, UnsupportedSpecError
from glovebox_sandboxes.contract.measure import NAMESPACES, Measured, describe
from glovebox_sandboxes.contract.outcome import PATCH, Changes, CountedBy, Ended, Job, Outcome, SkippedFile, Usage
from glovebox_sandboxes.contract.spec import WORKSPACE, Limits
from glovebox_sandboxes.plural import counted
from glovebox_sandboxes.session.capture import HeadAndTail
from glovebox_sandboxes.session.connection import GuestConnection, GuestOutcome, Input, Serve, Sink
from glovebox_sandboxes.session.result import ResultReader

READY_SECONDS = 30.0
"""From start to ``ready``: well below a second, but for preloaded modules on a busy machine."""
GRACE_SECONDS = 5.0
"""After its wall time the guest stops the program and sends what there is; then the host ends the sandbox itself."""
PRINTED_FACTOR = 256
"""A program is stopped when it prints more than this many times what is kept of a stream."""

LOOK_SECONDS = 0.1
"""Between two looks at what a running job has used: with one processor to a sandbox, as much as it can be late."""

_DIGITS = 3
"""Of milliseconds: a clock shows more, and means nothing by it."""
_SIGXCPU = 24
_SIGKILL = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What the caller wants of a running job."""

    file: Callable[[str, int], Awaitable[Sink | None]]
    """Takes name and size of an output file; None refuses it."""
    cut_file: Callable[[str, int], Awaitable[Sink | None]] | None = None
    """Takes one whose end may be missing, where that is to be told apart."""
    serve: Serve | None = None
    """Serves one egress stream; None where the profile grants no network."""
    printed: Callable[[bytes], None] | None = None
    """Hears standard output as it comes."""


@functools.cache
def host_namespaces() -> Mapping[str, int]:
    """Inode numbers of the namespaces this process is in, see namespaces(7); it stays in them."""
    return {name: namespace_number(str(Path(f"/proc/self/ns/{name}").readlink())) for name in NAMESPACES}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttestedSandbox:
    """A sandbox whose guest is ready, and what was measured of it."""

    sandbox: Sandbox
    plan: Plan
    link: GuestConnection
    measured: Measured
    attestation: Attestation
    record: Any = None
    """What whoever uses it records of it (``Pool``'s ``describe``), made when it got ready."""

    def require_as_planned(self) -> None:
        """Refuse one whose isolation is not what was planned.

        Raises:
            SandboxError: names each field that differs.
        """
        if self.attestation.differences:
            raise SandboxError(
                "Proving a sandbox's isolation",
                f"it is not what was planned ({describe(self.attestation.differences)})",
                "Run `glovebox doctor`.",
            )


async def attest(sandbox: Sandbox, plan: Plan) -> AttestedSandbox:
    """Wait until the guest is ready; hold what it measured, and what the host sees of it, against the plan.

    Raises:
        SandboxError: it did not get ready.
    """
    link = GuestConnection(sandbox.channel)
    try:
        with anyio.fail_after(READY_SECONDS):
            measured = await link.ready()
    except TimeoutError:
        raise _unavailable(f"the guest was not ready after {READY_SECONDS:.0f} seconds") from None
    except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
        await sandbox.kill()
        facts = await sandbox.stats()
        if "Traceback" in facts.detail:  # our own guest's: its last line says what happened
            words = f"its Python ended before it was ready ({facts.detail.splitlines()[-1]})"
            fix = "Run `glovebox setup`, which repairs what was damaged; if it persists, run `glovebox doctor`."
            raise SandboxError("Starting a sandbox", words, fix) from None
        raise _unavailable(facts.detail or "the guest ended before it was ready") from None
    attestation = compare(plan.expected, measured, await sandbox.host_view(), host_namespaces())
    return AttestedSandbox(sandbox=sandbox, plan=plan, link=link, measured=measured, attestation=attestation)


async def run(proved: AttestedSandbox, job: Job, *, inputs: Sequence[Input], hooks: Hooks) -> Outcome:
    """Run one job to its end, or until its time is up.

    Raises:
        SandboxError: the sandbox died under the program, or broke the protocol.
        UnsupportedSpecError: the workspace cannot be copied within the limits; the program was not started.
    """
    sandbox, link, plan = proved.sandbox, proved.link, proved.plan
    limits = plan.spec.limits
    wall = min(limits.wall_seconds, job.wall_seconds or limits.wall_seconds)
    streams = _Streams(limits.stream_bytes, hooks, overlay=plan.spec.overlay)
    reported: GuestOutcome | None = None
    died = False
    started = anyio.current_time()
    with _Processor(sandbox, link, limits.cpu_seconds) as processor, anyio.move_on_after(wall + GRACE_SECONDS):
        try:
            reported = await link.run(_job_body(plan, job, wall, len(inputs)), inputs, streams.accept, hooks.serve)
        except anyio.EndOfStream:
            died = True
    elapsed = (anyio.current_time() - started) * 1000
    if reported is None:
        await sandbox.kill()
    facts = await sandbox.stats()
    cpu_ms, cpu_from = processor.spent(reported, facts)
    if died and not facts.out_of_memory:
        raise _unavailable(facts.detail or "the sandbox ended without an outcome")
    if reported is not None and reported.refused:
        raise _too_large(reported.refused)
    ended, code, reason = _ending(plan, reported, facts, wall, streams.result.value)
    if reported is None and processor.stopped and ended == "timed_out":
        ended, code, reason = "limit", None, _LIMITS["processor"](limits)
    return Outcome(
        ended=ended,
        code=code,
        reason=reason,
        stdout=streams.stdout.captured(),
        stderr=streams.stderr.captured(),
        value=streams.result.value,
        blobs=tuple(streams.result.blobs),
        shown=(*streams.result.shown, *streams.shown.shown),
        problems=(*streams.result.problems, *streams.shown.problems),
        skipped=_skipped(reported),
        changes=_changes(reported, plan),
        usage=Usage(
            wall_ms=round(reported.wall_ms if reported else elapsed, _DIGITS),
            cpu_ms=cpu_ms,
            memory_peak_bytes=facts.memory_peak_bytes or (reported.memory_peak_bytes if reported else 0),
            cpu_from=cpu_from,
            memory_from="group" if facts.memory_peak_bytes else "guest" if reported else "none",
        ),
    )


class _Processor:
    """Watches what a job spends of processor time while it runs, where the host's kernel counts it for the sandbox.

    The guest sees only processes that live or were waited for. What it and the sandbox's start have used before the job
    is not the job's.
    """

    def __init__(self, sandbox: Sandbox, link: GuestConnection, most: float) -> None:
        self._sandbox = sandbox
        self._link = link
        self._most = most
        self._before = sandbox.cpu_seconds()
        self._last = self._before
        self._timer: asyncio.TimerHandle | None = None
        self.stopped = False
        """Whether the guest was told to end the program."""

    def __enter__(self) -> Self:
        if self._before is not None:
            self._again()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _again(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        try:
            found = self._sandbox.cpu_seconds()
        except SandboxError:
            self._again()  # where it still cannot be read at the end, the call ends in that
            return
        if found is None or self._before is None:
            return
        self._last = found
        if found - self._before > self._most:
            self.stopped = True
            # A guest that does not, or cannot, is ended when its wall time is up.
            self._link.stop("processor")
        else:
            self._again()

    def spent(self, reported: GuestOutcome | None, facts: SandboxStats) -> tuple[float | None, CountedBy]:
        """Milliseconds, and who counted them."""
        found = self._last if facts.cpu_seconds is None else facts.cpu_seconds
        if found is not None and self._before is not None:
            return round((found - self._before) * 1000, _DIGITS), "group"
        return (None, "none") if reported is None else (round(reported.cpu_ms, _DIGITS), "guest")


def _too_large(reason: str) -> UnsupportedSpecError:
    fix = (
        "Raise limits.workspace in the profile, serve a smaller directory (--workspace), which sandboxes may read "
        '(as root: chmod -R o+rX), or use workspace = "read".'
    )
    return UnsupportedSpecError("files.workspace", f"the workspace cannot be copied: {reason}", fix)


def _skipped(reported: GuestOutcome | None) -> tuple[SkippedFile, ...]:
    if reported is None:
        return ()
    found = [SkippedFile(name=each.name, reason=each.reason, count=each.count) for each in reported.skipped]
    if reported.changes is not None:
        found += [
            SkippedFile(name=f"{WORKSPACE}/{each.name}", reason=each.reason, count=each.count)
            for each in reported.changes.skipped
        ]
    return tuple(found)


def _changes(reported: GuestOutcome | None, plan: Plan) -> Changes | None:
    if reported is None or reported.changes is None or not plan.spec.overlay:
        return None
    found = reported.changes
    return Changes(
        created=tuple(found.created),
        changed=tuple(found.changed),
        deleted=tuple(found.deleted),
        counts={str(kind): count for kind, count in found.counts.items()},
        patch=found.patch,
    )


def _job_body(plan: Plan, job: Job, wall: float, inputs: int) -> dict[str, Any]:
    limits = asdict(plan.spec.limits)
    per_process = ("cpu_seconds", "output_bytes", "output_files", *plan.rlimits)
    copied = ("workspace_bytes", "workspace_files") if plan.spec.overlay else ()
    guest = {name: limits[name] for name in (*per_process, *copied)}
    guest["wall_seconds"] = wall
    guest["printed_bytes"] = limits["stream_bytes"] * PRINTED_FACTOR
    body = {"kind": job.kind, "payload": dict(job.payload), "inputs": inputs, "limits": guest}
    return body | ({"environment": dict(job.environment)} if job.environment else {})


def _ending(
    plan: Plan, reported: GuestOutcome | None, facts: SandboxStats, wall: float, value: Any
) -> tuple[Ended, int | None, str]:
    """How it ended, by the strongest evidence first: the kernel's, the clock's, then the guest's."""
    limits = plan.spec.limits
    if reported is None:
        return _out_of_memory(limits, None) if facts.out_of_memory else _timed_out(limits, wall)
    if reported.stopped == "time":
        return _timed_out(limits, wall)
    if reported.stopped:
        return "limit", None, _LIMITS[reported.stopped](limits)
    if reported.status < 0:
        return _signalled(limits, reported, facts)
    if _lacked_memory(plan, reported, facts, value):
        return _out_of_memory(limits, reported.status)
    return "exited", reported.status, ""


def _lacked_memory(plan: Plan, reported: GuestOutcome, facts: SandboxStats, value: Any) -> bool:
    """Whether a program that ended by itself did so for want of memory."""
    error = value.get("error") if isinstance(value, dict) else None
    # A program can say so of itself as it likes. Where the limit holds per process there is no other witness.
    witness = facts.out_of_memory or "memory_bytes" in plan.rlimits
    if witness and reported.status == 1 and isinstance(error, dict) and error.get("type") == "MemoryError":
        return True
    # Where the kernel took what holds the program's memory (under gVisor), the program ends without a word.
    return reported.status != 0 and value is None and facts.out_of_memory


# What is said of a program that was stopped for a limit, by the guest's word for it.
_LIMITS: Mapping[str, Callable[[Limits], str]] = {
    "processor": lambda limits: (
        f"It used more than {counted(limits.cpu_seconds, 'second')} of processor time and was stopped."
    ),
    "output": lambda limits: (
        f"It printed more than {limits.stream_bytes * PRINTED_FACTOR // 2**20} MiB and was stopped."
    ),
}


def _signalled(limits: Limits, reported: GuestOutcome, facts: SandboxStats) -> tuple[Ended, int | None, str]:
    spent = reported.cpu_ms >= limits.cpu_seconds * 1000
    if reported.status == -_SIGXCPU or (reported.status == -_SIGKILL and spent):
        return "limit", None, _LIMITS["processor"](limits)
    if reported.status == -_SIGKILL and facts.out_of_memory:
        return _out_of_memory(limits, None)
    return "signalled", -reported.status, f"It was ended by signal {-reported.status}."


def _out_of_memory(limits: Limits, status: int | None) -> tuple[Ended, int | None, str]:
    return "out_of_memory", status, f"It needed more than the {limits.memory_bytes // 2**20} MiB of memory it may use."


def _timed_out(limits: Limits, wall: float) -> tuple[Ended, int | None, str]:
    most = f"; {counted(limits.wall_seconds, 'second')} are allowed" if wall < limits.wall_seconds else ""
    return "timed_out", None, f"It was still running after {counted(wall, 'second')} and was stopped{most}."


class _Streams:
    """The guest's one-way streams by kind."""

    def __init__(self, keep: int, hooks: Hooks, *, overlay: bool) -> None:
        self.stdout = HeadAndTail(keep)
        self.stderr = HeadAndTail(keep)
        self.result = ResultReader()
        self.shown = ResultReader()
        self._kept: Mapping[str, Callable[[bytes], None]] = {
            "stdout": self._heard,
            "stderr": self.stderr.feed,
            "result": self.result.feed,
            "shown": self.shown.feed,
        }
        self._hooks = hooks
        self._overlay = overlay

    async def accept(self, kind: str, meta: Mapping[str, Any]) -> Sink | None:
        if kind in self._kept:
            return _Feed(self._kept[kind])
        name, size = meta.get("name"), meta.get("bytes")
        if kind == "patch" and self._overlay and type(size) is int:
            return await self._hooks.file(PATCH, size)
        if kind == "file" and isinstance(name, str) and type(size) is int:
            cut = self._hooks.cut_file if meta.get("cut") is True else None
            return await (cut or self._hooks.file)(name, size)
        return None

    def _heard(self, data: bytes) -> None:
        self.stdout.feed(data)
        if self._hooks.printed is not None:
            self._hooks.printed(data)


class _Feed:
    """A sink that hands bytes to a function."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take

    async def data(self, data: bytes) -> None:
        self._take(data)

    async def end(self) -> None:
        return


def _unavailable(reason: str) -> SandboxError:
    return SandboxError("Running a job in a sandbox", reason, "Try again; if it persists, run `glovebox doctor`.")
