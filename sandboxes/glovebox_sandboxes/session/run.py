"""Run one job in one sandbox, bound all its output, and report how it ended. The same for every driver.

Files and network connections go to the caller's callbacks as they come. A job returns frames of the guest's
``program.emit``. The program writes to the same pipe, so their author is unknown. But it can say little, and once: one
value, and at most ``MAX_BLOBS`` pictures. The first frame beyond that ends the reading.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Self

import anyio

from _glovebox_guest.jsontext import MAX_LISTED, bound, loads
from _glovebox_guest.program.emit import BLOB, HEADER, SHOWN, VALUE
from glovebox_sandboxes.contract import outcome as outcomes
from glovebox_sandboxes.contract import pictures
from glovebox_sandboxes.contract.base import WORKSPACE, Limits, Plan, Sandbox, SandboxStats
from glovebox_sandboxes.contract.errors import SandboxError, UnsupportedSpecError
from glovebox_sandboxes.contract.outcome import CountedBy, Ended, Job, Outcome
from glovebox_sandboxes.plural import counted
from glovebox_sandboxes.session import connection

GRACE_SECONDS = 5.0
"""After its wall time the guest stops the program and sends its output; then the host ends the sandbox."""
PRINTED_FACTOR = 256
"""A program is stopped when it prints more than this many times the bytes kept of a stream."""

LOOK_SECONDS = 0.1
"""Seconds between two checks of a running job's use: on one processor, also the most it can be late."""

_DIGITS = 3
"""Of milliseconds: more digits mean nothing."""
_SHRINK_WORKSPACE = (
    "Raise limits.workspace in the profile, serve a smaller directory (--workspace), which sandboxes may read "
    '(as root: chmod -R o+rX), or use workspace = "read".'
)
_SIGXCPU = 24
_SIGKILL = 9
MAX_VALUE = 1024 * 1024
"""Bytes of JSON: above every result of our own jobs, and small enough to parse safely."""
MAX_BLOB = 8 * 1024 * 1024
"""Bytes of one picture: a 4,000 × 3,000 plot is about 1 MiB."""
MAX_BLOBS = 16
MAX_BLOB_BYTES = 16 * 1024 * 1024
"""Of all pictures of one job: they are held in memory until the call has its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Callbacks of a running job's caller."""

    file: Callable[[str, int], Awaitable[connection.StreamSink | None]]
    """Takes name and size of an output file; None rejects it."""
    cut_file: Callable[[str, int], Awaitable[connection.StreamSink | None]] | None = None
    """Takes a file whose end may be missing, if the caller distinguishes it."""
    serve: connection.Serve | None = None
    """Serves one egress stream; None if the profile grants no network."""
    printed: Callable[[bytes], None] | None = None


async def run(
    proved: connection.AttestedSandbox, job: Job, *, inputs: Sequence[connection.Input], hooks: Hooks
) -> Outcome:
    """Run one job to its end, or until its time is up.

    Raises:
        SandboxError: the sandbox died under the program, or broke the protocol.
        UnsupportedSpecError: the workspace cannot be copied within the limits; the program was not started.
    """
    sandbox, link, plan = proved.sandbox, proved.link, proved.plan
    limits = plan.spec.limits
    wall = min(limits.wall_seconds, job.wall_seconds or limits.wall_seconds)
    streams = _Streams(limits.stream_bytes, hooks, overlay=plan.spec.overlay)
    reported: connection.GuestOutcome | None = None
    died = False
    started = anyio.current_time()
    with ProcessorMeter(sandbox, link, limits.cpu_seconds) as processor, anyio.move_on_after(wall + GRACE_SECONDS):
        try:
            body = _job_body(plan, job, wall, len(inputs))
            reported = await link.run(body, inputs, streams.feeds, streams.accept, hooks.serve)
        except anyio.EndOfStream:
            died = True
    elapsed = (anyio.current_time() - started) * 1000
    if reported is None:
        await sandbox.kill()
    facts = await sandbox.stats()
    cpu_ms, cpu_from = processor.spent(reported, facts)
    if died and not facts.out_of_memory:
        raise connection.job_failed(facts.detail or "the sandbox ended without an outcome")
    if reported is not None and reported.refused:
        problem = f"the workspace cannot be copied: {reported.refused}"
        raise UnsupportedSpecError("files.workspace", problem, _SHRINK_WORKSPACE)
    ended, code, reason = _ending(plan, reported, facts, wall, streams.result.value)
    if reported is None and processor.stopped and ended == "timed_out":
        ended, code, reason = "limit", None, _exceeded("processor", limits)
    changes = reported.changes if reported and plan.spec.overlay else None
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
        changes=outcomes.OverlayChanges(**changes.model_dump(exclude={"skipped"})) if changes else None,
        usage=outcomes.Usage(
            wall_ms=round(reported.wall_ms if reported else elapsed, _DIGITS),
            cpu_ms=cpu_ms,
            memory_peak_bytes=facts.memory_peak_bytes or (reported.memory_peak_bytes if reported else 0),
            cpu_from=cpu_from,
            memory_from="group" if facts.memory_peak_bytes else "guest" if reported else "none",
        ),
    )


