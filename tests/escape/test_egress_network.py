"""Hostile networks against the real egress code: real sockets and TLS in network namespaces (E1 to E17).

Each denial is shown with its control: the same thing without the guard goes through.
"""

from ipaddress import ip_address

import anyio
import pytest
from tests.fixtures.guest_streams import Denied, End, Failed
from tests.fixtures.internet import (
    CLIENT,
    METADATA,
    OTHER,
    PRIVATE,
    SITE,
    SITE6,
    Cable,
    answering,
    fetch,
    internet,
    ok,
    plain_gate,
    read_head,
    redirect,
    wires,
)

from glovebox_profiles.egress.rules import EgressRule
from glovebox_server.egress.events import EgressAttempt, EgressLimits

__all__ = ["wires"]

HTTPS = EgressRule(host="files.example.org")
HTTP = EgressRule(host="files.example.org", schemes=frozenset({"http"}), ports=frozenset({80}))
BOTH = EgressRule(host="files.example.org", schemes=frozenset({"http", "https"}), ports=frozenset({80, 443}))
CONTROL = EgressRule(host="control.example.org", schemes=frozenset({"http"}), ports=frozenset({80}))


async def reachable(address: str, port: int) -> bool:
    """Control: whether a plain socket gets there."""
    async with await anyio.connect_tcp(address, port):
        return True


async def test_an_allowed_https_url_is_fetched_and_recorded_before_it_is_dialled(wires: Cable) -> None:
    """The way that works: one look-up, one record with the address, one connection, a whole body."""
    async with internet(wires) as net:
        net.zone["files.example.org"] = [[SITE]]
        requests: list[bytes] = []
        await net.serve(
            SITE, 443, answering(ok(b"hello", "X-A: 1", "Set-Cookie: a=b"), requests), name="files.example.org"
        )
        secrets = [
            ("Authorization", "Bearer key"),
            ("Cookie", "a=b"),
            ("Accept", "text/html"),
            ("Host", "evil.example"),
        ]
        got = await fetch(net.gate(HTTPS), "https://FILES.example.org/a%7eb?q=1#part", headers=secrets)
    assert got.head.status == 200
    assert got.body == b"hello"
    assert got.last == End(truncated=None)
    assert got.head.said["url"] == "https://files.example.org/a~b?q=1"
    assert ("x-a", "1") in got.head.said["headers"]
    assert "set-cookie" not in dict(got.head.said["headers"])
    assert got.head.said["dropped"] == ("'authorization'", "'cookie'", "'host'")
    assert requests[0].startswith(b"GET /a~b?q=1 HTTP/1.1\r\nHost: files.example.org\r\n")
    assert b"key" not in requests[0]
    assert b"a=b" not in requests[0]
    assert net.lookups == ["files.example.org"]
    [attempt] = net.attempts
    assert (attempt.decision.effect, attempt.decision.rule, attempt.addresses) == (
        "allow", "network.allow[0]", (ip_address(SITE),)
    )  # fmt: skip


async def test_an_ipv6_server_is_reached(wires: Cable) -> None:
    """Both families go the same way; an address that does not answer is followed by the next checked one."""
    async with internet(wires) as net:
        net.zone["files.example.org"] = [[SITE, SITE6]]
        await net.serve(SITE6, 443, answering(ok(b"six")), name="files.example.org")
        got = await fetch(net.gate(HTTPS), "https://files.example.org/")
    assert got.body == b"six", got.events


async def test_a_denied_name_is_never_looked_up(wires: Cable) -> None:
    """E4: the name itself would be the message, to whoever runs its zone."""
    async with internet(wires) as net:
        got = await fetch(net.gate(HTTPS), "https://secret-data.attacker.example/")
        control = await fetch(net.gate(HTTPS), "https://files.example.org/")
    assert isinstance(got.last, Denied)
    assert got.last.rule == "egress.host"
    assert isinstance(control.last, Failed)
    assert net.lookups == ["files.example.org"]
    assert [attempt.decision.effect for attempt in net.attempts] == ["deny", "allow"]


