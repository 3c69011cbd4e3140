"""The host's end of the wire: attest one sandbox, then carry one job and its streams. Every byte is hostile."""

import asyncio
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, Literal, Protocol

import anyio.abc
import anyio.lowlevel
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from _glovebox_guest import wire
from _glovebox_guest.measure import namespace_number
from glovebox_sandboxes.contract.attestation import Attestation, compare, describe
from glovebox_sandboxes.contract.base import OpenSandbox, Plan, Sandbox
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.contract.measure import NAMESPACES, Measured, parse, raw
from glovebox_sandboxes.plural import printable

READY_SECONDS = 30.0
"""From start to ``ready``: well below a second, except with preloaded modules on a busy machine."""

_READ = 128 * 1024
"""Bytes per read. Eight times as many cost five times as much per byte: the kernel allocates them each time."""
_READ_SECONDS = 0.0001
"""Approximate duration of such a read, with the start of the guest that had waited for room."""
_TURN_SECONDS = 0.0005
"""Longest turn of a guest that always sends. A short call waits for a dozen such turns and itself takes 10 ms."""
_OUTBOX = 1024 * 1024
"""Bytes on their way to the guest beyond which senders wait."""
_GONE = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)


_Name = Annotated[str, Field(max_length=255), AfterValidator(printable)]


class _GuestModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class GuestSkipped(_GuestModel):
    """One entry of ``/output`` that the guest did not send."""

    name: str = Field(max_length=1024)
    reason: str = Field(max_length=200)
    count: int | None = Field(default=None, ge=1, le=2**31)


class GuestChanges(_GuestModel):
    """Changes of the program in its workspace."""

    created: list[_Name] = Field(max_length=50)
    changed: list[_Name] = Field(max_length=50)
    deleted: list[_Name] = Field(max_length=50)
    counts: dict[Literal["created", "changed", "deleted"], int]
    skipped: list[GuestSkipped] = Field(max_length=26)
    patch: bool


class GuestOutcome(_GuestModel):
    """Body of the ``outcome`` message."""

    stopped: str = Field(pattern="^(time|output|processor)?$")
    status: int = Field(ge=-64, le=255)
    wall_ms: float = Field(ge=0)
    cpu_ms: float = Field(ge=0)
    memory_peak_bytes: int = Field(ge=0)
    skipped: list[GuestSkipped] = Field(max_length=64)
    changes: GuestChanges | None = None
    refused: str = Field(default="", max_length=300)


class StreamSink(Protocol):
    """The receiver of one stream of the guest's. Called in order, one at a time; while it works, the guest waits."""

    async def data(self, data: bytes) -> None:
        """Take the next bytes."""

    async def end(self) -> None:
        """End a stream that is complete."""


class _Feed:
    """A sink that passes the bytes of a stream on."""

    def __init__(self, take: Sequence[Callable[[bytes], None]]) -> None:
        self._take = take

    async def data(self, data: bytes) -> None:
        for each in self._take:
            each(data)

    async def end(self) -> None:
        pass


