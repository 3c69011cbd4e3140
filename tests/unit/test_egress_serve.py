"""What a guest may write on an egress stream: anything else is refused with a rule, before the gate is asked."""

from collections.abc import Mapping
from typing import Any

import anyio
import pytest
from tests.fixtures.internet import plain_gate

from glovebox_profiles.egress.rules import EgressRule
from glovebox_profiles.egress.targets import Address
from glovebox_sandboxes.session.connection import Duplex
from glovebox_server.egress.authority import MAX_LEAVES, Authority
from glovebox_server.egress.events import EgressAttempt, EgressLimits
from glovebox_server.egress.serve import serve_stream

REQUEST: Mapping[str, Any] = {"method": "POST", "url": "https://evil.example/", "headers": []}
CONNECT: Mapping[str, Any] = {"authority": "evil.example:443"}
RULE = EgressRule(host="files.example.org", methods=frozenset({"POST", "CONNECT"}))


class _Stream(Duplex):
    """A stream whose guest sends one body, and that keeps how it was ended."""

    def __init__(self, kind: str, meta: Mapping[str, Any], body: bytes = b"") -> None:
        self.kind, self.meta = kind, meta
        self.ended: dict[str, Any] = {}
        self.accepted: dict[str, Any] = {}
        self._body = body

    async def receive(self, max_bytes: int = 65536) -> bytes:
        if not self._body:
            raise anyio.EndOfStream
        part, self._body = self._body[:max_bytes], self._body[max_bytes:]
        return part

    async def accept(self, body: Mapping[str, Any]) -> None:
        self.accepted = dict(body)

    async def send_eof(self) -> None:
        """Nothing follows."""

    async def reset(self, body: Mapping[str, Any] | None = None) -> None:
        self.ended = dict(body or {})


async def refused(kind: str, meta: Mapping[str, Any], body: bytes = b"") -> tuple[str, str, list[str]]:
    """Serve one stream; return the rule and reason of its end, and the rules by which the gate decided."""
    decided: list[str] = []

    async def record(attempt: EgressAttempt) -> None:
        decided.append(attempt.decision.rule)

    async def resolver(name: str) -> tuple[Address, ...]:
        raise AssertionError(f"{name} was looked up")

    stream = _Stream(kind, meta, body)
    limits = EgressLimits(request_body_bytes=100)
    await serve_stream(plain_gate([RULE], record, resolver=resolver, limits=limits), stream)
    return stream.ended["rule"], stream.ended["reason"], decided


@pytest.mark.parametrize(
    ("kind", "meta", "rule", "reason"),
    [
        ("socks", REQUEST, "egress.kind", "way out does not exist"),
        ("request", {}, "egress.malformed", "cannot be read"),
        ("request", CONNECT, "egress.malformed", "cannot be read"),
        ("request", {**REQUEST, "more": 1}, "egress.malformed", "cannot be read"),
        ("request", {**REQUEST, "method": "P" * 17}, "egress.malformed", "cannot be read"),
        ("request", {**REQUEST, "method": 1}, "egress.malformed", "cannot be read"),
        ("request", {**REQUEST, "url": "https://evil.example/" + "a" * 8192}, "egress.malformed", "cannot be read"),
        ("request", {**REQUEST, "headers": [["a", "b"]] * 65}, "egress.malformed", "cannot be read"),
        ("request", {**REQUEST, "headers": [["a", 1]]}, "egress.malformed", "cannot be read"),
        ("request", {**REQUEST, "headers": {"a": "b"}}, "egress.malformed", "cannot be read"),
        ("connect", REQUEST, "egress.malformed", "cannot be read"),
        ("connect", {"authority": "a" * 513}, "egress.malformed", "cannot be read"),
        ("connect", {"authority": None}, "egress.malformed", "cannot be read"),
        ("certificate", CONNECT, "egress.kind", "way out does not exist"),
    ],
)
async def test_what_cannot_be_read_never_comes_to_the_gate(
    kind: str, meta: Mapping[str, Any], rule: str, reason: str
) -> None:
    """Nothing is decided, recorded or looked up. Its neighbour without the flaw is decided by the rules (control)."""
    said = await refused(kind, meta)
    assert said[0] == rule
    assert reason in said[1]
    assert said[2] == []
    full = {"method": "POST", "url": "https://evil.example/" + "a" * 8000, "headers": [["a", "b"]] * 64}
    for good in (("request", full), ("request", REQUEST), ("connect", CONNECT)):
        rule, _, decided = await refused(*good)
        assert (rule, decided) == ("egress.host", ["egress.host"])


async def test_a_body_is_read_no_further_than_its_limit() -> None:
    """One byte more ends the stream before anything is asked; a body of the limit's size is decided (control)."""
    rule, reason, decided = await refused("request", REQUEST, bytes(101))
    assert (rule, reason, decided) == ("egress.body", "The request's body is larger than 100 bytes.", [])
    rule, _, decided = await refused("request", REQUEST, bytes(100))
    assert (rule, decided) == ("egress.host", ["egress.host"])


async def certified(authority: str, *rules: EgressRule) -> tuple[dict[str, Any], list[str]]:
    """Ask how TLS to a server is to be ended; return the answer, and the rules by which the gate refused."""
    decided: list[str] = []

    async def record(attempt: EgressAttempt) -> None:
        decided.append(attempt.decision.rule)

    stream = _Stream("certificate", {"authority": authority})
    await serve_stream(plain_gate(rules, record, authority=Authority(rules)), stream)
    return stream.ended or stream.accepted, decided


@pytest.mark.parametrize(
    ("authority", "rule"),
    [
        ("evil.example:443", "egress.host"),
        ("files.example.org:8443", "egress.port"),
        ("plain.example.org:80", "egress.tunnel"),
        ("93.184.216.34:443", "egress.tunnel"),
        ("files.example.org", "egress.spelling"),
        ("files.example.org\0:443", "egress.spelling"),
    ],
)
async def test_a_certificate_is_for_what_could_be_asked_for(authority: str, rule: str) -> None:
    """Refused and recorded; with a rule for requests to it there is one, with one for tunnels there is none to end."""
    plain = EgressRule(host="plain.example.org", schemes=frozenset({"http"}), ports=frozenset({80}))
    asked = EgressRule(host="files.example.org", methods=frozenset({"POST"}), paths=frozenset({"/a"}))
    answer, decided = await certified(authority, asked, plain)
    assert (answer["rule"], decided) == (rule, [rule])
    answer, decided = await certified("files.example.org:443", asked, plain)
    assert answer["leaf"].startswith("-----BEGIN PRIVATE KEY-----")
    assert decided == []
    answer, decided = await certified("files.example.org:443", RULE)
    assert (answer, decided) == ({"leaf": ""}, [])


async def test_there_are_certificates_for_a_bounded_number_of_hosts() -> None:
    """A wildcard names any number; one more than fit is refused and recorded, and those that have one go on."""
    rule = EgressRule(host="*.example.org")
    authority = Authority([rule])
    decided: list[str] = []

    async def record(attempt: EgressAttempt) -> None:
        decided.append(attempt.decision.rule)

    gate = plain_gate([rule], record, authority=authority)
    for number in range(MAX_LEAVES):
        assert authority.leaf(f"a{number}.example.org")
    for name, refused in (("one-more", ["egress.attempts"]), ("a7", ["egress.attempts"])):
        stream = _Stream("certificate", {"authority": f"{name}.example.org:443"})
        await serve_stream(gate, stream)
        assert decided == refused
        assert bool(stream.ended) == (name == "one-more")
