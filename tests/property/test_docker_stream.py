"""The Engine's attach stream is taken apart the same way however its bytes arrive, and holds nothing back."""

import anyio
import pytest
from anyio.abc import ByteStream
from hypothesis import given
from hypothesis import strategies as st

from glovebox_sandboxes.drivers.docker.engine import ENGINE_ERROR, STDERR, STDOUT, AttachedStream

frames = st.lists(st.tuples(st.sampled_from([STDOUT, STDERR, ENGINE_ERROR]), st.binary(max_size=200)), max_size=20)


class Pieces(ByteStream):
    """The Engine: one read gives one piece, or as much of it as was asked for."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = [piece for piece in pieces if piece]

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """The next piece."""
        if not self.pieces:
            raise anyio.EndOfStream
        piece = self.pieces.pop(0)
        if piece[max_bytes:]:
            self.pieces.insert(0, piece[max_bytes:])
        return piece[:max_bytes]

    async def send(self, item: bytes) -> None:
        """Nothing to do."""

    async def send_eof(self) -> None:
        """Nothing to do."""

    async def aclose(self) -> None:
        """Nothing to do."""


def encode(sent: list[tuple[int, bytes]]) -> bytes:
    """What the Engine sends for these payloads."""
    return b"".join(bytes([stream, 0, 0, 0]) + len(data).to_bytes(4, "big") + data for stream, data in sent)


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    """The bytes in pieces of these sizes; the rest is the last piece."""
    pieces, at = [], 0
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    return [*pieces, data[at:]]


def read(pieces: list[bytes]) -> tuple[list[bytes], str]:
    """All reads of standard output until the end, and the last words."""

    async def all_of_it() -> tuple[list[bytes], str]:
        stream, found = AttachedStream(Pieces(pieces)), []
        while True:
            try:
                found.append(await stream.receive(100))
            except anyio.EndOfStream:
                return found, stream.last_words

    return anyio.run(all_of_it)


@given(sent=frames, sizes=st.lists(st.integers(min_value=0, max_value=50), max_size=60))
def test_every_cut_of_the_bytes_gives_the_same_streams(sent: list[tuple[int, bytes]], sizes: list[int]) -> None:
    """Each stream's payload comes out whole and in order, however the bytes are cut."""
    reads, words = read(cut(encode(sent), sizes))
    assert b"".join(reads) == b"".join(data for number, data in sent if number == STDOUT)
    errors = b"".join(data for number, data in sent if number != STDOUT)
    assert words == errors[-2000:].decode(errors="replace")
    assert all(0 < len(each) <= 100 for each in reads)


@given(data=st.binary(max_size=400))
def test_arbitrary_bytes_are_refused_or_passed_on_and_never_grow(data: bytes) -> None:
    """Bytes that are no attach stream end it, or are no more payload than there were bytes."""
    assert sum(map(len, read([data])[0])) <= len(data)


@pytest.mark.parametrize("header", [b"\0\0\0\0\0\0\0\1", b"\4\0\0\0\0\0\0\1", b"\1\0\0\1\0\0\0\1", b"HTTP/1.1"])
def test_a_header_of_another_kind_is_the_end(header: bytes) -> None:
    """Standard input's number, an unknown stream, filled padding, or text (a terminal, an HTTP error)."""
    assert read([header + b"x"]) == ([], "")
    assert read([encode([(STDOUT, b"x")])]) == ([b"x"], "")  # the control


def test_a_false_length_makes_nothing_wait() -> None:
    """Control for the bound: a frame that announces 4 GiB is passed on as its bytes come, not collected."""
    assert read([b"\1\0\0\0\xff\xff\xff\xffhello"]) == ([b"hello"], "")
