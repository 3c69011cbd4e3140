"""The wire against arbitrary bytes, arbitrary cuts, and two ends that talk at random."""

import struct
from collections import deque
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule
from tests.fixtures.draws import draws
from tests.fixtures.wire_peers import running
from tests.property.test_results import cut

from _glovebox_guest import wire
from _glovebox_guest.wire import MAX_JOB, MAX_OPEN, MAX_STREAM, WINDOW, ProtocolError, Wire

HEADER = 9


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """One frame: well-formed more often than not, so that the rules behind the first are reached."""
    kind = draw(st.sampled_from([1, 2, 2, 3, 3, 4, 5, 5, 6, 7, 0, 9]))
    stream = draw(st.sampled_from([0, 1, 1, 2, 3, 3, 5, 7, MAX_STREAM, MAX_STREAM + 2, 2**32 - 1]))
    flag = "true" if draw(st.booleans()) else "false"
    fitting = {
        1: b'{"kind":"outcome","body":{}}',
        2: b'{"kind":"k","meta":{},"duplex":' + flag.encode() + b"}",
        3: draw(st.binary(max_size=40)),
        5: b"",
        7: b'{"credit":%d}' % draw(st.integers(-1, 2 * WINDOW)),
    }.get(kind, b"{}")
    payload = draw(st.just(fitting) | st.binary(max_size=30)) if draw(st.integers(0, 4)) == 0 else fitting
    length = draw(st.integers(0, 2**32 - 1)) if draw(st.integers(0, 20)) == 0 else len(payload)
    return struct.pack("!BII", kind, stream, length) + payload


def outcome(end: Wire, chunks: list[bytes]) -> tuple[list[wire.WireEvent], bool]:
    """All events, and whether the bytes broke a rule. Nothing but ProtocolError may come out."""
    events: list[wire.WireEvent] = []
    try:
        for chunk in chunks:
            events += end.receive(chunk)
            assert len(end._buffer) < MAX_JOB + HEADER
            assert len(end._streams) <= MAX_OPEN
            assert all(0 <= known.allowed <= WINDOW for known in end._streams.values())
            assert all(0 <= known.credit <= WINDOW for known in end._streams.values())
    except ProtocolError:
        return events, True
    return events, False


@given(st.binary(max_size=300), st.sampled_from(["host", "guest"]), st.booleans())
def test_arbitrary_bytes_end_in_events_or_a_protocol_error(data: bytes, role: str, started: bool) -> None:
    """No other exception, no state out of bounds."""
    host, guest = running() if started else (Wire("host"), Wire("guest"))
    outcome(host if role == "host" else guest, [data])


OUTCOME = b'\1\0\0\0\0\0\0\0\x1c{"kind":"outcome","body":{}}'


@draws(300)
@given(st.lists(frames(), max_size=25).map(b"".join), st.lists(st.integers(1, 60), min_size=1, max_size=20))
@example(OUTCOME + OUTCOME[:-1], [1])
def test_how_the_bytes_are_cut_changes_nothing(data: bytes, cuts: list[int]) -> None:
    """The same events and the same verdict for the whole, for single bytes and for any pieces."""
    pieces = cut(data, cuts)
    whole, broken_whole = outcome(running()[0], [data])
    parts, broken_parts = outcome(running()[0], pieces)
    bytewise, broken_bytes = outcome(running()[0], [data[n : n + 1] for n in range(len(data))])
    assert broken_whole == broken_parts == broken_bytes
    # What comes in the same bytes as a broken rule is lost with it: more cuts can only show more of the same events.
    assert bytewise[: len(parts)] == parts
    assert parts[: len(whole)] == whole
    if not broken_whole:
        assert whole == parts == bytewise


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_any_json_body_crosses_unchanged(body: dict[str, Any]) -> None:
    """Lone surrogates and control characters included; NaN and infinities are our mistake, never sent."""
    host, guest = running()
    try:
        _, sent = guest.open("k", body)
    except ValueError:
        assert "nan" in repr(body) or "inf" in repr(body)
        return
    (event,) = host.receive(sent)
    assert event == ("open", 1, {"kind": "k", "meta": body, "duplex": False})