class Duplex(anyio.abc.ByteStream):
    """A two-way stream the guest opened (egress), with flow control both ways."""

    def __init__(self, link: "GuestConnection", stream: int, kind: str, meta: Mapping[str, Any]) -> None:
        self.stream = stream
        self.kind = kind
        self.meta = meta
        self._link = link
        self.scope = anyio.CancelScope()
        """Serving happens in here: a reset by the guest cancels it."""
        # The codec's window bounds it: a peer that sends more breaks the protocol. One array, because a window of tiny
        # frames, each an object of its own, would take thirty times its bytes.
        self.inbox = asyncio.StreamReader()
        self._broken = False

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Receive bytes from the guest.

        Raises:
            anyio.EndOfStream: the guest has sent everything.
            anyio.BrokenResourceError: the guest reset the stream, so the data may be incomplete.
        """
        data = await self.inbox.read(max_bytes)
        if self._broken:
            raise anyio.BrokenResourceError
        if not data:
            raise anyio.EndOfStream
        self._link.post(self._link.wire.consumed(self.stream, len(data)))
        return data

    async def send(self, data: bytes) -> None:
        """Send bytes to the guest; wait for credit. Raises anyio.BrokenResourceError if the guest is gone."""
        await self._link.send_data(self.stream, data)

    async def send_eof(self) -> None:
        """Close the sending direction."""
        if self._link.wire.is_open(self.stream):
            await self._link.send(self._link.wire.end(self.stream))

    async def accept(self, body: Mapping[str, Any]) -> None:
        """Accept this stream, once, before any bytes. Raises anyio.BrokenResourceError if the guest has reset it."""
        if not self._link.wire.is_open(self.stream):
            raise anyio.BrokenResourceError
        await self._link.send(self._link.wire.accept(self.stream, body))

    async def reset(self, body: Mapping[str, Any]) -> None:
        """Reset the stream with this reason, unless it is over."""
        self._link.post(self._link.wire.reset(self.stream, body))
        self._link.wake(self.stream)
        self.on_over()

    async def aclose(self) -> None:
        """End the stream if it is still open."""
        await self.reset({})

    def on_over(self, *, is_reset: bool = False) -> None:
        """End receiving, as the guest sends no more; and serving, if it reset the stream."""
        self.inbox.feed_eof()
        if is_reset:
            self._broken = True
            self.scope.cancel()


Input = tuple[str, AsyncGenerator[bytes, None]]
"""A name below ``/input``, and its content in pieces. If reading it raises, the guest never begins its job."""


async def whole(content: bytes) -> AsyncGenerator[bytes, None]:
    """Yield content that is in memory, in the form of an input."""
    yield content


Accept = Callable[[str, Mapping[str, Any]], Awaitable[StreamSink | None]]
"""Takes kind and metadata of a one-way stream; None rejects it."""
Feeds = Mapping[str, Sequence[Callable[[bytes], None]]]
"""Receivers of the bytes of one-way streams, by the kind of stream."""
Serve = Callable[[Duplex], Awaitable[None]]
"""Serves one two-way stream; runs in a task of its own."""


class GuestConnection:
    """The conversation with one guest."""

    def __init__(self, channel: anyio.abc.ByteStream, *, ready: bool = False) -> None:
        """Talk over a channel, from the guest's first message on, or from what follows it if that was ``ready``."""
        self.wire = wire.Wire("host")
        if ready:
            self.wire.state = "ready"
        self._channel = channel
        self._outbox = bytearray()
        self._posted = anyio.Event()
        self._sent = anyio.Event()
        self._sinks: dict[int, StreamSink] = {}
        self._duplexes: dict[int, Duplex] = {}
        self._credit: dict[int, anyio.Event] = {}
        self._turn = 0.0
        self.pause: Callable[[], Awaitable[None]] = anyio.lowlevel.checkpoint
        """Awaited when a turn is over; returns at this guest's next turn."""

    def post(self, frames: bytes) -> None:
        """Queue frames, whole and in order, without waiting.

        The reader never waits for the guest: they would wait for each other. Credit bounds the data under way; all else
        is a few bytes for each megabyte or stream of the guest's.
        """
        if frames:
            self._outbox += frames
            self._posted.set()

    async def send(self, frames: bytes) -> None:
        """Send frames, whole and in order, even if cancelled; wait while more than ``_OUTBOX`` is under way."""
        self.post(frames)
        while len(self._outbox) > _OUTBOX:
            await self._sent.wait()

    async def _write(self) -> None:
        """Write to the channel, in one task, so that no cancellation can split a frame.

        A guest that takes no more bytes may have sent its last ones: the reader finds out.
        """
        with suppress(*_GONE, OSError):
            while True:
                await self._posted.wait()
                self._posted = anyio.Event()
                frames = bytes(self._outbox)
                self._outbox.clear()
                self._sent.set()
                self._sent = anyio.Event()
                await self._channel.send(frames)

    async def ready(self) -> Mapping[str, Any]:
        """Return the guest's first message. Raises SandboxError if it is none, anyio.EndOfStream if the guest ends."""
        _, _, said = await self._next()  # the codec lets nothing else come first
        return raw(said["body"])

    async def run(
        self, job: Mapping[str, Any], inputs: Sequence[Input], feeds: Feeds, accept: Accept, serve: Serve | None
    ) -> GuestOutcome:
        """Send the guest its job, and inputs as it takes them, and carry its streams until the outcome.

        ``feeds`` take one-way streams of their kinds; ``accept`` is called for each other one it opens, and ``serve``
        for each two-way one. Raises SandboxError if it broke the protocol, anyio.EndOfStream if it ended early, and
        what ``accept``, ``serve`` or inputs raise.
        """
        body: Mapping[str, Any] = {}

        async def carry() -> None:
            nonlocal body
            while (event := await self._next())[0] != "message":
                await self._handle(event, tasks)
            body = event[2]["body"]
            tasks.cancel_scope.cancel()

        self._turn = monotonic() + _TURN_SECONDS
        self._feeds, self._accept, self._server = feeds, accept, serve
        self.post(self.wire.message("job", job))
        try:
            async with anyio.create_task_group() as tasks:
                # In a task of its own: each wait then wakes it alone, and not all that waits for the job.
                tasks.start_soon(carry)
                tasks.start_soon(self._write)
                tasks.start_soon(self._send_inputs, inputs)
        except BaseExceptionGroup as problems:
            # Tasks fail together; other errors count more than that the guest is gone.
            problem: BaseException = problems.split(_GONE)[1] or anyio.EndOfStream()
            while isinstance(problem, BaseExceptionGroup):
                problem = problem.exceptions[0]
            raise problem from None
        try:
            return GuestOutcome.model_validate(body)
        except ValidationError as invalid:
            said = invalid.errors(include_url=False, include_context=False, include_input=False)[0]["msg"]
            raise _broken(f"its outcome is malformed: {said}") from None

    def stop(self, reason: str) -> None:
        """Ask the guest to end the program, if it runs; it reports ``reason`` as ``GuestOutcome.stopped``."""
        if self.wire.state == "running":
            self.post(self.wire.message("stop", {"reason": reason}))

    async def _next(self) -> wire.WireEvent:
        while True:
            # A channel may always have bytes at once, and those hold many frames: others still have their turn.
            if monotonic() >= self._turn:
                await self.pause()
                self._turn = monotonic() + _TURN_SECONDS
            try:
                event = self.wire.event()
            except wire.ProtocolError as problem:
                raise _broken(str(problem)) from None
            if event is not None:
                return event
            asked = monotonic()
            self.wire.feed(await self._channel.receive(_READ))
            # Waiting for data is no part of its turn; reading is.
            self._turn += max(0.0, monotonic() - asked - _READ_SECONDS)

    async def _handle(self, event: wire.WireEvent, tasks: anyio.abc.TaskGroup) -> None:
        what, stream, *said = event
        sink, duplex = self._sinks.get(stream), self._duplexes.get(stream)
        if what == "open":
            await self._opened(stream, said[0], tasks)
        elif what == "data" and sink is not None:
            await sink.data(said[0])
            self.post(self.wire.consumed(stream, len(said[0])))
        elif what == "data" and duplex is not None:
            duplex.inbox.feed_data(said[0])
        elif what == "credit":
            self.wake(stream)
        elif what in ("end", "reset"):
            self._sinks.pop(stream, None)
            if sink is not None and what == "end":
                await sink.end()
            if duplex is not None:
                duplex.on_over(is_reset=what == "reset")
            self.wake(stream)

    async def _opened(self, stream: int, said: Mapping[str, Any], tasks: anyio.abc.TaskGroup) -> None:
        kind, meta = said["kind"], said["meta"]
        if said["duplex"] and self._server is not None:
            duplex = self._duplexes[stream] = Duplex(self, stream, kind, meta)
            tasks.start_soon(self._serve, self._server, duplex)
        elif said["duplex"]:
            reason = "This sandbox has no network."
            self.post(self.wire.reset(stream, {"rule": "network.mode", "reason": reason, "hint": ""}))
        else:
            sink = _Feed(self._feeds[kind]) if kind in self._feeds else await self._accept(kind, meta)
            if sink is not None:
                self._sinks[stream] = sink
            else:
                self.post(self.wire.reset(stream, {"reason": "refused"}))

    async def _serve(self, serve: Serve, duplex: Duplex) -> None:
        with suppress(*_GONE), duplex.scope:  # the guest may have reset the stream
            await serve(duplex)
        del self._duplexes[duplex.stream]
        await duplex.aclose()

    async def _send_inputs(self, inputs: Sequence[Input]) -> None:
        for name, content in inputs:
            try:
                stream, frames = self.wire.open("input", {"name": name})
            except ValueError:
                raise _broken(f"it opened {wire.MAX_OPEN} streams at once") from None
            await self.send(frames)
            async with aclosing(content):
                async for piece in content:
                    await self.send_data(stream, piece)
            if not self.wire.is_open(stream):
                raise anyio.BrokenResourceError
            # Only after all of it was read without error: the guest begins at the last of these.
            await self.send(self.wire.end(stream))

    async def send_data(self, stream: int, data: bytes) -> None:
        """Send data as the guest gives credit. Raises anyio.BrokenResourceError if the stream is over."""
        view = memoryview(data)
        while view:
            if not self.wire.is_open(stream):
                raise anyio.BrokenResourceError
            credit = self.wire.credit(stream)
            if credit:
                await self.send(self.wire.data(stream, view[:credit]))
                view = view[credit:]
            else:
                await self._credit.setdefault(stream, anyio.Event()).wait()

    def wake(self, stream: int) -> None:
        """Wake a sender that waits for credit: there is more, or the stream is over."""
        if stream in self._credit:
            self._credit.pop(stream).set()