async def test_nothing_is_dialled_when_the_record_cannot_be_written(wires: Cable) -> None:
    """The audit record comes first; its failure passes through and no connection is made."""

    async def unwritable(_: EgressAttempt) -> None:
        raise RuntimeError("disk full")

    async with internet(wires) as net:
        net.zone["files.example.org"] = [[SITE]]
        await net.serve(SITE, 80, answering(ok(b"")))
        gate = plain_gate([HTTP], unwritable, resolver=net.resolve, tls=net.trust)
        with pytest.raises(RuntimeError, match="disk full"):
            await fetch(gate, "http://files.example.org/")
        assert net.connections == []
        assert isinstance((await fetch(net.gate(HTTP), "http://files.example.org/")).last, End)
        assert net.connections == [f"{SITE}:80"]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ([PRIVATE], "a private network"),
        ([METADATA], "a cloud metadata service"),
        (["100.64.0.1"], "carrier-grade NAT"),
        ([CLIENT], "belongs to this machine"),
        (["127.0.0.1"], "loopback"),
        ([SITE, PRIVATE], "a private network"),
    ],
)
async def test_an_answer_with_a_forbidden_address_is_refused(wires: Cable, answer: list[str], kind: str) -> None:
    """E6, E7: one bad address condemns the answer, and a server that listens there is not reached."""
    async with internet(wires) as net:
        net.zone["files.example.org"] = [answer]
        bad = answer[-1]
        await net.serve(bad, 80, answering(ok(b"secret")), own=bad in {CLIENT, "127.0.0.1"})
        got = await fetch(net.gate(HTTP), "http://files.example.org/")
        assert net.connections == []
        assert await reachable(bad, 80)
    assert isinstance(got.last, Denied)
    assert got.last.rule == "egress.address"
    assert kind in got.last.reason
    assert bad not in got.last.reason
    assert net.attempts[0].addresses == tuple(map(ip_address, answer))


async def test_rebinding_does_not_help(wires: Cable) -> None:
    """E6: a name that is public first and private at the next look-up: what was checked is what is dialled."""
    async with internet(wires) as net:
        net.zone["files.example.org"] = [[SITE], [PRIVATE]]
        await net.serve(SITE, 80, answering(ok(b"public")))
        await net.serve(PRIVATE, 80, answering(ok(b"secret")))
        gate = net.gate(HTTP)
        first = await fetch(gate, "http://files.example.org/")
        second = await fetch(gate, "http://files.example.org/")
        assert net.connections == [f"{SITE}:80"]
        assert await reachable(PRIVATE, 80)
    assert first.body == b"public"
    assert isinstance(second.last, Denied)
    assert second.last.rule == "egress.address"
    assert net.lookups == ["files.example.org"] * 2


@pytest.mark.parametrize(
    ("location", "rule"),
    [
        (f"http://{METADATA}/latest/meta-data/", "egress.address"),
        ("http://169.254.43518/", "egress.spelling"),
        ("http://[::ffff:10.0.0.1]/", "egress.spelling"),
        ("http://inner.example.org/", "egress.address"),
        ("http://evil.example/", "egress.host"),
        ("//evil.example/", "egress.host"),
        ("http://files.example.org:8080/", "egress.port"),
        ("http://files.example.org/start", "egress.redirect"),
        ("ftp://files.example.org/", "egress.scheme"),
        ("file:///etc/passwd", "egress.scheme"),
        ("http://user:key@files.example.org/", "egress.spelling"),
        ("http://files.example.org\\@evil.example/", "egress.spelling"),
        ("/a b", "egress.spelling"),
        ("/%2e%2e/etc", "egress.path"),
    ],
)
async def test_each_redirect_is_decided_again(wires: Cable, location: str, rule: str) -> None:
    """E8: an allowed first hop buys nothing for the second."""
    async with internet(wires) as net:
        net.zone |= {"files.example.org": [[SITE]], "inner.example.org": [[PRIVATE]]}
        await net.serve(SITE, 80, answering(redirect(location)))
        await net.serve(METADATA, 80, answering(ok(b"secret")))
        inner = EgressRule(host="inner.example.org", schemes=frozenset({"http"}), ports=frozenset({80}))
        got = await fetch(net.gate(HTTP, inner), "http://files.example.org/start")
        assert net.connections == [f"{SITE}:80"]
        assert await reachable(METADATA, 80)
    assert isinstance(got.last, Denied)
    assert got.last.rule == rule
    assert [hop.url for hop in got.last.hops] == ["http://files.example.org/start"]
    assert [attempt.decision.effect for attempt in net.attempts] == ["allow", "deny"]


