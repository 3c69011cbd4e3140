"""Content encodings: what zlib itself reads, in bounded pieces and within the ratio, however the bytes are cut."""

import zlib

from tests.fuzz.harness import bounded, pieces

from glovebox_server.egress.events import PeerError
from glovebox_server.egress.request import PIECE_BYTES, BodyDecoder

_ENCODINGS = ("gzip", "deflate", "", "identity", "x-gzip", "GZIP ", "br", "gzip, deflate")
_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_RATIO, _GRACE = 100, 64 * 1024
_PACKED = 1024 * 1024  # bytes that are packed for the fuzzer: far beyond the ratio, in little time
_MOST = 8 * 1024 * 1024  # decoded bytes of the second reading: more than any input of 64 KiB may become
_BOMB = "The body decompresses to more than 100 times its size."


def _packed(data: bytes, name: str) -> bytes:
    """Pack repetitions of the input, then break what its edits break: two bytes of place and one to put there."""
    # First byte: how many edits; second and third: how often what follows them is repeated.
    if len(data) < 3:
        return data
    edits, rest = data[3 : 3 + 3 * (data[0] % 4)], data[3 + 3 * (data[0] % 4) :]
    times = min(int.from_bytes(data[1:3]), _PACKED // (len(rest) or 1))
    packer = zlib.compressobj(wbits=_WINDOWS.get(name, zlib.MAX_WBITS))
    made = bytearray(packer.compress(rest * times) + packer.flush())
    for at in range(0, len(edits) - 2, 3):
        place = int.from_bytes(edits[at : at + 2]) % (len(made) + 1)
        made[place : place + 1] = edits[at + 2 : at + 3]
    return bytes(made)


def _read(name: str, data: bytes, size: int) -> tuple[bytes, str]:
    """Return what came out, and why it ended; the reason is empty where all is well."""
    made, received = bytearray(), 0
    decoder = BodyDecoder(name, ratio=_RATIO, grace=_GRACE)
    packed = name.strip().lower() not in {"", "identity"}
    try:
        for piece in pieces(data, size):
            received += len(piece)
            for decoded in decoder.feed(piece):
                assert len(decoded) <= PIECE_BYTES or not packed
                made += decoded
                assert len(made) <= _GRACE + _RATIO * received
        decoder.finish()
    except PeerError as error:
        return bytes(made), str(error)
    return bytes(made), ""


def _expected(data: bytes) -> bytes | None:
    """The body as zlib alone reads it; None where it is not exactly one whole stream."""
    reader = zlib.decompressobj(32 + zlib.MAX_WBITS)
    try:
        made = reader.decompress(data, _MOST)
    except zlib.error:
        return None
    return made if reader.eof and not reader.unused_data else None


def check(data: bytes) -> None:
    """First byte: the encoding and whether the input is packed for the fuzzer; second: the size of pieces."""
    if len(data) < 2:
        return
    name = _ENCODINGS[data[0] % len(_ENCODINGS)]
    content = _packed(data[2:], name) if data[0] & 128 else data[2:]
    try:
        BodyDecoder(name, ratio=_RATIO, grace=_GRACE)
    except PeerError:
        assert name in {"br", "gzip, deflate"}
        return
    with bounded():
        whole, reason = _read(name, content, 0)
        cut, again = _read(name, content, data[1] or 1)
    assert whole.startswith(cut) or cut.startswith(whole)
    # How much has been received when a piece comes out depends on how the bytes were cut.
    if _BOMB not in (reason, again):
        assert bool(reason) == bool(again)
        assert reason or whole == cut  # what zlib had decoded before it met a flaw is lost with it
    if name in {"", "identity"}:
        assert (whole, reason) == (content, "")
    elif not content:
        assert (whole, reason) == (b"", "")
    else:
        expected = _expected(content)
        if reason == _BOMB:
            assert expected is None or len(expected) > _GRACE
        else:
            assert (expected is None) == bool(reason)
            assert expected is None or whole == expected
