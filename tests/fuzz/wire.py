"""The wire against any peer: ProtocolError or events, however the bytes are cut, in bounded memory."""

import struct

from tests.fuzz.harness import pieces

from _glovebox_guest.wire import MAX_JOB, MAX_OPEN, MAX_STREAM, WINDOW, ProtocolError, Wire, WireEvent

HEADER = struct.Struct("!BII")


def _end(role: int, running: int) -> Wire:
    host, guest = Wire("host"), Wire("guest")
    if running:
        host.receive(guest.message("ready", {}))
        guest.receive(host.message("job", {}))
        # One duplex stream of our own, so that NOTE and WINDOW have something to answer.
        (host if role else guest).open("fuzz", duplex=True)
    return host if role else guest


def _frames(data: bytes) -> bytes:
    """Read ``type, stream, length`` of one byte each and a payload: frames that are whole more often than not."""
    made, at = bytearray(), 0
    while at + 3 <= len(data):
        kind, stream, length = data[at : at + 3]
        payload = data[at + 3 : at + 3 + length]
        made += HEADER.pack(kind, stream, len(payload)) + payload
        at += 3 + length
    return bytes(made)


def _outcome(end: Wire, data: bytes, size: int) -> tuple[list[WireEvent], str | None]:
    events: list[WireEvent] = []
    try:
        for piece in pieces(data, size):
            events += end.receive(piece)
            assert len(end._buffer) <= MAX_JOB + HEADER.size
            assert len(end._streams) <= MAX_OPEN
            assert all(0 <= known.allowed <= WINDOW for known in end._streams.values())
            assert all(0 <= known.credit <= WINDOW for known in end._streams.values())
            assert all(0 < stream <= MAX_STREAM for stream in end._streams)
    except ProtocolError as error:
        return events, str(error)
    return events, None


def check(data: bytes) -> None:
    """First byte: role, state and whether what follows is framed for the fuzzer; second: the size of pieces."""
    if len(data) < 2:
        return
    role, running, framed = data[0] & 1, data[0] & 2, data[0] & 4
    content = _frames(data[2:]) if framed else data[2:]
    whole, reason = _outcome(_end(role, running), content, 0)
    cut, again = _outcome(_end(role, running), content, data[1] or 1)
    assert again == reason
    # Events before the error are lost with it in the bytes that came together, so the cut run may have seen more.
    assert cut[: len(whole)] == whole
    assert reason is not None or cut == whole
