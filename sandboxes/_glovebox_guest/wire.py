"""The wire: the one framed byte stream between broker and guest. Sans-I/O: no sockets, no files, no clock.

Runs on both sides, so it imports the standard library only, and little of it: the guest pays for every import.

Rule 1   A frame is ``type: u8, stream: u32, length: u32`` (network order) and ``length`` bytes of payload.
Rule 2   Payloads of DATA are 1 to MAX_DATA raw bytes: an empty one would cost no credit. That of END is empty. All
         others are a JSON object of at most MAX_MESSAGE, or MAX_JOB for the host's message.
Rule 3   Stream 0 carries messages. They come in this order and each once: ``ready`` from the guest, ``job`` from the
         host, ``outcome`` from the guest, which then sends no frame of any type. While the job runs the host may send
         ``stop``.
Rule 4   Streams are opened while a job runs. The guest's have odd ids, the host's even ones; ids only grow, up
         to MAX_STREAM; at most MAX_OPEN are open at once. A stream is one-way (opener to peer) unless it was opened
         as ``duplex``.
Rule 5   A sender has WINDOW bytes of credit per stream and direction, and gets more only by WINDOW frames. Sending past
         the credit is a protocol error, so what a peer can make us hold is bounded by MAX_OPEN * WINDOW.
Rule 6   A direction ends with END; a stream ends when each of its directions has ended, or at once with RESET.
         Frames for a stream that has ended are an error, except WINDOW and RESET, which may have crossed on the way,
         and frames that were under way when we sent RESET.
Rule 7   ACCEPT answers an OPEN: only the side that accepted a duplex stream may send it, and once.
Rule 8   All JSON of one side has at most MAX_SAID_BYTES and MAX_SAID_NODES together, and each payload the bounds of
         ``jsontext``: both are computed from bytes, before parsing.
Rule 9   A frame that breaks a rule is the peer's fault: ``ProtocolError``, after which the connection is unusable. A
         call that breaks a rule is ours: ``ValueError``.
"""

from __future__ import annotations

import struct

from _glovebox_guest.jsontext import MAX_LISTED, MAX_NODES, bound, dumps, loads
from _glovebox_guest.stdlib import Any, Callable, Mapping, TypeAlias

MAX_DATA = 256 * 1024
"""Bytes in one DATA frame: large enough that framing costs nothing, small enough to interleave streams fairly."""
MAX_MESSAGE = 1024 * 1024
"""Bytes in one JSON payload: far above any measurement, address or header we expect."""
MAX_JOB = 4 * 1024 * 1024
"""Bytes in the job: a program of 262,144 characters, each of which JSON may spell with 12 bytes, with room to spare."""
WINDOW = 1024 * 1024
MAX_OPEN = 64
"""Open streams at once; outputs are sent one after another, so only egress connections add up."""

MAX_STREAM = 65_535
"""Highest stream id: bounds what is remembered of ended streams."""

MAX_SAID_BYTES = 16 * 1024 * 1024
"""Total bytes of JSON: a proxy's 8,192 streams with 2 KiB of address and headers each."""
MAX_SAID_NODES = 512 * 1024
"""Total values and keys: 20 for each of those streams, and credit for the traffic of 64 tunnels."""

_HEADER = struct.Struct("!BII")
_MESSAGE, _OPEN, _DATA, _ACCEPT, _END, _RESET, _WINDOW = range(1, 8)


class ProtocolError(Exception):
    """The peer broke a rule of the wire; the connection cannot be trusted any more."""


WireEvent: TypeAlias = "tuple[Any, ...]"
"""The meaning of a frame: a word, the stream, and for all but the last three what it carries.

``message``  kind and body, as fields: ``ready``, ``job``, ``stop`` or ``outcome``
``open``     kind, meta and duplex, as fields: a new stream, and what it carries
``data``     bytes of a stream
``accept``   the answer to an OPEN, before any data; for instance the head of a response
``reset``    the end of a stream in both directions, with the reason
``end``      no more data in this direction
``credit``   more bytes may be sent on this stream
``nothing``  without effect: of a stream that has ended (rule 6)
"""

