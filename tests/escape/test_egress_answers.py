"""Hostile answers of allowed servers, over real sockets in network namespaces (E10, E16).

Each is shown with its control: the same answer without the flaw arrives whole.
"""

import gzip
from itertools import count

import anyio
import anyio.abc
import pytest
from tests.fixtures.guest_streams import End, Failed
from tests.fixtures.internet import (
    OTHER,
    SITE,
    Cable,
    Handler,
    Internet,
    answering,
    fetch,
    internet,
    ok,
    read_head,
    wires,
)

from glovebox_profiles.egress.rules import EgressRule
from glovebox_server.egress.events import EgressLimits

__all__ = ["wires"]

HTTPS = EgressRule(host="files.example.org")
HTTP = EgressRule(host="files.example.org", schemes=frozenset({"http"}), ports=frozenset({80}))
CONTROL = EgressRule(host="control.example.org", schemes=frozenset({"http"}), ports=frozenset({80}))
HINT = b"103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 "


async def _hold(net: Internet, response: bytes, limits: EgressLimits) -> tuple[object, bytes]:
    """Serve ``response`` and then nothing more, without closing; return how the request ended and its body."""
    net.zone["files.example.org"] = [[SITE]]

    async def handler(stream: anyio.abc.ByteStream) -> None:
        await read_head(stream)
        await stream.send(response)
        await anyio.sleep_forever()

    await net.serve(SITE, 80, handler)
    got = await fetch(net.gate(HTTP, limits=limits), "http://files.example.org/")
    return got.last, got.body


@pytest.mark.parametrize("response", [b"", b"HTTP/1.1 200 OK\r\nX-Slow: "])
async def test_a_silent_server_is_given_up(wires: Cable, response: bytes) -> None:
    """E16: silence before or within the head ends at the idle limit; after a whole response nobody waits for more."""
    async with internet(wires) as net:
        last, _ = await _hold(net, response, EgressLimits(idle_seconds=0.2))
    assert last == Failed(reason="The server was silent for 0.2 seconds.")
    async with internet(wires) as net:
        assert await _hold(net, ok(b"x"), EgressLimits(idle_seconds=0.2)) == (End(truncated=None), b"x")


async def test_a_body_that_stops_is_marked_truncated(wires: Cable) -> None:
    """E16: what had come is good, and the end says that there was more."""
    async with internet(wires) as net:
        last, body = await _hold(net, ok(b"x" * 10)[:-4], EgressLimits(idle_seconds=0.2))
    assert body == b"x" * 6
    assert last == End(truncated="The server was silent for 0.2 seconds.")
    async with internet(wires) as net:  # the control: all of it, and the same silence
        control = await _hold(net, ok(b"x" * 10), EgressLimits(idle_seconds=0.2))
    assert control == (End(truncated=None), b"x" * 10)


async def test_a_slow_loris_runs_into_the_total_time(wires: Cable) -> None:
    """E16: a server that always sends one more byte in time never trips the idle limit; a body that ends is whole."""

    def drip(most: int | None) -> Handler:
        async def handler(stream: anyio.abc.ByteStream) -> None:
            await read_head(stream)
            await stream.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in count() if most is None else range(most):
                await stream.send(b"1\r\nx\r\n")
                await anyio.sleep(0.02)  # the attack itself: it has to be slow
            await stream.send(b"0\r\n\r\n")

        return handler

    async with internet(wires) as net:
        net.zone |= {"files.example.org": [[SITE]], "control.example.org": [[OTHER]]}
        await net.serve(SITE, 80, drip(None))
        await net.serve(OTHER, 80, drip(3))
        limits = EgressLimits(idle_seconds=5, request_seconds=0.5)
        gate = net.gate(HTTP, CONTROL, limits=limits)
        got = await fetch(gate, "http://files.example.org/")
        control = await fetch(gate, "http://control.example.org/")
    assert got.last == End(truncated="The request took longer than 0.5 seconds.")
    assert 2 <= len(got.body) <= 50
    assert (control.last, control.body) == (End(truncated=None), b"xxx")


