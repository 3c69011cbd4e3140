"""What a guest may write on an egress stream, the hello of its TLS, whom it trusts, and the order of a connection.

Anything else is refused with a rule, before the gate is asked; each step is tried in ``tests/escape/test_egress_*``.
"""

import ssl
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import anyio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from tests.fixtures.internet import plain_gate
from tests.fixtures.tls_hello import made_hello, real_hello, server_name, vector

from glovebox_profiles.egress.rules import EgressDecision, EgressRule
from glovebox_profiles.egress.targets import Address, EgressTarget
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_sandboxes.session.connection import Duplex
from glovebox_server.egress.authority import MAX_LEAVES, Authority
from glovebox_server.egress.events import EgressAttempt, EgressLimits
from glovebox_server.egress.gate import EgressGate
from glovebox_server.egress.serve import MAX_HELLO, ClientHello, serve_stream

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
async def test_what_is_unreadable_never_comes_to_the_gate(
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


NAME = server_name(b"files.example.org")


def test_a_real_hello_names_its_server_however_it_is_cut() -> None:
    """Also into records of one byte each, which is legal."""
    hello = real_hello("Files.Example.org")
    assert ClientHello().feed(hello) == "files.example.org"
    reader = ClientHello()
    names = [reader.feed(hello[at : at + 1]) for at in range(len(hello))]
    assert names[-1] == "files.example.org"
    assert set(names[:-1]) == {None}
    assert bytes(reader.raw) == hello
    assert ClientHello().feed(made_hello(NAME, record=1)) == "files.example.org"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n", "the bytes are not TLS"),
        (b"SSH-2.0-x\r\n", "the bytes are not TLS"),
        (b"\x80\x2e\x01\x03\x01", "the bytes are not TLS"),
        (b"\x16\x02\x00\x00\x05", "the bytes are not TLS"),
        (b"\x16\x03\x01\x00\x00", "impossible length"),
        (b"\x16\x03\x01\xff\xff", "impossible length"),
        (b"\x16\x03\x01\x00\x04\x02\x00\x00\x00", "not a ClientHello"),
        (b"\x16\x03\x01\x00\x04\x01\xff\xff\xff", "announces more than"),
        (b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x03", "truncated"),
        (made_hello(), "no server name"),
        (b"\x16\x03\x01" + vector(2, b"\x01" + vector(3, bytes(34) + b"\0\0\0\0")), "no server name"),
        (made_hello((10, b"")), "no server name"),
        (made_hello(server_name()), "no server name"),
        (made_hello(server_name(b"files.example.org", kind=1)), "no server name"),
        (made_hello(server_name(b"files.example.org", b"evil.example")), "more than one server name"),
        (made_hello((0, NAME[1] + b"x")), "more than one server name"),
        (made_hello(NAME, server_name(b"evil.example")), "stands there twice"),
        (made_hello(NAME, (0xFE0D, b"x")), "the server name is encrypted"),
        (made_hello((0xFFCE, b"x")), "the server name is encrypted"),
        (made_hello(NAME, after=b"\x01"), "another message follows"),
        (made_hello(NAME, (21, bytes(MAX_HELLO))), f"the first {MAX_HELLO} bytes"),
        (b"\x16\x03\x01" + vector(2, b"\x01" + vector(3, bytes(34) + b"\0\0\0\0\0\0\1")), "bytes follow"),
    ],
)
def test_anything_else_is_refused_with_its_reason(data: bytes, reason: str) -> None:
    """E10: no TLS, no name, two names, a hidden name, too much; made the same way without the flaw it is read."""
    with pytest.raises(RefusedError, match=reason) as refused:
        ClientHello().feed(data)
    assert refused.value.rule == "egress.sni"
    assert ClientHello().feed(made_hello(NAME, (21, bytes(100)))) == "files.example.org"


@pytest.mark.parametrize(
    "name", [b"10.0.0.1", b"evil\x00.example.org", b"files.example.org.", b"caf\xc3\xa9.example", b""]
)
def test_a_server_name_obeys_the_grammar_of_hosts(name: bytes) -> None:
    """E1: a name that a server may read otherwise is not a name here."""
    with pytest.raises(RefusedError):
        ClientHello().feed(made_hello(server_name(name)))
    assert ClientHello().feed(made_hello(server_name(b"files.example.org"))) == "files.example.org"


RULES = [EgressRule(host="docs.example.org"), EgressRule(host="*.files.example.net"), EgressRule(host="93.184.216.34")]


def handshake(authority: Authority, leaf: str, name: str, directory: Path) -> str:
    """Have a strict client of Python's believe a leaf for a name: what went wrong, nothing if it does."""
    path = directory / "leaf.pem"
    path.write_text(leaf)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(path)
    client = ssl.create_default_context(cadata=authority.pem.decode())
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, server_hostname=name)
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(3):
        for side in (ours, theirs):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as problem:
                return problem.verify_message
    return ""