@functools.cache
def host_namespaces() -> Mapping[str, int]:
    """Return inode numbers of this process's namespaces, see namespaces(7); they do not change."""
    return {name: namespace_number(str(Path(f"/proc/self/ns/{name}").readlink())) for name in NAMESPACES}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttestedSandbox:
    """A sandbox whose guest is ready, and its measurements."""

    sandbox: Sandbox
    plan: Plan
    link: GuestConnection
    measured: Measured
    attestation: Attestation
    record: Any = None
    """The result of ``Pool``'s ``describe``."""

    def require_as_planned(self) -> None:
        """Raise SandboxError with each field of the isolation that differs from the plan."""
        if self.attestation.differences:
            reason = f"it is not what was planned ({describe(self.attestation.differences)})"
            raise SandboxError("Proving a sandbox's isolation", reason, "Run `glovebox doctor`.")


async def attest(sandbox: OpenSandbox, plan: Plan) -> AttestedSandbox:
    """Compare a ready guest's measurements and the host's view with the plan. Raises SandboxError if not ready."""
    link = GuestConnection(sandbox.channel)
    measured = parse(await first_message(link, sandbox))
    attestation = compare(plan.expected, measured, await sandbox.host_view(), host_namespaces())
    return AttestedSandbox(sandbox=sandbox, plan=plan, link=link, measured=measured, attestation=attestation)


