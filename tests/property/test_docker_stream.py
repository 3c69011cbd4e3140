"""The Engine's attach stream is taken apart the same way however its bytes arrive, and holds nothing back."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glovebox_sandboxes.drivers.docker.stream import ENGINE_ERROR, HEADER_BYTES, STDERR, STDOUT, Chunk, Demultiplexer

frames = st.lists(st.tuples(st.sampled_from([STDOUT, STDERR, ENGINE_ERROR]), st.binary(max_size=200)), max_size=20)


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


def joined(chunks: list[Chunk], stream: int) -> bytes:
    """The payload of one stream."""
    return b"".join(chunk.data for chunk in chunks if chunk.stream == stream)


@given(sent=frames, sizes=st.lists(st.integers(min_value=0, max_value=50), max_size=60))
def test_every_cut_of_the_bytes_gives_the_same_streams(sent: list[tuple[int, bytes]], sizes: list[int]) -> None:
    """Each stream's payload comes out whole and in order, however the bytes are cut."""
    demultiplexer = Demultiplexer()
    chunks = [chunk for piece in cut(encode(sent), sizes) for chunk in demultiplexer.receive(piece)]

    for stream in (STDOUT, STDERR, ENGINE_ERROR):
        assert joined(chunks, stream) == b"".join(data for number, data in sent if number == stream)
    assert all(chunk.data for chunk in chunks)


@given(sent=frames, sizes=st.lists(st.integers(min_value=1, max_value=50), max_size=60))
def test_payload_is_handed_on_at_once(sent: list[tuple[int, bytes]], sizes: list[int]) -> None:
    """After every piece, what has come and is not a header has been handed on: nothing but a header is ever held."""
    demultiplexer = Demultiplexer()
    came = handed_on = 0
    for piece in cut(encode(sent), sizes):
        came += len(piece)
        handed_on += sum(len(chunk.data) for chunk in demultiplexer.receive(piece))
        complete_headers = 0
        at = 0
        for _, data in sent:
            if at + HEADER_BYTES <= came:
                complete_headers += 1
            at += HEADER_BYTES + len(data)
        assert came - handed_on - complete_headers * HEADER_BYTES in range(HEADER_BYTES)


@given(data=st.binary(max_size=400))
def test_arbitrary_bytes_are_refused_or_passed_on_and_never_grow(data: bytes) -> None:
    """Bytes that are no attach stream end in ValueError, or in no more payload than there were bytes."""
    chunks: list[Chunk] = []
    with contextlib.suppress(ValueError):
        chunks = Demultiplexer().receive(data)
    assert sum(len(chunk.data) for chunk in chunks) <= len(data)


@pytest.mark.parametrize("header", [b"\0\0\0\0\0\0\0\1", b"\4\0\0\0\0\0\0\1", b"\1\0\0\1\0\0\0\1", b"HTTP/1.1"])
def test_a_header_of_another_kind_is_refused(header: bytes) -> None:
    """Standard input's number, an unknown stream, filled padding, or text (a terminal, an HTTP error)."""
    with pytest.raises(ValueError, match=header.hex()):
        Demultiplexer().receive(header)


def test_a_false_length_makes_nothing_wait() -> None:
    """Control for the bound: a frame that announces 4 GiB is passed on as its bytes come, not collected."""
    demultiplexer = Demultiplexer()
    assert demultiplexer.receive(b"\1\0\0\0\xff\xff\xff\xffhello") == [Chunk(STDOUT, b"hello")]