@pytest.mark.parametrize("chunk", [b"1000\r\n" + b"x" * 4096 + b"\r\n", b"1\r\nx\r\n"])
async def test_an_endless_body_is_cut(wires: Cable, chunk: bytes) -> None:
    """E16: endless chunked data ends at the byte limit, in chunks of any size; sixteen of them are within it."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def endless(stream: anyio.abc.ByteStream) -> None:
        await read_head(stream)
        await stream.send(head)
        while True:
            await stream.send(chunk * 16)

    async with internet(wires) as net:
        net.zone |= {"files.example.org": [[SITE]], "control.example.org": [[OTHER]]}
        await net.serve(SITE, 80, endless)
        await net.serve(OTHER, 80, answering(head + chunk * 16 + b"0\r\n\r\n"))
        limits = EgressLimits(body_bytes=100_000, header_bytes=1000)
        gate = net.gate(HTTP, CONTROL, limits=limits)
        got = await fetch(gate, "http://files.example.org/")
        control = await fetch(gate, "http://control.example.org/")
    assert isinstance(got.last, End)
    assert "was cut at" in (got.last.truncated or "")
    assert len(got.body) <= 100_000
    assert control.last == End(truncated=None)
    assert control.body == b"x" * 16 * int(chunk.partition(b"\r\n")[0], 16)


async def test_a_compression_bomb_stops_at_the_ratio(wires: Cable) -> None:
    """E16: 64 MiB in 64 KiB; the same page at an honest ratio is decoded whole."""
    bomb = gzip.compress(bytes(64 * 1024 * 1024))
    page = gzip.compress(b"<p>honest</p>" * 50_000)
    limits = EgressLimits(body_bytes=2**40)
    async with internet(wires) as net:
        net.zone["files.example.org"] = [[SITE]]
        await net.serve(SITE, 80, answering(ok(bomb, "Content-Encoding: gzip")))
        await net.serve(SITE, 443, answering(ok(page, "Content-Encoding: gzip")), name="files.example.org")
        got = await fetch(net.gate(HTTP, limits=limits), "http://files.example.org/")
        control = await fetch(net.gate(HTTPS, limits=limits), "https://files.example.org/")
    assert got.last == End(truncated="The body decompresses to more than 100 times its size.")
    assert len(got.body) < 8 * 1024 * 1024
    assert (control.body, control.last) == (b"<p>honest</p>" * 50_000, End(truncated=None))


@pytest.mark.parametrize(
    ("response", "plain", "reason"),
    [
        (b"200 OK\r\nX-Flood: " + b"x" * 60_000 + b"\r\n\r\n", b"200 OK\r\nX-Flood: " + b"x" * 30_000 + b"\r\n\r\n",
         "broke HTTP/1.1"),
        (b"200 OK\r\n" + b"A: b\r\n" * 20_000 + b"\r\n", b"200 OK\r\n" + b"A: b\r\n" * 2_000 + b"\r\n",
         "broke HTTP/1.1"),
        (HINT * 9 + b"200 OK\r\n\r\n", HINT * 8 + b"200 OK\r\n\r\n", "too many interim responses"),
        (b"200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nHTTP/1.1 200 OK",
         b"200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nHTTP/1.1 200 OK", "states its length in two ways"),
        (b"200 OK\r\nContent-Length: 3\r\nContent-Length: 5\r\n\r\nabcde",
         b"200 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nabcde", "broke HTTP/1.1"),
        (b"200 OK\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
         b"200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "broke HTTP/1.1"),
        (b"101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
         b"200 OK\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n", "broke HTTP/1.1"),
        (b"\x00\x00\x12\x04\x00\x00\x00\x00\x00" * 10, b"200 OK\r\n\r\n", "broke HTTP/1.1"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", b"200 OK\r\n\r\nSSH-2.0-OpenSSH_9.2\r\n\r\n", "broke HTTP/1.1"),
        (b"", b"200 OK\r\n\r\n", "without a response"),
    ],
)  # fmt: skip
async def test_a_response_that_is_not_plain_http_is_refused(
    wires: Cable, response: bytes, plain: bytes, reason: str
) -> None:
    """E10, E16: header floods, two lengths, a switch to h2c, another protocol; nothing of it reaches the sandbox.

    The control: its nearest neighbour without the flaw is an ordinary response.
    """
    async with internet(wires) as net:
        net.zone |= {"files.example.org": [[SITE]], "control.example.org": [[OTHER]]}
        version = b"HTTP/1.1 " if response[:1] in (b"1", b"2") else b""
        await net.serve(SITE, 80, answering(version + response))
        await net.serve(OTHER, 80, answering(b"HTTP/1.1 " + plain))
        gate = net.gate(HTTP, CONTROL)
        got = await fetch(gate, "http://files.example.org/")
        control = await fetch(gate, "http://control.example.org/")
    [only] = got.events
    assert isinstance(only, Failed)
    assert reason in only.reason
    assert (control.head.status, control.last) == (200, End(truncated=None))


async def test_a_smuggled_second_response_is_never_read(wires: Cable) -> None:
    """E10: bytes after the end of the response belong to nobody, because a connection serves one request."""
    async with internet(wires) as net:
        net.zone["files.example.org"] = [[SITE]]
        await net.serve(SITE, 80, answering(ok(b"one") + ok(b"two")))
        got = await fetch(net.gate(HTTP), "http://files.example.org/")
    assert (got.body, got.last) == (b"one", End(truncated=None))
