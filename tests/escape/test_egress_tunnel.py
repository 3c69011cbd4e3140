"""Hostile use of a CONNECT tunnel, over real sockets and TLS in network namespaces (E9, E10, E16)."""

import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address

import anyio
import anyio.abc
import pytest
from anyio.streams.tls import TLSStream
from tests.fixtures.guest_streams import Accepted, Closed, Denied, GuestStream, Said
from tests.fixtures.internet import OTHER, PRIVATE, SITE, Cable, Internet, internet, wires
from tests.fixtures.tls_hello import made_hello, real_hello, server_name

from glovebox_profiles.egress.rules import EgressRule
from glovebox_server.egress.events import EgressLimits
from glovebox_server.egress.gate import Traffic
from glovebox_server.egress.serve import connect

__all__ = ["wires"]

TUNNEL = EgressRule(host="files.example.org", methods=frozenset({"CONNECT"}))


@dataclass
class Tunnel:
    """The sandbox's end of one tunnel and what was said about it."""

    guest: anyio.abc.ByteStream
    events: list[Said] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)
    done: anyio.Event = field(default_factory=anyio.Event)

    async def closed(self) -> Closed:
        """Wait for the end."""
        with anyio.fail_after(10):
            await self.done.wait()
        last = self.events[-1]
        assert isinstance(last, Closed), self.events
        return last


@asynccontextmanager
async def tunnel(
    net: Internet, *rules: EgressRule, authority: str = "files.example.org:443", limits: EgressLimits | None = None
) -> AsyncIterator[Tunnel]:
    """Ask for a tunnel and use it in the block."""
    ends = [await anyio.abc.UNIXSocketStream.from_socket(end) for end in socket.socketpair()]
    opened = Tunnel(guest=ends[0])

    async def run() -> None:
        gate, guest = net.gate(*rules, limits=limits), GuestStream(ends[1])
        opened.events, opened.traffic = guest.events, gate.traffic
        async with ends[1]:
            await connect(gate, authority, guest)
        opened.done.set()

    async with anyio.create_task_group() as tasks, ends[0]:
        tasks.start_soon(run)
        yield opened


async def echo(stream: anyio.abc.ByteStream) -> None:
    """Send everything back, in upper case."""
    while True:
        try:
            await stream.send((await stream.receive()).upper())
        except anyio.EndOfStream:
            return


async def test_a_tunnel_carries_tls_to_the_named_host(wires: Cable) -> None:
    """The way that works: the sandbox's own TLS, verified inside, one record, counted bytes."""
    async with internet(wires) as net:
        net.zone["files.example.org"] = [[SITE]]
        await net.serve(SITE, 443, echo, name="files.example.org")
        async with tunnel(net, TUNNEL) as through:
            secure = await TLSStream.wrap(through.guest, hostname="files.example.org", ssl_context=net.trust)
            await secure.send(b"hello")
            assert await secure.receive() == b"HELLO"
            await secure.aclose()
            closed = await through.closed()
    assert isinstance(through.events[0], Accepted)
    assert through.events[0].said["opened"]
    assert closed == Closed(reason=None)
    assert through.traffic.sent_bytes > 200
    assert through.traffic.received_bytes > 1000
    [attempt] = net.attempts
    assert (attempt.kind, attempt.decision.effect, attempt.addresses) == ("connect", "allow", (ip_address(SITE),))


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (real_hello("evil.example.org"), "was used to ask for 'evil.example.org'"),
        (real_hello("sub.files.example.org"), "was used to ask for 'sub.files.example.org'"),
        (real_hello(None), "the ClientHello has no server name"),
        (made_hello(server_name(b"files.example.org"), (0xFE0D, b"x")), "the server name is encrypted"),
        (b"GET / HTTP/1.1\r\nHost: files.example.org\r\n\r\n", "the bytes are not TLS"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "the bytes are not TLS"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "the bytes are not TLS"),
    ],
)
async def test_what_is_not_tls_to_the_named_host_is_never_connected(wires: Cable, first: bytes, reason: str) -> None:
    """E10: another name, no name, a hidden name, other protocols: nothing is resolved or dialled."""
    async with internet(wires) as net:
        net.zone["files.example.org"] = [[SITE]]
        await net.serve(SITE, 443, echo)
        async with tunnel(net, TUNNEL) as through:
            await through.guest.send(first)
            closed = await through.closed()
        assert net.connections == []
        assert net.lookups == []
        async with tunnel(net, TUNNEL) as control:
            hello = real_hello("files.example.org")
            await control.guest.send(hello)
            assert await control.guest.receive() == hello.upper()
    assert closed.reason is not None
    assert closed.reason.startswith("egress.sni: ")
    assert reason in closed.reason
    assert [attempt.decision.effect for attempt in net.attempts] == ["deny", "allow"]


@pytest.mark.parametrize(
    ("authority", "rule"),
    [
        ("files.example.org:22", "egress.port"),
        ("evil.example:443", "egress.host"),
        ("files.example.org", "egress.spelling"),
        ("files.example.org:", "egress.spelling"),
        ("files.example.org:443:443", "egress.spelling"),
        ("files.example.org\r\nX: y:443", "egress.spelling"),
        ("files.example.org%00:443", "egress.spelling"),
        ("user@files.example.org:443", "egress.spelling"),
        ("93.184.1.1:443", "egress.tunnel"),
        ("127.0.0.1:443", "egress.address"),
        ("[::1]:443", "egress.address"),
    ],
)
async def test_a_tunnel_elsewhere_is_denied_without_a_look_up(wires: Cable, authority: str, rule: str) -> None:
    """E1, E9: CONNECT is decided by host and port alone, so both are read strictly; as the rule has them they pass."""
    async with internet(wires) as net:
        async with tunnel(net, TUNNEL, authority=authority) as through:
            await through.done.wait()
        [denied] = through.events
        assert isinstance(denied, Denied)
        assert denied.rule == rule
        assert net.lookups == []
        assert len(net.attempts) == 1
        await passes(net, TUNNEL)


