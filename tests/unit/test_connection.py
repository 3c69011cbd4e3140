"""The broker's end of the wire against guests that follow the rules or do not; and what is kept of a stream."""

import json
import struct
import tracemalloc
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from tests.fixtures.channels import OUTCOME, READY, Channel, Guest, Script

from _glovebox_guest import wire
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.contract.measure import parse
from glovebox_sandboxes.session.connection import Duplex, GuestConnection, GuestOutcome, Serve, StreamSink, whole
from glovebox_sandboxes.session.run import HeadAndTail

SECONDS = 20
"""Far above what any of these tests takes; it ends one that hangs."""


class Kept:
    def __init__(self) -> None:
        self.content = bytearray()
        self.ended = False

    async def data(self, data: bytes) -> None:
        assert not self.ended
        self.content += data

    async def end(self) -> None:
        assert not self.ended
        self.ended = True


class Taker:
    def __init__(self, *, refuse: bool = False) -> None:
        self.taken: list[tuple[str, Mapping[str, Any], Kept]] = []
        self._refuse = refuse

    async def accept(self, kind: str, meta: Mapping[str, Any]) -> StreamSink | None:
        self.taken.append((kind, meta, Kept()))
        return None if self._refuse else self.taken[-1][2]


@asynccontextmanager
async def linked(script: Script) -> AsyncIterator[GuestConnection]:
    """A link to a guest that runs ``script`` and then closes its end."""
    channel = Channel()

    async def guest() -> None:
        try:
            await script(Guest(channel))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream):
            return  # the host gave up first
        finally:
            channel.to_host.close()

    problem: Exception | None = None
    with anyio.fail_after(SECONDS):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(guest)
            try:
                yield GuestConnection(channel)
            except Exception as raised:  # noqa: BLE001 - raised again below, outside of the group
                problem = raised
            finally:
                tasks.cancel_scope.cancel()
                await channel.aclose()
    if problem is not None:
        raise problem


async def converse(
    script: Script, taker: Taker | None = None, *, inputs: Sequence[tuple[str, bytes]] = (), serve: Serve | None = None
) -> GuestOutcome:
    async with linked(script) as link:
        await link.ready()
        given = [(name, whole(content)) for name, content in inputs]
        return await link.run({"kind": "python"}, given, {}, (taker or Taker()).accept, serve)


async def trouble(script: Script, serve: Serve | None = None) -> str:
    with pytest.raises(SandboxError) as problem:
        await converse(script, serve=serve)
    return str(problem.value)


def scripted(after: bytes) -> Script:
    async def script(guest: Guest) -> None:
        await guest.start()
        await guest.say(after)

    return script


def frame(kind: int, stream: int, payload: bytes = b"{}") -> bytes:
    """A frame as a guest that follows no rule would write it."""
    return struct.pack("!BII", kind, stream, len(payload)) + payload


def opening(stream: int, kind: bytes = b"stdout", *, duplex: bool = False) -> bytes:
    flag = b"true" if duplex else b"false"
    return frame(2, stream, b'{"kind":"%s","meta":{},"duplex":%s}' % (kind, flag))


def outcome(**changes: Any) -> bytes:
    return frame(1, 0, json.dumps({"kind": "outcome", "body": {**OUTCOME, **changes}}).encode())


async def test_a_whole_conversation() -> None:
    """Control of everything below: inputs in, streams out, flow control both ways, outcome."""
    content, taker = bytes(range(256)) * 20_000, Taker()  # five windows
    got: dict[int, bytearray] = {}

    async def script(guest: Guest) -> None:
        await guest.start()
        ended = 0
        while ended < 2:
            for event in await guest.hear():
                if event[0] == "data":
                    _, stream, data = event
                    got.setdefault(stream, bytearray()).extend(data)
                    await guest.say(guest.wire.consumed(stream, len(data)) or b"")
                ended += event[0] == "end"
        await guest.file("a", content)
        await guest.file("b", b"")
        await guest.done()

    told = await converse(script, taker, inputs=[("x", content), ("y", b"small")])
    assert told == GuestOutcome.model_validate(OUTCOME)
    assert [bytes(each) for each in got.values()] == [content, b"small"]
    assert [(meta["name"], bytes(kept.content), kept.ended) for _, meta, kept in taker.taken] == [
        ("a", content, True),
        ("b", b"", True),
    ]