# Messages by sender and state, with the next state. Anything not in this table is a protocol error.
_MESSAGES: dict[tuple[str, str, str], str] = {
    ("starting", "guest", "ready"): "ready",
    ("ready", "host", "job"): "running",
    ("running", "host", "stop"): "running",
    ("running", "guest", "outcome"): "done",
}


class _Stream:
    noted = False
    credit = WINDOW
    """Bytes we may still send."""
    allowed = WINDOW
    """Bytes the peer may still send."""
    owed = 0
    """Bytes consumed here and not credited to the peer yet."""

    def __init__(self, *, we_send: bool, they_send: bool, ours: bool) -> None:
        self.we_send, self.they_send = we_send, they_send
        self.ours = ours  # whether we opened it


class Wire:
    """One end of the wire: turns received bytes into events, and messages into bytes."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._peer = "guest" if role == "host" else "host"
        self.state = "starting"
        """``starting``, ``ready``, ``running`` or ``done``."""
        self._buffer = bytearray()
        self._streams: dict[int, _Stream] = {}
        self._last = {"host": 0, "guest": -1}  # last id each side opened: the next ones are 2 and 1
        self._dropped: set[int] = set()  # streams we reset: the peer may not know yet
        self._bytes_left, self._nodes_left = MAX_SAID_BYTES, MAX_SAID_NODES  # of what the peer may say in JSON

    def resume(self, last: int) -> None:
        """Continue while the job runs, after a process that has opened streams up to ``last`` and ended all of them."""
        self.state = "running"
        self._last["guest"] = last

    # ------------------------------------------------------------------ sending

    def message(self, kind: str, body: Mapping[str, Any]) -> bytes:
        """Return the bytes of a message; raises ValueError where rule 3 forbids it or the body is too long."""
        following = _MESSAGES.get((self.state, self._role, kind))
        if following is None:
            raise ValueError(f"{self._role} may not say {kind!r} while {self.state}")
        payload = _encode({"kind": kind, "body": body}, MAX_JOB if self._role == "host" else MAX_MESSAGE)
        self.state = following
        return _frame(_MESSAGE, 0, payload)

    def open(self, kind: str, meta: Mapping[str, Any] | None = None, *, duplex: bool = False) -> tuple[int, bytes]:
        """Open a stream; return its id and the bytes to send. Raises ValueError at MAX_OPEN or when no job runs."""
        if self.state != "running":
            raise ValueError(f"no stream can be opened while {self.state}")
        if len(self._streams) >= MAX_OPEN:
            raise ValueError(f"{MAX_OPEN} streams are open already")
        stream = self._last[self._role] + 2
        if stream > MAX_STREAM:
            raise ValueError(f"stream ids are used up at {MAX_STREAM}")
        payload = _encode({"kind": kind, "meta": meta or {}, "duplex": duplex})
        self._last[self._role] = stream
        self._streams[stream] = _Stream(we_send=True, they_send=duplex, ours=True)
        return stream, _frame(_OPEN, stream, payload)

    def is_open(self, stream: int) -> bool:
        """Return whether the stream is open in any direction."""
        return stream in self._streams

    def credit(self, stream: int) -> int:
        """Return the bytes that may be sent on the stream now; 0 for one that is not ours to send on."""
        known = self._streams.get(stream)
        return known.credit if known is not None and known.we_send else 0

    def _sending(self, stream: int) -> _Stream:
        known = self._streams.get(stream)
        if known is None or not known.we_send:
            raise ValueError(f"stream {stream} is not open for sending")
        return known

    def data(self, stream: int, data: bytes | bytearray | memoryview) -> bytes:
        """Return frames for ``data``; raises ValueError beyond the credit or where we may not send."""
        known = self._sending(stream)
        if len(data) > known.credit:
            raise ValueError(f"{len(data)} bytes exceed the credit of {known.credit} on stream {stream}")
        known.credit -= len(data)
        view = memoryview(data)
        return b"".join(_frame(_DATA, stream, view[at : at + MAX_DATA]) for at in range(0, len(data), MAX_DATA))

    def accept(self, stream: int, body: Mapping[str, Any]) -> bytes:
        """Answer the peer's OPEN with a JSON object (rule 7)."""
        known = self._sending(stream)
        if known.ours or known.noted:
            raise ValueError(f"stream {stream} takes no note")
        known.noted = True
        return _frame(_ACCEPT, stream, _encode(body))

    def end(self, stream: int) -> bytes:
        """End our direction of a stream."""
        known = self._sending(stream)
        known.we_send = False
        if not known.they_send:
            del self._streams[stream]
        return _frame(_END, stream, b"")

    def reset(self, stream: int, body: Mapping[str, Any] | None = None) -> bytes:
        """End a stream at once; return empty bytes where it has ended already."""
        if self._streams.pop(stream, None) is None:
            return b""
        self._dropped.add(stream)
        return _frame(_RESET, stream, _encode(body or {}))

    def consumed(self, stream: int, count: int) -> bytes:
        """Count processed bytes; return a WINDOW frame once half a window is owed, else empty bytes."""
        known = self._streams.get(stream)
        if known is None or not known.they_send:
            return b""
        known.owed += count
        if known.owed < WINDOW // 2:
            return b""
        credit, known.owed = known.owed, 0
        known.allowed += credit
        return _frame(_WINDOW, stream, _encode({"credit": credit}))

    # ---------------------------------------------------------------- receiving

    def receive(self, data: bytes) -> list[WireEvent]:
        """Return all events up to the end of ``data``; raises like ``event``, and earlier events are lost."""
        self.feed(data)
        return [event for event in iter(self.event, None) if event[0] != "nothing"]

    def feed(self, data: bytes) -> None:
        """Take the next bytes, for ``event``."""
        self._buffer += data

    @property
    def holds(self) -> int:
        """Return the number of bytes that were fed and are of no event yet."""
        return len(self._buffer)

    def event(self) -> WireEvent | None:
        """Return the next whole frame's event, or None; a reader can pause in between. Raises ProtocolError."""
        buffer = self._buffer
        if buffer:  # also of less than a frame, so that the verdict does not depend on how bytes are split
            self._end_with_the_outcome()
        if len(buffer) < _HEADER.size:
            return None
        kind, stream, length = _HEADER.unpack_from(buffer)
        if kind not in _FRAMES:
            raise ProtocolError(f"unknown frame type {kind}")
        # Checked before the payload arrives: a false length must not make us wait for, or hold, 4 GiB.
        longest, fields, take = _FRAMES[kind]
        if length > (MAX_JOB if kind == _MESSAGE and self._role == "guest" else longest):
            raise ProtocolError(f"a frame of type {kind} announces {length} bytes")
        end = _HEADER.size + length
        if len(buffer) < end:
            return None
        with memoryview(buffer) as view:
            payload = bytes(view[_HEADER.size : end])
        del buffer[:end]  # moves nothing: the array begins later
        event = take(self, kind, stream, payload if fields is None else self._decode(kind, payload, fields))
        if buffer:
            self._end_with_the_outcome()
        return event

    def _end_with_the_outcome(self) -> None:
        if self.state == "done" and self._role == "host":
            raise ProtocolError("a frame after the outcome")

    def _on_message(self, _: int, stream: int, said: Any) -> WireEvent:
        if stream != 0:
            raise ProtocolError("a message belongs to stream 0")
        following = _MESSAGES.get((self.state, self._peer, said["kind"]))
        if following is None:
            raise ProtocolError(f"{self._peer} may not say {said['kind'][:40]!r} while {self.state}")
        self.state = following
        return "message", stream, said

    def _on_open(self, _: int, stream: int, said: Any) -> WireEvent:
        if self.state != "running":
            raise ProtocolError(f"{self._peer} may not open a stream while {self.state}")
        if stream % 2 != self._last[self._peer] % 2 or not self._last[self._peer] < stream <= MAX_STREAM:
            raise ProtocolError(f"{self._peer} may not open stream {stream}")
        if len(self._streams) >= MAX_OPEN:
            raise ProtocolError(f"{self._peer} opened more than {MAX_OPEN} streams at once")
        self._last[self._peer] = stream
        self._streams[stream] = _Stream(we_send=said["duplex"], they_send=True, ours=False)
        return "open", stream, said

    def _on_sent(self, kind: int, stream: int, said: Any) -> WireEvent:
        """Take DATA, ACCEPT or END: the peer may send on the stream, unless we have just reset it."""
        known = self._streams.get(stream)
        if known is None:
            if stream in self._dropped:
                return "nothing", stream
            raise ProtocolError(f"stream {stream} is not open")
        if not known.they_send:
            raise ProtocolError(f"{self._peer} may not send on stream {stream}")
        if kind == _END:
            known.they_send = False
            if not known.we_send:
                del self._streams[stream]
            return "end", stream
        if kind == _ACCEPT:
            if not known.ours or known.noted:
                raise ProtocolError(f"{self._peer} may not send a note on stream {stream}")
            known.noted = True
            return "accept", stream, said
        if not said:
            raise ProtocolError(f"no bytes on stream {stream}")
        if len(said) > known.allowed:
            raise ProtocolError(f"{len(said)} bytes exceed the window of {known.allowed} on stream {stream}")
        known.allowed -= len(said)
        return "data", stream, said

    def _on_late(self, kind: int, stream: int, said: Any) -> WireEvent:
        """Take RESET or WINDOW, which may have crossed the stream's end."""
        # A peer can only give back what it has taken, so honest credit never exceeds one window.
        if kind == _WINDOW and not 0 < said["credit"] <= WINDOW:
            raise ProtocolError(f"a credit of {said['credit']} bytes")
        known = self._streams.get(stream)
        if known is None or (kind == _WINDOW and not known.we_send):
            if stream == 0 or stream > self._last["guest" if stream % 2 else "host"]:
                raise ProtocolError(f"stream {stream} was never opened")
            return "nothing", stream
        if kind == _RESET:
            del self._streams[stream]
            return "reset", stream, said
        known.credit += said["credit"]
        if known.credit > WINDOW:
            raise ProtocolError(f"more credit on stream {stream} than its window")
        return "credit", stream

    def _decode(self, kind: int, payload: bytes, fields: Mapping[str, type]) -> dict[str, Any]:
        """Parse a JSON object whose keys are exactly ``fields`` (any keys when empty), each of exactly that type."""
        try:
            self._nodes_left -= bound(payload, MAX_NODES if kind == _MESSAGE else MAX_LISTED)
            self._bytes_left -= len(payload)
            if self._nodes_left < 0 or self._bytes_left < 0:
                raise ProtocolError(f"{self._peer} says more than {MAX_SAID_BYTES} bytes or {MAX_SAID_NODES} values")
            body = loads(payload.decode())
        # An array without its end is a RecursionError; over-long integers and bad UTF-8 are ValueErrors.
        except (ValueError, RecursionError) as problem:
            raise ProtocolError(f"a payload is not JSON: {problem}") from None
        if type(body) is not dict:
            raise ProtocolError("a payload is not a JSON object")
        if fields and (body.keys() != fields.keys() or any(type(body[key]) is not fields[key] for key in fields)):
            raise ProtocolError(f"a payload's fields are not {sorted(fields)}")
        return body


_FRAMES: Mapping[int, tuple[int, Mapping[str, type] | None, Callable[[Wire, int, int, Any], WireEvent]]] = {
    _MESSAGE: (MAX_MESSAGE, {"kind": str, "body": dict}, Wire._on_message),
    _OPEN: (MAX_MESSAGE, {"kind": str, "meta": dict, "duplex": bool}, Wire._on_open),
    _DATA: (MAX_DATA, None, Wire._on_sent),
    _ACCEPT: (MAX_MESSAGE, {}, Wire._on_sent),
    _END: (0, None, Wire._on_sent),
    _RESET: (MAX_MESSAGE, {}, Wire._on_late),
    _WINDOW: (MAX_MESSAGE, {"credit": int}, Wire._on_late),
}
"""By type: the longest payload, fields of its JSON, none for raw bytes, and what takes the frame."""


def _frame(kind: int, stream: int, payload: bytes | memoryview) -> bytes:
    return _HEADER.pack(kind, stream, len(payload)) + payload


def _encode(body: Mapping[str, Any], longest: int = MAX_MESSAGE) -> bytes:
    payload = dumps(body)
    if len(payload) > longest:
        raise ValueError(f"a payload of {len(payload)} bytes exceeds {longest}")
    return payload