async def passes(net: Internet, rule: EgressRule) -> None:
    """The control: a tunnel to the host that the rule names, on its port, carries bytes both ways."""
    net.zone["files.example.org"] = [[SITE]]
    await net.serve(SITE, 443, echo)
    async with tunnel(net, rule) as control:
        hello = real_hello("files.example.org")
        await control.guest.send(hello)
        assert await control.guest.receive() == hello.upper()


async def test_a_rule_on_methods_or_paths_is_not_granted_through_a_tunnel(wires: Cable) -> None:
    """E11: inside a tunnel nobody could hold the request to GET /simple/*."""
    rule = EgressRule(host="files.example.org", paths=frozenset({"/simple/*"}))
    async with internet(wires) as net:
        async with tunnel(net, rule) as through:
            await through.done.wait()
        [denied] = through.events
        assert isinstance(denied, Denied)
        assert denied.rule == "egress.tunnel"
        assert "restricts methods or paths" in denied.reason
        await passes(net, TUNNEL)


async def test_a_tunnel_to_a_private_address_is_refused(wires: Cable) -> None:
    """E6: the addresses of a tunnel are checked like any other."""
    async with internet(wires) as net:
        net.zone["files.example.org"] = [[PRIVATE]]
        await net.serve(PRIVATE, 443, echo)
        async with tunnel(net, TUNNEL) as through:
            await through.guest.send(real_hello("files.example.org"))
            closed = await through.closed()
        assert net.connections == []
        async with await anyio.connect_tcp(PRIVATE, 443) as control:
            await control.send(b"x")
            assert await control.receive() == b"X"
    assert closed.reason is not None
    assert closed.reason.startswith("egress.address: ")


async def test_half_close_travels_through(wires: Cable) -> None:
    """A peer that answers only after the end of the question gets that end, and its answer comes back."""

    async def after_the_end(stream: anyio.abc.ByteStream) -> None:
        data = b"".join([piece async for piece in stream])
        await stream.send(len(data).to_bytes(4, "big"))

    async with internet(wires) as net:
        net.zone["files.example.org"] = [[SITE]]
        await net.serve(SITE, 443, after_the_end)
        async with tunnel(net, TUNNEL) as through:
            hello = real_hello("files.example.org")
            await through.guest.send(hello)
            await through.guest.send_eof()
            assert await through.guest.receive() == len(hello).to_bytes(4, "big")
            closed = await through.closed()
    assert closed == Closed(reason=None)
    assert (through.traffic.sent_bytes, through.traffic.received_bytes) == (len(hello), 4)


@pytest.mark.parametrize(
    ("limits", "first", "reason"),
    [
        (EgressLimits(hello_seconds=0.2), b"\x16", "No TLS ClientHello came within 0.2 seconds."),
        (EgressLimits(tunnel_idle_seconds=0.2), None, "it was silent for 0.2 seconds"),
        (EgressLimits(tunnel_seconds=0.2), None, "it was open for 0.2 seconds"),
        (EgressLimits(tunnel_sent_bytes=100), None, "more than 100 bytes were sent"),
        (EgressLimits(tunnel_received_bytes=100), None, "more than 100 bytes were received"),
    ],
)
async def test_a_tunnel_has_bounds(wires: Cable, limits: EgressLimits, first: bytes | None, reason: str) -> None:
    """E16: a half hello, silence, time and bytes each end it, with the reason; without the bound it ends as asked."""
    hello = real_hello("files.example.org")
    async with internet(wires) as net:
        net.zone["files.example.org"] = [[SITE]]
        await net.serve(SITE, 443, echo)
        async with tunnel(net, TUNNEL, limits=limits) as through:
            await through.guest.send(first or hello)
            closed = await through.closed()
        async with tunnel(net, TUNNEL) as control:
            await control.guest.send(hello)
            assert await control.guest.receive() == hello.upper()
            await control.guest.send_eof()
            asked = await control.closed()
    assert closed.reason is not None
    assert reason in closed.reason
    assert asked == Closed(reason=None)
    assert (control.traffic.sent_bytes, control.traffic.received_bytes) == (len(hello), len(hello))


async def test_a_wrong_certificate_is_seen_inside(wires: Cable) -> None:
    """The tunnel does not end TLS: whoever is inside verifies the server's certificate; the right one passes."""
    async with internet(wires) as net:
        net.zone["files.example.org"] = [[SITE], [OTHER]]
        await net.serve(SITE, 443, echo, name="other.example.org")
        await net.serve(OTHER, 443, echo, name="files.example.org")
        async with tunnel(net, TUNNEL) as through:
            with pytest.raises(ssl.SSLCertVerificationError):
                await TLSStream.wrap(through.guest, hostname="files.example.org", ssl_context=net.trust)
        async with tunnel(net, TUNNEL) as control:
            await TLSStream.wrap(control.guest, hostname="files.example.org", ssl_context=net.trust)