async def test_guest_and_host_may_send_much_at_the_same_time() -> None:
    """Neither waits for the other: the host reads on while a guest that is busy sending reads nothing."""
    answer = bytes(900_000)

    async def serve(stream: Duplex) -> None:
        await stream.send(answer)
        await stream.send_eof()

    async def script(guest: Guest) -> None:
        await guest.start()
        for _ in range(4):
            _, frames = guest.wire.open("connect", {}, duplex=True)
            await guest.say(frames)
        stream, frames = guest.wire.open("stdout", {})
        await guest.say(frames + guest.wire.data(stream, bytes(wire.WINDOW)))
        # A window is used up and the host owes credit, while it has megabytes of its own to send.
        ended = 0
        while ended < 4:
            ended += sum(event[0] == "end" for event in await guest.hear())
        assert guest.wire.credit(stream) >= wire.WINDOW // 2
        await guest.done()

    assert await converse(script, serve=serve)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stopped": "never"}, "pattern"),
        ({"status": 256}, "255"),
        ({"status": -65}, "-64"),
        ({"status": "0"}, "integer"),
        ({"status": True}, "integer"),
        ({"wall_ms": -1.0}, "greater"),
        ({"cpu_ms": 10**400}, "number"),
        ({"memory_peak_bytes": 1.5}, "integer"),
        ({"skipped": [{"name": "a", "reason": "b"}] * 65}, "64"),
        ({"skipped": [{"name": "a" * 1025, "reason": "b"}]}, "1024"),
        ({"skipped": [{"name": "a"}]}, "required"),
        ({"more": 1}, "Extra"),
    ],
)
async def test_a_malformed_outcome_is_no_outcome(changes: dict[str, Any], message: str) -> None:
    """The guest killed the call, not the program: a sandbox that cannot be believed."""
    told = await trouble(scripted(outcome(**changes)))
    assert "its outcome is malformed" in told
    assert message in told


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff" * 9, "unknown frame type"),
        (frame(1, 0, b'{"kind":"ready","body":{}}'), "may not say 'ready'"),
        (opening(2), "may not open stream 2"),
        (b"".join(opening(n * 2 + 1) for n in range(65)), "more than 64"),
        (opening(1) + frame(4, 1), "may not send a note"),
        (frame(7, 1, b'{"credit":1}'), "never opened"),
        (opening(1) + frame(3, 1, b""), "no bytes"),
        (outcome() + opening(1), "after the outcome"),
        (struct.pack("!BII", 3, 1, 2**32 - 1), "announces 4294967295 bytes"),
    ],
)
async def test_a_broken_rule_is_told_as_a_broken_sandbox(data: bytes, message: str) -> None:
    """One exception, not a group of them: the broker records it and the caller hears of it."""
    told = await trouble(scripted(data))
    assert "broke the wire's protocol" in told
    assert message in told