async def test_an_allowed_redirect_is_followed_without_credentials(wires: Cable) -> None:
    """E8's control, and its other half: http to https on the same host works, the way back does not."""
    requests: list[bytes] = []
    async with internet(wires) as net:
        net.zone["files.example.org"] = [[SITE]]
        await net.serve(SITE, 80, answering(redirect("https://files.example.org/b", 301)))
        await net.serve(SITE, 443, answering(ok(b"moved"), requests), name="files.example.org")
        got = await fetch(net.gate(BOTH), "http://files.example.org/a", headers=[("Authorization", "key")])
        assert got.body == b"moved"
        assert [(hop.status, hop.url) for hop in got.head.hops] == [(301, "http://files.example.org/a")]
        assert b"uthorization" not in requests[0]

    async with internet(wires) as net:
        net.zone["files.example.org"] = [[SITE]]
        await net.serve(SITE, 80, answering(ok(b"plain")))
        await net.serve(SITE, 443, answering(redirect("http://files.example.org/b")), name="files.example.org")
        down = await fetch(net.gate(BOTH), "https://files.example.org/a")
        assert isinstance(down.last, Denied)
        assert down.last.reason == "A redirect leads from https to http."
        assert (await fetch(net.gate(BOTH), "http://files.example.org/b")).body == b"plain"


async def test_endless_redirects_end(wires: Cable) -> None:
    """E8: each hop leads to a new URL, so only the count can stop it."""
    served = 0

    async def onward(stream: anyio.abc.ByteStream) -> None:
        nonlocal served
        await read_head(stream)
        served += 1
        await stream.send(redirect(f"/{served}"))

    async with internet(wires) as net:
        net.zone |= {"files.example.org": [[SITE]], "control.example.org": [[OTHER]]}
        await net.serve(SITE, 80, onward)
        got = await fetch(net.gate(HTTP), "http://files.example.org/")
        assert served == 6
        served = 0
        limits = EgressLimits(hops=7)

        async def home(stream: anyio.abc.ByteStream) -> None:
            if served < 7:
                await onward(stream)
            else:
                await answering(ok(b"home"))(stream)

        await net.serve(OTHER, 80, home)
        control = await fetch(net.gate(CONTROL, limits=limits), "http://control.example.org/")
    assert isinstance(got.last, Denied)
    assert got.last.reason == "The request was redirected more than 5 times, now to 'http://files.example.org/6'."
    assert (control.body, control.last, len(control.head.hops)) == (b"home", End(truncated=None), 7)


async def test_a_certificate_for_another_name_is_refused(wires: Cable) -> None:
    """A server at the right address without the right certificate gets no request; under its own name it does."""
    requests: list[bytes] = []
    async with internet(wires) as net:
        net.zone |= {"files.example.org": [[SITE]], "other.example.org": [[SITE]]}
        await net.serve(SITE, 443, answering(ok(b""), requests), name="other.example.org")
        gate = net.gate(HTTPS, EgressRule(host="other.example.org"))
        got = await fetch(gate, "https://files.example.org/")
        assert requests == []
        control = await fetch(gate, "https://other.example.org/")
    assert isinstance(got.last, Failed)
    assert "its certificate is not trusted" in got.last.reason
    assert control.last == End(truncated=None)
    assert len(requests) == 1