class Conversation(RuleBasedStateMachine):
    """Two ends, bytes on the way in both directions, and a model of what each has sent and heard."""

    streams = Bundle("streams")

    @initialize()
    def start(self) -> None:
        """Begin where streams may be opened."""
        host, guest = running()
        self.ends: dict[str, Wire] = {"host": host, "guest": guest}
        self.under_way: dict[str, bytearray] = {"host": bytearray(), "guest": bytearray()}  # by receiver
        self.sent: dict[tuple[str, int], bytearray] = {}  # by sender and stream
        self.heard: dict[tuple[str, int], bytearray] = {}
        self.unconsumed: dict[tuple[str, int], deque[int]] = {}  # by receiver and stream
        self.reset: set[int] = set()
        self.ended: dict[tuple[str, int], int] = {}  # by receiver and stream
        self.counter = 0

    @staticmethod
    def other(role: str) -> str:
        """The peer."""
        return "guest" if role == "host" else "host"

    def put(self, role: str, data: bytes) -> None:
        """Send bytes from one end; they arrive when ``deliver`` says so."""
        self.under_way[self.other(role)] += data

    @rule(target=streams, role=st.sampled_from(["host", "guest"]), duplex=st.booleans())
    def open(self, role: str, duplex: bool) -> tuple[str, int]:
        """Open a stream where both ends have room (each may lag behind the other)."""
        end = self.ends[role]
        # Opens of both sides can cross; real ends keep far below the limit for that reason.
        if len(end._streams) >= MAX_OPEN // 2:
            return role, 0
        stream, data = end.open("k", {"n": self.counter}, duplex=duplex)
        self.put(role, data)
        return role, stream

    @rule(at=streams, role=st.sampled_from(["host", "guest"]), size=st.integers(0, 2 * WINDOW), greedy=st.booleans())
    def send(self, at: tuple[str, int], role: str, size: int, greedy: bool) -> None:
        """Send up to the credit; one byte more is refused."""
        stream, end = at[1], self.ends[role]
        credit = end.credit(stream)
        assert 0 <= credit <= WINDOW
        size = credit if greedy else min(size, credit)
        if credit == 0:
            return
        self.counter = (self.counter + 1) % 251
        data = bytes([self.counter]) * size
        self.put(role, end.data(stream, data))
        self.sent.setdefault((role, stream), bytearray()).extend(data)
        try:
            end.data(stream, bytes(end.credit(stream) + 1))
        except ValueError:
            return
        raise AssertionError("sent past the credit")

    @rule(at=streams, role=st.sampled_from(["host", "guest"]))
    def finish(self, at: tuple[str, int], role: str) -> None:
        """End one direction, if it is ours to end."""
        try:
            self.put(role, self.ends[role].end(at[1]))
        except ValueError:
            return

    @rule(at=consumes(streams), role=st.sampled_from(["host", "guest"]))
    def give_up(self, at: tuple[str, int], role: str) -> None:
        """Reset a stream, whatever state it is in."""
        if at[1]:
            self.put(role, self.ends[role].reset(at[1], {"why": "test"}))
            self.reset.add(at[1])

    @rule(at=streams, role=st.sampled_from(["host", "guest"]), count=st.integers(1, 8))
    def consume(self, at: tuple[str, int], role: str, count: int) -> None:
        """Give back credit for what was heard."""
        waiting = self.unconsumed.get((role, at[1]), deque())
        for _ in range(min(count, len(waiting))):
            self.put(role, self.ends[role].consumed(at[1], waiting.popleft()))

    @precondition(lambda self: any(self.under_way.values()))
    @rule(role=st.sampled_from(["host", "guest"]), size=st.integers(1, WINDOW))
    def deliver(self, role: str, size: int) -> None:
        """Some of the bytes under way arrive. An honest peer never breaks a rule."""
        chunk = bytes(self.under_way[role][:size])
        del self.under_way[role][:size]
        for event in self.ends[role].receive(chunk):
            self.hear(role, event)

    def hear(self, role: str, event: wire.WireEvent) -> None:
        """Check one event against the model."""
        what, stream, *said = event
        if what == "data":
            key = (self.other(role), stream)
            assert (role, stream) not in self.ended
            self.heard.setdefault(key, bytearray()).extend(said[0])
            heard = self.heard[key]
            assert self.sent[key][len(heard) - len(said[0]) : len(heard)] == said[0]
            self.unconsumed.setdefault((role, stream), deque()).append(len(said[0]))
        elif what == "end":
            assert (role, stream) not in self.ended
            self.ended[role, stream] = 1

    @invariant()
    def what_a_peer_holds_is_bounded(self) -> None:
        """Neither end waits for more than the window of any stream."""
        for (role, _stream), waiting in getattr(self, "unconsumed", {}).items():
            assert sum(waiting) <= WINDOW, role

    def teardown(self) -> None:
        """Let everything arrive: then all that was sent was heard, but on streams that were reset."""
        if not hasattr(self, "ends"):
            return
        while any(self.under_way.values()):
            for role in ("host", "guest"):
                if self.under_way[role]:
                    chunk = bytes(self.under_way[role])
                    self.under_way[role].clear()
                    for event in self.ends[role].receive(chunk):
                        self.hear(role, event)
        for (role, stream), data in self.sent.items():
            if stream not in self.reset:
                assert self.heard.get((role, stream), bytearray()) == data


Conversation.TestCase.settings = draws(60, stateful_step_count=40)
TestConversation = Conversation.TestCase
