"""A server may send any bytes in any pieces: it is read as a response or refused with one sentence."""

from collections.abc import Sequence
from itertools import pairwise
from zlib import compress

import anyio
import anyio.abc
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from glovebox_profiles.egress.targets import parse_url
from glovebox_server.egress.events import EgressLimits, PeerError
from glovebox_server.egress.request import Exchange, RequestClock, request_headers

LIMITS = EgressLimits(header_bytes=500, body_bytes=500, ratio_grace_bytes=100)
STARTS = [
    b"",
    b"HTTP/1.1 200 OK\r\n",
    b"HTTP/1.1 200 OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: ",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 30\r\n\r\n\x1f\x8b\x08\0\0\0\0\0\0\3",
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"HTTP/1.1 304 Not Modified\r\nLocation: ",
]


class Canned(anyio.abc.ByteStream):
    """A peer that sends these pieces, whatever it is asked, and closes."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """Keep the pieces."""
        self._pieces = [piece for piece in pieces if piece]

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Hand out the next piece, cut to size."""
        if not self._pieces:
            raise anyio.EndOfStream
        piece = self._pieces.pop(0)
        if piece[max_bytes:]:
            self._pieces.insert(0, piece[max_bytes:])
        return piece[:max_bytes]

    async def send(self, item: bytes) -> None:
        """Take the request."""

    async def send_eof(self) -> None:
        """Nothing to do."""

    async def aclose(self) -> None:
        """Nothing to do."""


async def read(pieces: Sequence[bytes]) -> tuple[str, bytes]:
    """Make one request of a canned peer; return how it ended, and the body."""
    body = b""
    exchange = Exchange(Canned(pieces), RequestClock(LIMITS), LIMITS)
    target = parse_url("GET", "http://files.example.org/")
    await exchange.send(target, request_headers([], "GET", b"", LIMITS)[0], b"")
    try:
        status, _ = await exchange.head()
        async for piece in exchange.body():
            body += piece
    except PeerError as failed:
        return str(failed), body
    return str(status), body


@given(st.sampled_from(STARTS), st.lists(st.binary(max_size=80), max_size=8))
@example(b"HTTP/1.1 200 OK\r\nContent-Length: ", [b"9" * 450, b"\r\n\r\n"])
@example(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", [b"f" * 100, b"\r\n"])
@example(b"HTTP/1.1 200 OK\r\n\r\n", [b"x" * 2000])
def test_any_response_ends_in_a_status_or_a_sentence(start: bytes, pieces: list[bytes]) -> None:
    """E16: total and bounded, and what a message repeats of the bytes is printable."""
    end, body = anyio.run(read, [start, *pieces])
    assert len(body) <= LIMITS.body_bytes
    assert end.isprintable()
    assert end.isdigit() or end.endswith(".")


@pytest.mark.parametrize(
    ("headers", "content", "reason"),
    [
        ("Content-Encoding: br", b"x", "a content encoding that was not asked for"),
        ("Content-Encoding: gzip, deflate", b"x", "a content encoding that was not asked for"),
        ("Content-Encoding: deflate", compress(b"x") + b"y", "Bytes follow the end"),
        ("Content-Encoding: deflate", compress(b"x")[:-1], "The compressed body is truncated."),
        (f"X: {'x' * 500}", b"x", "more than 500 bytes of headers"),
        ("Content-Encoding: deflate", compress(b"x"), "200"),
    ],
)
async def test_a_body_that_is_not_what_its_head_says_is_refused_by_its_reason(
    headers: str, content: bytes, reason: str
) -> None:
    """The last is the control."""
    end, body = await read([f"HTTP/1.1 200 OK\r\n{headers}\r\n\r\n".encode() + content])
    assert reason in end
    assert body in (b"", b"x")


@given(st.binary(max_size=400), st.lists(st.integers(min_value=0, max_value=600), max_size=5))
def test_a_good_response_is_read_whole_however_it_is_cut(body: bytes, cuts: list[int]) -> None:
    """The control: where packets end says nothing."""
    response = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    at = sorted({0, *cuts, len(response)})
    pieces = [response[start:end] for start, end in pairwise(at)]
    assert anyio.run(read, pieces) == ("200", body)