def test_a_leaf_is_believed_for_its_host_alone_and_without_hosts_for_none(tmp_path: Path) -> None:
    """No rule names a host: an empty list of constraints would have meant all of them."""
    authority = Authority(RULES)
    leaf = authority.leaf("docs.example.org")
    assert handshake(authority, leaf, "docs.example.org", tmp_path) == ""
    assert "Hostname mismatch" in handshake(authority, leaf, "other.example.org", tmp_path)
    assert handshake(Authority(RULES), leaf, "docs.example.org", tmp_path) != ""
    below = authority.leaf("a.files.example.net")
    assert handshake(authority, below, "a.files.example.net", tmp_path) == ""
    authority = Authority([EgressRule(host="93.184.216.34")])
    assert handshake(authority, authority.leaf("docs.example.org"), "docs.example.org", tmp_path) != ""


@pytest.mark.parametrize("name", ["docs.example.com", "example.org", "bank.example"])
def test_its_own_certificate_forbids_hosts_of_no_rule(name: str, tmp_path: Path) -> None:
    """Even with its key, nobody could be another host to this sandbox's programs."""
    authority = Authority(RULES)
    assert handshake(authority, authority.leaf(name), name, tmp_path) == "permitted subtree violation"


def test_its_key_is_in_nothing_that_it_gives_away() -> None:
    """One private key is in a leaf, and it is the leaf's."""
    authority = Authority(RULES)
    leaf = authority.leaf("docs.example.org")
    assert leaf == authority.leaf("docs.example.org")
    assert leaf.count("PRIVATE KEY") == 2
    assert b"PRIVATE" not in authority.pem
    key = serialization.load_pem_private_key(leaf.encode(), None).public_key()
    certified = x509.load_pem_x509_certificates(leaf[leaf.index("-----BEGIN CERT") :].encode())
    assert [each.public_key() for each in certified] == [key]
    assert x509.load_pem_x509_certificate(authority.pem).public_key() != key


ALLOWED = EgressRule(host="a.example.org")
TARGET = EgressTarget(method="GET", scheme="https", host="a.example.org", port=443, path="/")
ORDER = ["find_stray", "inject", "resolve", "count", "record", "dial"]


class _Gate(EgressGate):
    """A gate that keeps the order of its events, and ends where it would dial."""

    def __init__(self, *, address: str = "93.184.216.34", refuses: str = "", **given: Any) -> None:
        self.events, self._refuses = list[str](), refuses

        async def record(_attempt: EgressAttempt) -> None:
            self.note("record")

        async def resolve(_host: str) -> tuple[Address, ...]:
            self.note("resolve")
            return (ip_address(address),)

        async def count(_host: str) -> None:
            self.note("count")

        async def dial(*_: object) -> Any:
            self.note("dial")
            raise OSError

        super().__init__(on_decision=record, keys=self, on_connect=[count], resolver=resolve, connect_to=dial, **given)

    def note(self, event: str) -> None:
        self.events.append(event)
        if event == self._refuses:
            raise RefusedError(event, "", "")

    def new_mask(self) -> Any:
        """Never come to."""

    async def find_stray(self, _attempt: EgressAttempt, _target: EgressTarget) -> None:
        self.note("find_stray")

    async def inject(self, _attempt: EgressAttempt, _target: EgressTarget) -> None:
        self.note("inject")


async def events_of(expected: type[Exception], **given: Any) -> list[str]:
    gate = _Gate(**{"rules": [ALLOWED], **given})
    attempt = EgressAttempt(kind="request", asked="", target=TARGET)
    with pytest.raises(expected):
        async with gate.recorded(attempt), gate.connect(attempt, TARGET):
            raise AssertionError
    return gate.events


async def test_a_connection_passes_everything_before_it_is_dialled() -> None:
    """GB-NET-8, GB-POL-27: counted only as what will be dialled, and recorded before."""
    assert await events_of(OSError) == ORDER


@pytest.mark.parametrize("at", ORDER[:4])
async def test_whatever_refuses_is_the_last_before_the_record(at: str) -> None:
    assert await events_of(RefusedError, refuses=at) == [*ORDER[: ORDER.index(at) + 1], "record"]


@pytest.mark.parametrize(
    ("given", "events"),
    [
        ({"rules": []}, ["find_stray"]),  # a name is not resolved (GB-NET-5), and no helper is started for its key
        ({"limits": EgressLimits(connections=0)}, ["find_stray", "inject"]),
        ({"limits": EgressLimits(concurrent=0)}, ["find_stray", "inject"]),
        ({"address": "127.0.0.1"}, ["find_stray", "inject", "resolve"]),  # before it is counted
    ],
)
async def test_the_gate_itself_refuses_in_its_place(given: dict[str, Any], events: list[str]) -> None:
    assert await events_of(RefusedError, **given) == [*events, "record"]


async def test_nothing_is_dialled_whose_decision_was_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever did so; the control is the connection above, which is dialled."""

    async def change(_gate: object, attempt: EgressAttempt, _target: EgressTarget) -> None:
        attempt.decision = EgressDecision(effect="deny", rule="r", reason="", hint="")

    monkeypatch.setattr(_Gate, "inject", change)
    assert await events_of(RuntimeError) == ["find_stray", "resolve", "count", "record"]