class ProcessorMeter:
    """A watch of a running job's processor time, where the host's kernel counts it for the sandbox.

    The guest sees only processes that live or were waited for. Time used before the job does not count.
    """

    def __init__(self, sandbox: Sandbox, link: connection.GuestConnection, most: float) -> None:
        self._sandbox = sandbox
        self._link = link
        self._most = most
        self._before = sandbox.cpu_seconds()
        self._last = self._before
        self._timer: asyncio.TimerHandle | None = None
        self.stopped = False

    def __enter__(self) -> Self:
        if self._before is not None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        with suppress(SandboxError):  # if it is unreadable at the end too, the call fails
            self._last = self._sandbox.cpu_seconds() or self._last
        if self._last is not None and self._before is not None and self._last - self._before > self._most:
            self.stopped = True
            # A guest that does not comply is ended when its wall time is up.
            self._link.stop("processor")
        else:
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def spent(self, reported: connection.GuestOutcome | None, facts: SandboxStats) -> tuple[float | None, CountedBy]:
        """Return milliseconds, and who counted them."""
        found = self._last if facts.cpu_seconds is None else facts.cpu_seconds
        if found is not None and self._before is not None:
            return round((found - self._before) * 1000, _DIGITS), "group"
        return (None, "none") if reported is None else (round(reported.cpu_ms, _DIGITS), "guest")


def _skipped(reported: connection.GuestOutcome | None) -> tuple[outcomes.SkippedFile, ...]:
    if reported is None:
        return ()
    named = [(entry.name, entry) for entry in reported.skipped]
    if reported.changes is not None:
        named += [(f"{WORKSPACE}/{entry.name}", entry) for entry in reported.changes.skipped]
    return tuple(outcomes.SkippedFile(name=name, reason=entry.reason, count=entry.count) for name, entry in named)


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
    plan: Plan, reported: connection.GuestOutcome | None, facts: SandboxStats, wall: float, value: Any
) -> tuple[Ended, int | None, str]:
    """Return how it ended, by the strongest evidence: the kernel's, the clock's, then the guest's."""
    limits = plan.spec.limits
    out_of_memory = f"It needed more than the {limits.memory_bytes // 2**20} MiB of memory it may use."
    if reported is None and facts.out_of_memory:
        return "out_of_memory", None, out_of_memory
    if reported is None or reported.stopped == "time":
        most = f"; {counted(limits.wall_seconds, 'second')} are allowed" if wall < limits.wall_seconds else ""
        return "timed_out", None, f"It was still running after {counted(wall, 'second')} and was stopped{most}."
    killed = reported.status == -_SIGKILL
    spent = killed and reported.cpu_ms >= limits.cpu_seconds * 1000
    if reported.stopped or spent or reported.status == -_SIGXCPU:
        return "limit", None, _exceeded(reported.stopped or "processor", limits)
    if facts.out_of_memory if killed else reported.status > 0 and _lacked_memory(plan, reported, facts, value):
        return "out_of_memory", None if killed else reported.status, out_of_memory
    if reported.status < 0:
        return "signalled", -reported.status, f"It was ended by signal {-reported.status}."
    return "exited", reported.status, ""


def _lacked_memory(plan: Plan, reported: connection.GuestOutcome, facts: SandboxStats, value: Any) -> bool:
    error = value.get("error") if isinstance(value, dict) else None
    # A program can claim this falsely. Where the limit holds per process there is no other witness.
    witness = facts.out_of_memory or "memory_bytes" in plan.rlimits
    if witness and reported.status == 1 and isinstance(error, dict) and error.get("type") == "MemoryError":
        return True
    # Where the kernel killed what holds the program's memory (under gVisor), the program ends without a word.
    return reported.status != 0 and value is None and facts.out_of_memory


def _exceeded(what: str, limits: Limits) -> str:
    """Return the message for a program stopped for a limit, by the guest's word for it."""
    if what == "output":
        return f"It printed more than {limits.stream_bytes * PRINTED_FACTOR // 2**20} MiB and was stopped."
    return f"It used more than {counted(limits.cpu_seconds, 'second')} of processor time and was stopped."


class _Streams:
    def __init__(self, keep: int, hooks: Hooks, *, overlay: bool) -> None:
        self.stdout = HeadAndTail(keep)
        self.stderr = HeadAndTail(keep)
        self.result = ResultReader()
        self.shown = ResultReader()
        self.feeds: connection.Feeds = {
            "stdout": [self.stdout.feed, hooks.printed] if hooks.printed else [self.stdout.feed],
            "stderr": [self.stderr.feed],
            "result": [self.result.feed],
            "shown": [self.shown.feed],
        }
        self._hooks = hooks
        self._overlay = overlay

    async def accept(self, kind: str, meta: Mapping[str, Any]) -> connection.StreamSink | None:
        name, size = meta.get("name"), meta.get("bytes")
        if kind == "patch" and self._overlay and type(size) is int:
            return await self._hooks.file(outcomes.PATCH, size)
        if kind == "file" and isinstance(name, str) and type(size) is int:
            cut = self._hooks.cut_file if meta.get("cut") is True else None
            return await (cut or self._hooks.file)(name, size)
        return None


