"""Result frames and captured streams against arbitrary bytes and arbitrary cuts."""

import json
import re

from hypothesis import given
from hypothesis import strategies as st

from _glovebox_guest.program.emit import BLOB, HEADER, VALUE
from glovebox_sandboxes.session.run import MAX_BLOB, MAX_BLOB_BYTES, MAX_BLOBS, HeadAndTail, ResultReader


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """One frame, mostly of the right form."""
    kind = draw(st.sampled_from([VALUE, VALUE, BLOB, BLOB, 0]))
    payload = draw(
        st.sampled_from([b"1", b'{"value":"x"}', b'"\\ud800"', b"1e999", b"image/png\0\x89PNG\r\n\x1a\n"])
        | st.binary(max_size=20)
    )
    length = draw(st.sampled_from([len(payload)] * 9 + [2**32 - 1]))
    return HEADER.pack(kind, length) + payload


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    """The same bytes in pieces."""
    pieces, at, n = [], 0, 0
    while at < len(data):
        size = cuts[n % len(cuts)]
        pieces.append(data[at : at + size])
        at, n = at + size, n + 1
    return pieces


@given(
    st.lists(frames(), max_size=80).map(b"".join) | st.binary(max_size=200), st.lists(st.integers(1, 50), min_size=1)
)
def test_any_bytes_are_read_within_bounds_however_they_are_cut(data: bytes, cuts: list[int]) -> None:
    """Nothing is raised, nothing grows, and what was read can be written as UTF-8 JSON again."""
    whole, parts = ResultReader(), ResultReader()
    whole.feed(data)
    for piece in cut(data, cuts):
        parts.feed(piece)
        assert len(parts._buffer) <= MAX_BLOB + HEADER.size
    assert (whole.value, whole.blobs, whole.problems) == (parts.value, parts.blobs, parts.problems)
    assert len(whole.problems) <= MAX_BLOBS + 2
    assert len(whole.blobs) <= MAX_BLOBS
    assert sum(len(blob.data) for blob in whole.blobs) <= MAX_BLOB_BYTES
    json.dumps(whole.value, ensure_ascii=False, allow_nan=False).encode()


@given(st.lists(st.binary(max_size=40), max_size=40), st.integers(1, 200))
def test_head_tail_and_gap_are_the_whole(chunks: list[bytes], limit: int) -> None:
    """Kept bytes are the first and the last ones, never more than the limit, and the gap's count is exact."""
    kept = HeadAndTail(limit)
    for chunk in chunks:
        kept.feed(chunk)
    data = b"".join(chunks)
    captured = kept.captured()
    assert captured.total_bytes == len(data)
    head, tail = bytes(kept._head), bytes(kept._tail)
    assert len(head) + len(tail) + captured.dropped_bytes == len(data)
    assert len(head) + len(tail) <= limit
    assert data.startswith(head)
    assert data.endswith(tail)
    assert (captured.dropped_bytes > 0) == (len(data) > limit)
    if len(data) <= limit:
        assert captured.text == data.decode("utf-8", "replace")
    else:
        (gap,) = re.findall(r"\n\[… (\d+) bytes left out …\]\n", captured.text)[-1:] or [None]
        assert gap == str(captured.dropped_bytes)


@given(st.integers(1, 64), st.integers(1, 7), st.integers(0, 500))
def test_a_stream_of_equal_pieces_is_held_within_its_limit(limit: int, piece: int, count: int) -> None:
    """The first of the tail falls out at once."""
    kept = HeadAndTail(limit)
    for n in range(count):
        kept.feed(bytes([n % 256]) * piece)
        assert len(kept._head) + len(kept._tail) <= limit