async def test_a_header_value_cannot_smuggle_a_request(wires: Cable) -> None:
    """E1, E10: line ends in what the sandbox sends are refused; without them the same header passes."""
    async with internet(wires) as net:
        net.zone["files.example.org"] = [[SITE]]
        requests: list[bytes] = []
        await net.serve(SITE, 80, answering(ok(b""), requests))
        gate = net.gate(HTTP)
        bad = await fetch(gate, "http://files.example.org/", headers=[("Accept", "a\r\n\r\nGET /x HTTP/1.1")])
        assert requests == []
        good = await fetch(gate, "http://files.example.org/", headers=[("Accept", "a")])
    assert isinstance(bad.last, Denied)
    assert bad.last.rule == "egress.header"
    assert isinstance(good.last, End)


async def test_a_call_has_only_so_many_connections_and_records(wires: Cable) -> None:
    """A loop of requests ends in refusals, and a loop of refusals does not fill the audit log."""
    async with internet(wires) as net:
        net.zone["files.example.org"] = [[SITE]]
        await net.serve(SITE, 80, answering(ok(b"")))
        gate = net.gate(HTTP, limits=EgressLimits(connections=2, attempts=4))
        ends = [(await fetch(gate, "http://files.example.org/")).last for _ in range(8)]
    rules = [end.rule for end in ends if isinstance(end, Denied)]
    assert rules == ["egress.connections"] * 2 + ["egress.attempts"] * 4
    assert len(net.attempts) == 5
    assert gate.unrecorded == 3
    assert net.connections == [f"{SITE}:80"] * 2


async def test_a_call_has_only_so_many_connections_at_once(wires: Cable) -> None:
    """A server that never answers holds one place, not all of them, and the place is free again afterwards."""
    waiting = anyio.Event()

    async def hold(stream: anyio.abc.ByteStream) -> None:
        await read_head(stream)
        waiting.set()
        await anyio.sleep_forever()

    async with internet(wires) as net:
        net.zone |= {"files.example.org": [[SITE]], "held.example.org": [[OTHER]]}
        await net.serve(SITE, 80, answering(ok(b"")))
        await net.serve(OTHER, 80, hold)
        held = EgressRule(host="held.example.org", schemes=frozenset({"http"}), ports=frozenset({80}))
        gate = net.gate(HTTP, held, limits=EgressLimits(concurrent=1))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fetch, gate, "http://held.example.org/")
            await waiting.wait()
            refused = await fetch(gate, "http://files.example.org/")
            tasks.cancel_scope.cancel()
        control = await fetch(gate, "http://files.example.org/")
    assert isinstance(refused.last, Denied)
    assert refused.last.rule == "egress.concurrent"
    assert control.last == End(truncated=None)


async def test_post_carries_its_body_and_follows_nothing(wires: Cable) -> None:
    """A method that changes things is sent once: its redirect is handed back instead of followed."""
    rule = EgressRule(host="files.example.org", methods=frozenset({"POST"}))
    requests: list[bytes] = []
    async with internet(wires) as net:
        net.zone["files.example.org"] = [[SITE]]
        await net.serve(
            SITE, 443, answering(redirect("https://files.example.org/x"), requests), name="files.example.org"
        )
        got = await fetch(
            net.gate(rule), "https://files.example.org/q", "POST", [("Content-Type", "text/plain")], b"q=1"
        )
    assert got.head.status == 302
    assert b"Content-Length: 3\r\n" in requests[0]
    assert requests[0].endswith(b"\r\n\r\nq=1")
    assert net.connections == [f"{SITE}:443"]


async def test_other_addresses_of_the_same_network_stay_out_of_reach(wires: Cable) -> None:
    """An address is only reached through a rule that names it, never through a rule for its neighbour."""
    async with internet(wires) as net:
        await net.serve(OTHER, 443, answering(ok(b"named")), name=OTHER)
        rule = EgressRule(host=OTHER)
        assert (await fetch(net.gate(rule), f"https://{OTHER}/")).body == b"named"
        other = await fetch(net.gate(rule), f"https://{SITE}/")
    assert isinstance(other.last, Denied)
    assert other.last.rule == "egress.host"
    assert net.lookups == []
