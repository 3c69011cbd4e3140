"""What a guest may write on an egress stream: anything else is refused with a rule, before the gate is asked."""

from collections.abc import Mapping
from typing import Any

import anyio
import pytest

from glovebox_profiles.egress import EgressRule
from glovebox_profiles.egress.addresses import Address
from glovebox_sandboxes.session.connection import Duplex
from glovebox_server.egress.events import EgressAttempt
from glovebox_server.egress.gate import EgressGate
from glovebox_server.egress.limits import EgressLimits
from glovebox_server.egress.serve import serve

REQUEST: Mapping[str, Any] = {"method": "POST", "url": "https://evil.example/", "headers": []}
CONNECT: Mapping[str, Any] = {"authority": "evil.example:443"}
RULE = EgressRule(host="files.example.org", methods=frozenset({"POST", "CONNECT"}))


class _Stream(Duplex):
    """A stream whose guest sends one body, and that keeps how it was ended."""

    def __init__(self, kind: str, meta: Mapping[str, Any], body: bytes = b"") -> None:
        self.kind, self.meta = kind, meta
        self.ended: dict[str, Any] = {}
        self._body = body

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Hand out the body in parts."""
        if not self._body:
            raise anyio.EndOfStream
        part, self._body = self._body[:max_bytes], self._body[max_bytes:]
        return part

    async def reset(self, body: Mapping[str, Any] | None = None) -> None:
        """Keep the reason."""
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
    await serve(EgressGate(rules=[RULE], on_decision=record, resolver=resolver, limits=limits), stream)
    return stream.ended["rule"], stream.ended["reason"], decided


@pytest.mark.parametrize(
    ("kind", "meta", "rule", "reason"),
    [
        ("socks", REQUEST, "egress.kind", "no such way out"),
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