async def test_what_nobody_reads_is_bounded_by_the_window() -> None:
    """A guest that sends on without credit breaks the protocol."""

    async def serve(_stream: Duplex) -> None:
        await anyio.sleep_forever()

    data = opening(1, duplex=True) + frame(3, 1, bytes(wire.MAX_DATA)) * (wire.WINDOW // wire.MAX_DATA)
    assert "exceed the window of 0" in await trouble(scripted(data + frame(3, 1, b"x")), serve)


@pytest.mark.parametrize("said", [b"", opening(1), opening(1) + frame(3, 1, b"half"), outcome()[:-1]])
async def test_a_guest_that_ends_without_an_outcome_is_told_apart(said: bytes) -> None:
    """Also in the middle of a stream or of a frame: the end of the sandbox, not a result."""
    with pytest.raises(anyio.EndOfStream):
        await converse(scripted(said))


async def test_the_outcome_counts_although_nobody_reads_any_more() -> None:
    """A guest may be gone when the credit for its last bytes reaches it."""

    async def script(guest: Guest) -> None:
        await guest.start()
        stream, frames = guest.wire.open("stdout", {})
        frames += guest.wire.data(stream, bytes(wire.WINDOW)) + guest.wire.end(stream)
        guest.channel.from_host.close()
        await guest.say(frames)
        await guest.done()

    assert (await converse(script)).status == 0


async def test_a_guest_that_stops_reading_does_not_stop_us() -> None:
    """It may say its outcome without ever taking its inputs."""

    async def script(guest: Guest) -> None:
        await guest.start()
        await guest.say(opening(1) + frame(3, 1, bytes(wire.MAX_DATA)) * 4 + frame(5, 1, b""))
        await guest.done()

    assert await converse(script, inputs=[("big", bytes(5_000_000))])


async def test_a_guest_that_never_ends_is_ended_by_the_callers_clock() -> None:
    """Whatever it does: cancelling the conversation works while it waits and while it is flooded."""

    async def silent(guest: Guest) -> None:
        await guest.start()
        await anyio.sleep_forever()

    async def flooding(guest: Guest) -> None:
        await guest.start()
        await guest.say(opening(1))
        while True:
            await guest.say(frame(6, 1) * 10)
            await anyio.lowlevel.checkpoint()

    for script in (silent, flooding):
        async with linked(script) as link:
            await link.ready()
            with anyio.move_on_after(0.2) as scope:
                await link.run({}, (), {}, Taker().accept, None)
            assert scope.cancelled_caught


async def test_a_flood_does_not_stop_the_clock() -> None:
    """A channel that always has bytes at once, of frames that cost no credit: the caller's time still runs out."""

    class Flood(Channel):
        """Resets of a stream that is over, for ever."""

        async def receive(self, max_bytes: int = 65536) -> bytes:
            return frame(6, 1) * 100 if self.started else await super().receive(max_bytes)

        started = False

    channel = Flood()
    guest = Guest(channel)
    await guest.say(guest.wire.message("ready", READY))
    link = GuestConnection(channel)
    await link.ready()
    await guest.say(opening(1) + frame(6, 1))
    with anyio.move_on_after(0.2) as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(guest.hear)
            tasks.start_soon(_start_flood, channel)
            await link.run({}, (), {}, Taker().accept, None)
    assert scope.cancelled_caught
    await channel.aclose()


async def _start_flood(channel: Any) -> None:
    while channel.to_host.statistics().current_buffer_used:
        await anyio.lowlevel.checkpoint()
    channel.started = True
    await channel.to_host.send(frame(6, 1))


async def test_refused_streams_cost_nothing() -> None:
    """5,000 opened, each refused with its reason; nothing of them is kept."""
    taker, resets = Taker(refuse=True), 0

    async def script(guest: Guest) -> None:
        nonlocal resets
        await guest.start()
        for n in range(5_000):
            if n % 50 == 49:
                while resets < n - 10:
                    resets += sum(event[0] == "reset" for event in await guest.hear())
            _, frames = guest.wire.open("other", {})
            await guest.say(frames)
        await guest.done()

    async with linked(script) as link:
        await link.ready()
        await link.run({}, (), {}, taker.accept, None)
        assert not link._sinks
    assert len(taker.taken) == 5_000


async def test_a_duplex_stream_is_refused_where_there_is_no_network() -> None:
    """With the rule, so that the program can be told."""
    reasons: list[Mapping[str, Any]] = []

    async def script(guest: Guest) -> None:
        await guest.start()
        _, frames = guest.wire.open("connect", {}, duplex=True)
        await guest.say(frames)
        while not reasons:
            reasons.extend(event[2] for event in await guest.hear() if event[0] == "reset")
        await guest.done()

    assert await converse(script)
    assert reasons[0]["rule"] == "network.mode"


async def test_what_the_guest_gave_up_is_no_longer_served() -> None:
    """5,000 streams opened and reset at once: none is served on, and a reset is not the end of a body."""
    ends: list[str] = []
    running = most = 0

    async def serve(stream: Duplex) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            while True:
                await stream.receive()
        except anyio.EndOfStream:
            ends.append("complete")
        finally:
            running -= 1

    async def script(guest: Guest) -> None:
        await guest.start()
        for n in range(5_000):
            stream = n * 2 + 1
            await guest.say(opening(stream, duplex=True) + frame(3, stream, b"half") + frame(6, stream))
        await guest.say(outcome())

    assert await converse(script, serve=serve)
    assert ends == []
    assert running == 0
    assert most <= wire.MAX_OPEN


async def test_a_stream_given_up_while_it_is_read_does_not_look_complete() -> None:
    """The nearest case: the server waits for more when the reset comes."""
    ended: list[type[BaseException]] = []
    waiting = anyio.Event()

    async def serve(stream: Duplex) -> None:
        try:
            assert await stream.receive() == b"half"
            waiting.set()
            await stream.receive()
        except BaseException as problem:
            ended.append(type(problem))
            raise

    async def script(guest: Guest) -> None:
        await guest.start()
        await guest.say(opening(1, duplex=True) + frame(3, 1, b"half"))
        await waiting.wait()
        await guest.say(frame(6, 1))
        await guest.say(outcome())

    assert await converse(script, serve=serve)
    assert ended
    assert anyio.EndOfStream not in ended


async def test_a_stream_of_tiny_frames_takes_its_bytes_and_no_more() -> None:
    """WINDOW bounds what is held for a stream that nobody reads, also when it comes in pieces of two bytes."""
    size, held = 64 * 1024, 0

    async def serve(_stream: Duplex) -> None:
        await anyio.sleep_forever()

    async def script(guest: Guest) -> None:
        nonlocal held
        await guest.start()
        await guest.say(opening(1, duplex=True))
        tracemalloc.start()
        for _ in range(64):
            await guest.say(b"".join(frame(3, 1, b"%02x" % (n % 256)) for n in range(size // 128)))
            while guest.channel.to_host.statistics().current_buffer_used:
                await anyio.lowlevel.checkpoint()
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        await guest.say(outcome())

    assert await converse(script, serve=serve)
    assert size <= held < 4 * size


@pytest.mark.parametrize("place", ["accept", "data", "end", "serve"])
async def test_our_own_failures_end_the_conversation_as_themselves(place: str) -> None:
    """A record that cannot be written, a full disk: the broker must see that exception, not a group around it."""

    class OursError(Exception):
        """A failure of ours."""

    class Failing(Kept):
        async def data(self, data: bytes) -> None:
            self.content += data
            if place == "data":
                raise OursError

        async def end(self) -> None:
            if place == "end":
                raise OursError

    async def accept(_kind: str, _meta: Mapping[str, Any]) -> StreamSink:
        if place == "accept":
            raise OursError
        return Failing()

    async def serve(_stream: Duplex) -> None:
        raise OursError

    async def script(guest: Guest) -> None:
        await guest.start()
        await guest.say(opening(1, duplex=place == "serve") + frame(3, 1, b"x") + frame(5, 1, b""))
        await anyio.sleep_forever()

    async with linked(script) as link:
        await link.ready()
        with pytest.raises(OursError):
            await link.run({}, (), {}, accept, serve)


@pytest.mark.parametrize("body", [{}, {**READY, "uid": "0"}, {**READY, "extra": 1}, {**READY, "mounts": [{}] * 513}])
async def test_what_is_no_measurement_is_refused(body: dict[str, Any]) -> None:
    async def script(guest: Guest) -> None:
        await guest.say(guest.wire.message("ready", body))

    async with linked(script) as link:
        with pytest.raises(SandboxError, match="measurement of its isolation"):
            parse(await link.ready())


def captured(limit: int, *chunks: bytes) -> tuple[str, int, int]:
    kept = HeadAndTail(limit)
    for chunk in chunks:
        kept.feed(chunk)
    result = kept.captured()
    return result.text, result.total_bytes, result.dropped_bytes


def test_what_fits_is_kept_whole_and_one_byte_too_many_is_a_gap_of_one() -> None:
    assert captured(4, b"abcde") == ("ab\n[… 1 bytes left out …]\nde", 5, 1)
    assert captured(10) == ("", 0, 0)
    assert captured(10, b"0123456789") == ("0123456789", 10, 0)
    assert captured(4, b"a\xc3", b"\xa9b") == ("aéb", 4, 0)
    assert captured(10, b"\xff\x00a") == ("\ufffd\x00a", 3, 0)
    assert captured(4, b"\xc3\xa9\xc3\xa9\xc3") == ("é\n[… 1 bytes left out …]\n\ufffd\ufffd", 5, 1)