async def first_message(link: GuestConnection, sandbox: Sandbox) -> Mapping[str, Any]:
    """Return what the guest says when it is ready. Raises SandboxError if it does not get ready."""
    try:
        with anyio.fail_after(READY_SECONDS):
            return await link.ready()
    except TimeoutError:
        raise job_failed(f"the guest was not ready after {READY_SECONDS:.0f} seconds") from None
    except _GONE:
        await sandbox.kill()
        facts = await sandbox.stats()
        if "Traceback" in facts.detail:  # our own guest's: the last line has the cause
            words = f"its Python ended before it was ready ({facts.detail.splitlines()[-1]})"
            fix = "Run `glovebox setup`, which repairs what was damaged; if it persists, run `glovebox doctor`."
            raise SandboxError("Starting a sandbox", words, fix) from None
        raise job_failed(facts.detail or "the guest ended before it was ready") from None


def _broken(reason: str) -> SandboxError:
    told = f"the sandbox broke the wire's protocol: {reason}"
    return SandboxError("Talking to the guest", told, "The sandbox was killed; try again.")


def job_failed(reason: str) -> SandboxError:
    """Return the error of a sandbox that could not run its job."""
    return SandboxError("Running a job in a sandbox", reason, "Try again; if it persists, run `glovebox doctor`.")