class HeadAndTail:
    """A buffer of at most ``limit`` bytes: the first half, and the last half of the rest; counts the bytes dropped."""

    def __init__(self, limit: int) -> None:
        self.total = 0
        self._head, self._head_limit = bytearray(), limit // 2
        self._tail, self._tail_limit = bytearray(), limit - limit // 2

    def feed(self, data: bytes) -> None:
        """Append bytes."""
        self.total += len(data)
        room = self._head_limit - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        del self._tail[: max(0, len(self._tail) - self._tail_limit)]  # moves nothing: the array begins later

    def captured(self) -> outcomes.Captured:
        """Return the kept bytes as text."""
        dropped = self.total - len(self._head) - len(self._tail)
        between = f"\n[… {dropped} bytes left out …]\n".encode() if dropped else b""
        text = (self._head + between + self._tail).decode("utf-8", "replace")
        return outcomes.Captured(text=text, total_bytes=self.total, dropped_bytes=dropped)


class ResultReader:
    """A parser of one job's frames. It skips what does not fit the format and reports it in ``problems``."""

    def __init__(self) -> None:
        self.value: Any = None
        self.blobs: list[outcomes.Blob] = []
        self.shown: list[outcomes.Shown] = []
        self.problems: list[str] = []
        self._buffer = bytearray()
        self._seen: Counter[int] = Counter()
        self._passing = 0  # bytes still to come of a skipped picture
        self._broken = False
        self._whole = False  # the last picture was accepted: a copy may refer to it
        self._room = MAX_BLOB_BYTES

    def feed(self, data: bytes) -> None:
        """Parse the next bytes."""
        if self._broken:
            return
        self._buffer += data
        while True:
            passed = min(self._passing, len(self._buffer))
            del self._buffer[:passed]
            self._passing -= passed
            if len(self._buffer) < HEADER.size:
                return
            kind, length = HEADER.unpack_from(self._buffer)
            longest, most, take = self._FRAMES.get(kind, (0, 0, ResultReader.feed))
            if length > longest or self._seen[kind] >= most:
                # Without a valid length the next frame cannot be found.
                self._broken = True
                self._buffer.clear()
                self.problems.append("the program wrote to the descriptor its results go through; the rest is dropped")
                return
            end = HEADER.size + length
            if kind == BLOB and length > self._room:
                self._whole = False
                self._passing = end
                self.problems.append(f"more than {MAX_BLOB_BYTES} bytes of pictures")
            elif len(self._buffer) < end:
                return
            else:
                with memoryview(self._buffer) as view:
                    payload = bytes(view[HEADER.size : end])
                del self._buffer[:end]
                take(self, payload)
            self._seen[kind] += 1

    def _take_value(self, payload: bytes) -> None:
        try:
            bound(payload, MAX_LISTED)
            # Decoded here: `json` would accept other encodings, and surrogates that are not UTF-8.
            value = loads(payload.decode())
            if b"\\u" in payload:
                # An unpaired surrogate cannot be encoded: it becomes a question mark here, once.
                value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
        except (ValueError, RecursionError):
            self.problems.append("the value is not JSON of ordinary size")
        else:
            self.value = value

    def _take_blob(self, payload: bytes) -> None:
        head, _, data = payload.partition(b"\0")
        media_type = head.decode("ascii", "replace")
        magic = pictures.IMAGE_TYPES.get(media_type)
        self._whole = magic is not None and data.startswith(magic)
        if self._whole:
            self._room -= len(payload)
            self.blobs.append(outcomes.Blob(media_type=media_type, data=data))
        else:
            self.problems.append("a picture is not of the type it claims")

    def _take_shown(self, payload: bytes) -> None:
        about, _, data = payload.partition(b"\0")
        shown = pictures.parse_copy(about, data)
        if shown is None:
            self.problems.append("a smaller copy of a picture is not what it claims")
        elif self._whole and not shown.name:
            self.blobs[-1] = replace(self.blobs[-1], shown=shown)
        else:
            self.shown.append(shown)

    # By a frame's kind: its longest payload, how many may come, and what takes them.
    _FRAMES: ClassVar = {
        VALUE: (MAX_VALUE, 1, _take_value),
        SHOWN: (pictures.MAX_BYTES + pictures.MAX_ABOUT, MAX_BLOBS, _take_shown),
        BLOB: (MAX_BLOB, MAX_BLOBS, _take_blob),
    }
