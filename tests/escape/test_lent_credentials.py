"""A key lent at the egress, and an allowed server that tries to hand it back: real TLS on a private internet."""

import base64
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from tests.fixtures.guest_streams import Denied, End, Failed
from tests.fixtures.internet import (
    OTHER,
    SITE,
    Cable,
    Fetched,
    Internet,
    answering,
    fetch,
    internet,
    ok,
    redirect,
    wires,
)

from glovebox_profiles.egress.rules import EgressRule
from glovebox_profiles.model import Credential
from glovebox_server.egress.events import EgressLimits
from glovebox_server.egress.request import PIECE_SEARCHED
from glovebox_server.guards.credentials.injector import CredentialInjector
from glovebox_server.guards.credentials.sources import CredentialValue, unusable
from glovebox_server.guards.redaction.detector import KeyMasker

__all__ = ["wires"]

API, ELSEWHERE = "api.example.org", "other.example.org"
KEY = "Zq8-fk2_Lw7Rt5Xv9Bn3Mp6Hs1Dy4Gc0+/e"
RULES = tuple(
    EgressRule.model_validate({"host": host, "methods": ["GET", "HEAD", "POST"], "schemes": ["https", "http"]})
    for host in (API, ELSEWHERE)
)


def credential(**changed: Any) -> Credential:
    """A key for one folder of one host."""
    given = {"name": "tracker", "host": API, "paths": ("/v1/*",), "header": "Authorization", "prefix": "Bearer ",
             "source": "env:UNUSED"}  # fmt: skip
    return Credential.model_validate(given | changed)


@asynccontextmanager
async def asked(
    wires: Cable,
    response: bytes,
    url: str = f"https://{API}/v1/me",
    *,
    lent: Credential | None = None,
    key: str = KEY,
    **request: Any,
) -> AsyncIterator[tuple[Fetched, list[bytes], Internet]]:
    """What came of one request to a server that gives this response, and what that server read."""
    async with internet(wires) as net:
        net.zone |= {API: [[SITE]], ELSEWHERE: [[OTHER]]}
        requests: list[bytes] = []
        await net.serve(SITE, 443, answering(response, requests), name=API)
        gate = net.gate(*RULES, lender=lends(lent or credential(), key=key))
        yield await fetch(gate, url, **request), requests, net


def lends(*credentials: Credential, key: str = KEY) -> CredentialInjector:
    """A lender whose every source gives the same value."""

    async def read(_source: str) -> CredentialValue:
        return CredentialValue(text=key)

    return CredentialInjector(credentials=credentials, read=read)


def _hexadecimal(text: str) -> bytes:
    return text.encode().hex().encode()


def _bits(text: str) -> bytes:
    return "".join(f"{byte:08b}" for byte in text.encode()).encode()


async def test_a_key_stands_in_the_header_it_names_and_nowhere_else(wires: Cable) -> None:
    """The server reads it; the record names it; nothing that goes back has it."""
    async with asked(wires, ok(b"hello")) as (fetched, requests, net):
        assert fetched.body == b"hello"
        assert f"Authorization: Bearer {KEY}\r\n".encode() in requests[0]
        assert requests[0].count(KEY.encode()) == 1
        assert [each.credential for each in net.attempts] == ["tracker"]
        assert KEY not in repr((fetched.events, net.attempts))


async def test_a_key_stands_in_the_parameter_it_names(wires: Cable) -> None:
    """Encoded, behind the program's own query; the URL that is handed back has none of it."""
    lent = credential(header=None, prefix="", query="key")
    async with asked(wires, ok(b"hello"), f"https://{API}/v1/me?a=1", lent=lent) as (fetched, requests, _):
        assert requests[0].startswith(b"GET /v1/me?a=1&key=Zq8-fk2_Lw7Rt5Xv9Bn3Mp6Hs1Dy4Gc0%2B%2Fe HTTP/1.1\r\n")
        assert fetched.head.said["url"] == f"https://{API}/v1/me?a=1"


@pytest.mark.parametrize(
    ("url", "method"), [(f"https://{API}/v2/me", "GET"), (f"https://{API}/v1/me", "POST"), (f"https://{API}/v1", "GET")]
)
async def test_what_a_key_is_not_for_is_asked_without_it(wires: Cable, url: str, method: str) -> None:
    """Another path, another method: allowed by the profile, and nothing is added."""
    async with asked(wires, ok(b"hello"), url, method=method) as (fetched, requests, net):
        assert fetched.body == b"hello"
        assert b"authorization" not in requests[0].lower()
        assert [each.credential for each in net.attempts] == [None]


async def test_a_key_never_crosses_plain_http(wires: Cable) -> None:
    """The same host and path without TLS."""
    async with asked(wires, ok(b"")) as (_, _, net):
        requests: list[bytes] = []
        await net.serve(SITE, 80, answering(ok(b"open"), requests))

        async def read(_source: str) -> CredentialValue:
            raise AssertionError("nobody needs it")

        gate = net.gate(*RULES, lender=CredentialInjector(credentials=(credential(),), read=read))
        assert (await fetch(gate, f"http://{API}/v1/me")).body == b"open"
        assert b"authorization" not in requests[0].lower()


async def test_a_key_does_not_follow_a_redirect_elsewhere_nor_come_back_from_there(wires: Cable) -> None:
    """To another host, and from there to the first: an address that somebody else chose gets no key."""
    async with internet(wires) as net:
        net.zone |= {API: [[SITE]], ELSEWHERE: [[OTHER]]}
        first, second = list[bytes](), list[bytes]()
        leads = {b"/v1/me": redirect(f"https://{ELSEWHERE}/v1/me"), b"/v1/back": ok(b"end")}

        async def serve(stream: anyio.abc.ByteStream) -> None:
            head = await stream.receive()
            first.append(head)
            await stream.send(leads[head.split(b" ")[1]])

        await net.serve(SITE, 443, serve, name=API)
        await net.serve(OTHER, 443, answering(redirect(f"https://{API}/v1/back"), second), name=ELSEWHERE)
        assert (await fetch(net.gate(*RULES, lender=lends(credential())), f"https://{API}/v1/me")).body == b"end"
        assert [KEY.encode() in each for each in (*first, *second)] == [True, False, False]
        assert [each.credential for each in net.attempts] == ["tracker", None, None]


ECHOES = {
    "plain": KEY.encode(),
    "base64": base64.b64encode(b"x" + KEY.encode()),
    "hex": KEY.encode().hex().encode(),
    "percent": "".join(f"%{byte:02X}" for byte in KEY.encode()).encode(),
    "escaped": "".join(f"\\u{byte:04x}" for byte in KEY.encode()).encode(),
    "entities": "".join(f"&#{byte};" for byte in KEY.encode()).encode(),
    "spread": " ".join(KEY).encode(),
    "backwards": KEY.encode()[::-1],
    "lines": "\r\n".join(KEY[at : at + 7] for at in range(0, len(KEY), 7)).encode(),
    "small letters": KEY.lower().encode(),
}


@pytest.mark.parametrize("echo", ECHOES.values(), ids=ECHOES)
@pytest.mark.parametrize("status", [b"200 OK", b"403 Forbidden"])
async def test_a_server_that_hands_the_key_back_hands_nothing_back(wires: Cable, echo: bytes, status: bytes) -> None:
    """In an answer or an error page, however it is written; what stands around it comes."""
    response = ok(b"before <" + echo + b"> after").replace(b"200 OK", status)
    async with asked(wires, response) as (fetched, _, _):
        assert fetched.body.startswith(b"before ")
        assert fetched.body.endswith(b"> after"), fetched.body
        assert b"[credential tracker]" in fetched.body
        assert echo not in fetched.body


async def test_a_key_in_pieces_is_not_handed_back(wires: Cable) -> None:
    """One byte to a chunk, each sent by itself; and the control that other bytes come as they are sent."""
    text = b"before " + KEY.encode() + b" after"

    async def dribble(stream: anyio.abc.ByteStream) -> None:
        await stream.receive()
        await stream.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for byte in text:
            await stream.send(b"1\r\n%c\r\n" % byte)
            await anyio.sleep(0.001)
        await stream.send(b"0\r\n\r\n")

    async def read(_source: str) -> CredentialValue:
        return CredentialValue(text=KEY)

    async with internet(wires) as net:
        net.zone[API] = [[SITE]]
        await net.serve(SITE, 443, dribble, name=API)
        fetched = await fetch(
            net.gate(*RULES, lender=CredentialInjector(credentials=(credential(),), read=read)), f"https://{API}/v1/me"
        )
    assert fetched.body == b"before [credential tracker] after"
    assert fetched.last == End(truncated=None)


@pytest.mark.parametrize("write", [str.encode, _hexadecimal, _bits], ids=["plain", "hexadecimal", "bits"])
async def test_a_program_cannot_find_a_key_by_guessing_how_it_begins(wires: Cable, write: Any) -> None:
    """An honest server repeats what it is sent: all of a key but a letter comes back as if it were another.

    The control: the whole key is replaced.
    """
    for guess in (KEY[:-1], KEY[:-2] + "x", "x" + KEY[1:], KEY[:16]):
        text = write(guess) + b" " * 100_000 + b"end"
        async with asked(wires, ok(text)) as (fetched, _, _):
            assert (fetched.body, fetched.last) == (text, End(truncated=None))
    async with asked(wires, ok(write(KEY) + b" " * 100_000 + b"end")) as (fetched, _, _):
        assert fetched.body == b"[credential tracker]" + b" " * 100_000 + b"end"


@pytest.mark.parametrize("bound", [EgressLimits().body_bytes, 1024], ids=["a broken connection", "its limit"])
async def test_an_answer_that_does_not_end_normally_loses_what_is_withheld(wires: Cable, bound: int) -> None:
    """Else a program could have an answer end within the key. The control is what came before, and a normal end."""
    text = b"-" * 600 + b"x" * 400 + KEY.encode()[:24]
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 4096\r\n\r\n" + text + (b"x" if bound == 1024 else b"")
    async with internet(wires) as net:
        net.zone[API] = [[SITE]]
        await net.serve(SITE, 443, answering(answer), name=API)
        gate = net.gate(*RULES, lender=lends(credential()), limits=EgressLimits(body_bytes=bound))
        fetched = await fetch(gate, f"https://{API}/v1/me")
    assert isinstance(fetched.last, End)
    assert fetched.last.truncated
    assert fetched.body == b"-" * 600
    async with asked(wires, ok(text)) as (whole, _, _):
        assert (whole.body, whole.last) == (text, End(truncated=None))


async def test_a_redirect_within_the_host_to_where_the_key_is_not_for_goes_without(wires: Cable) -> None:
    """The server leads from a path that has the key to one that has none, and back."""
    leads = {b"/v1/me": redirect("/v2/me"), b"/v2/me": redirect("/v1/back"), b"/v1/back": ok(b"end")}
    requests: list[bytes] = []

    async def serve(stream: anyio.abc.ByteStream) -> None:
        requests.append(await stream.receive())
        await stream.send(leads[requests[-1].split(b" ")[1]])

    async with internet(wires) as net:
        net.zone[API] = [[SITE]]
        await net.serve(SITE, 443, serve, name=API)
        assert (await fetch(net.gate(*RULES, lender=lends(credential())), f"https://{API}/v1/me")).body == b"end"
        assert [KEY.encode() in each for each in requests] == [True, False, True]
        assert [each.credential for each in net.attempts] == ["tracker", None, "tracker"]


BARE = {
    "no content": b"HTTP/1.1 204 No Content\r\nX-Key: %b\r\n\r\n",
    "not modified": b'HTTP/1.1 304 Not Modified\r\nETag: "%b"\r\n\r\n',
    "its reason": b"HTTP/1.1 403 %b\r\nContent-Length: 0\r\n\r\n",
    "a header's name": b"HTTP/1.1 200 OK\r\nX-%b: 1\r\nContent-Length: 0\r\n\r\n",
    "interim": b"HTTP/1.1 103 Early Hints\r\nLink: <%b>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    "trailer": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-Key: %b\r\n\r\n",
    "a chunk's extension": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;key=%b\r\nx\r\n0\r\n\r\n",
    "cookie": b"HTTP/1.1 200 OK\r\nSet-Cookie: key=%b\r\nContent-Length: 0\r\n\r\n",
    "many headers": b"HTTP/1.1 200 OK\r\n" + b"X-A: %b\r\n" + b"X-B: 1\r\n" * 500 + b"Content-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("response", BARE.values(), ids=BARE)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_an_answer_without_a_body_hands_nothing_back_either(wires: Cable, response: bytes, method: str) -> None:
    """Whatever stands around a body, with GET and with HEAD."""
    plain = KEY.replace("/", "x").replace("+", "y")  # what a header's name can be made of
    async with asked(wires, response % plain.encode(), key=plain, method=method) as (fetched, requests, _):
        assert plain.encode() in requests[0]
        assert plain not in repr(fetched.events)
        assert plain.lower() not in repr(fetched.events)


async def test_another_port_of_the_host_gets_no_key(wires: Cable) -> None:
    """Allowed, over TLS, and not the port that the credential is for: 443."""
    rule = EgressRule.model_validate({"host": API, "ports": [443, 8443]})
    async with internet(wires) as net:
        net.zone[API] = [[SITE]]
        requests: list[bytes] = []
        await net.serve(SITE, 8443, answering(ok(b"other"), requests), name=API)
        fetched = await fetch(net.gate(rule, lender=lends(credential())), f"https://{API}:8443/v1/me")
        assert fetched.body == b"other"
        assert KEY.encode() not in requests[0]


async def test_of_several_keys_for_a_host_the_first_that_fits_is_added_and_all_are_replaced(wires: Cable) -> None:
    """One for reading a folder, one for the rest; the same value under two names is replaced under both."""
    second = "Other9w8e7r6t5y4u3i2o1p0QaZ"
    values = {"env:FIRST": KEY, "env:SECOND": second, "env:THIRD": KEY}

    async def read(source: str) -> CredentialValue:
        return CredentialValue(text=values[source])

    lender = CredentialInjector(
        credentials=[
            credential(name="first", source="env:FIRST"),
            credential(name="second", source="env:SECOND", paths=("/*",)),
            credential(name="third", source="env:THIRD", methods=("POST",), header="X-Key", prefix=""),
        ],
        read=read,
    )
    async with internet(wires) as net:
        net.zone[API] = [[SITE]]
        requests: list[bytes] = []
        await net.serve(SITE, 443, answering(ok(f"{KEY} {second}".encode()), requests), name=API)
        gate = net.gate(*RULES, lender=lender)
        bodies = [
            (await fetch(gate, f"https://{API}{path}", method=method)).body
            for path, method in (("/v1/me", "GET"), ("/v2/me", "GET"), ("/v1/me", "POST"), ("/v1/me", "GET"))
        ]
        assert [each.credential for each in net.attempts] == ["first", "second", "third", "first"]
        assert [(KEY in str(each), second in str(each)) for each in requests] == [
            (True, False), (False, True), (True, False), (True, False),
        ]  # fmt: skip
        assert bodies[0] == f"[credential first] {second}".encode()  # what was not lent yet nobody knows
        assert all(KEY.encode() not in each and second.encode() not in each for each in bodies[1:])


async def test_a_key_that_is_lent_while_another_answer_comes_is_replaced_in_that_too(wires: Cable) -> None:
    """An answer without any key stands open; the next request gets one, and the server says it in the first."""
    begun, lent = anyio.Event(), anyio.Event()

    async def serve(stream: anyio.abc.ByteStream) -> None:
        if b" /v2/" in await stream.receive():
            await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n<" % (len(KEY) + 2))
            begun.set()
            await lent.wait()
            await stream.send(KEY.encode() + b">")
        else:
            await stream.send(ok(b""))

    async with internet(wires) as net, anyio.create_task_group() as tasks:
        net.zone[API] = [[SITE]]
        await net.serve(SITE, 443, serve, name=API)
        gate, came = net.gate(*RULES, lender=lends(credential())), list[Fetched]()

        async def first() -> None:
            came.append(await fetch(gate, f"https://{API}/v2/slow"))

        tasks.start_soon(first)
        await begun.wait()
        await fetch(gate, f"https://{API}/v1/me")
        lent.set()
    assert came[0].body == b"<[credential tracker]>"


async def test_an_answer_is_looked_through_in_turns(wires: Cable, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much of it comes at once, others have a turn of the event loop after each small piece."""
    turns, looked = [0], list[tuple[int, int]]()
    feed = KeyMasker.feed

    def noted(self: KeyMasker, data: bytes) -> bytes:
        looked.append((len(data), turns[0]))
        return feed(self, data)

    monkeypatch.setattr(KeyMasker, "feed", noted)
    body = bytes(range(256)) * 4096

    async def others() -> None:
        while True:
            await anyio.lowlevel.checkpoint()
            turns[0] += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(others)
        async with asked(wires, ok(gzip.compress(body), "Content-Encoding: gzip")) as (fetched, _, _):
            assert fetched.body == body
        tasks.cancel_scope.cancel()
    pieces = [turn for size, turn in looked if size > PIECE_SEARCHED // 2]
    assert max(size for size, _ in looked) == PIECE_SEARCHED
    assert len(set(pieces)) == len(pieces) == len(body) // PIECE_SEARCHED


@pytest.mark.parametrize("query", ["key=mine", "a=1&key=mine", "a=1;key=mine", "%6bey=mine", "k%65y", "ke%79=mine&a=1"])
async def test_a_program_cannot_say_what_the_broker_adds(wires: Cable, query: str) -> None:
    """However it is spelt; and the control that another parameter is no obstacle."""
    lent = credential(header=None, prefix="", query="key")
    async with asked(wires, ok(b""), f"https://{API}/v1/me?{query}", lent=lent) as (fetched, requests, _):
        assert isinstance(fetched.last, Denied)
        assert "adds key with the credential tracker" in fetched.last.reason
        assert (fetched.last.rule, requests) == ("egress.credential", [])
    async with asked(wires, ok(b"hello"), f"https://{API}/v1/me?key2=mine", lent=lent) as (fetched, _, _):
        assert fetched.body == b"hello"


async def test_a_header_that_holds_a_key_holds_nothing_of_the_program(wires: Cable) -> None:
    """A header that may cross from the sandbox is not said twice."""
    lent = credential(header="User-Agent", prefix="")
    async with asked(wires, ok(b"hello"), lent=lent, headers=[("user-agent", "mine")]) as (_, requests, _):
        assert requests[0].lower().count(b"user-agent:") == 1
        assert f"User-Agent: {KEY}\r\n".encode() in requests[0]


async def test_a_redirect_to_an_address_with_the_key_in_it_leads_nowhere(wires: Cable) -> None:
    """Neither the next URL nor the list of hops tells it."""
    async with asked(wires, redirect(f"https://{ELSEWHERE}/collect?k={KEY}")) as (fetched, _, net):
        assert isinstance(fetched.last, Denied)
        assert KEY not in repr((fetched.events, net.attempts))
        assert net.lookups == [API]


async def test_a_server_that_breaks_the_protocol_is_not_quoted_with_the_key(wires: Cable) -> None:
    """What is said of it may quote what it sent: wherever that is cut, no part of the key is left."""
    for before in range(0, 220, 12):
        response = b"HTTP/1.1 200 OK\r\nbad header " + b"x" * before + b" " + KEY.encode() + b"\r\n\r\n"
        async with asked(wires, response) as (fetched, _, _):
            assert isinstance(fetched.last, Failed)
            assert KEY[:4] not in repr(fetched.events)
            assert ("[credential tracker]" in fetched.last.reason) or before > 100


@pytest.mark.parametrize("name", ["Range", "If-Range"])
async def test_a_range_is_refused_with_a_key_and_left_out_without(wires: Cable, name: str) -> None:
    """Parts of an answer could be asked for that hold parts of the key."""
    ranged = [(name, "bytes=0-9")]
    async with asked(wires, ok(b"hello"), headers=ranged) as (fetched, requests, _):
        assert isinstance(fetched.last, Denied)
        assert "tracker" in fetched.last.reason
        assert (fetched.last.rule, requests) == ("egress.credential", [])
    async with asked(wires, ok(b"hello"), f"https://{API}/v2/me", headers=ranged) as (fetched, requests, _):
        assert fetched.body == b"hello"
        assert b"range" not in requests[0].lower()


async def test_a_source_that_fails_refuses_the_request_by_name(wires: Cable) -> None:
    """Nothing is dialled, and the refusal is recorded; no path of the host is in it."""

    async def read(_source: str) -> CredentialValue:
        raise unusable("its file cannot be read: Permission denied", "Make /etc/keys/tracker readable.")

    lent = CredentialInjector(credentials=(credential(),), read=read)
    async with internet(wires) as net:
        net.zone[API] = [[SITE]]
        fetched = await fetch(net.gate(*RULES, lender=lent), f"https://{API}/v1/me")
    assert isinstance(fetched.last, Denied)
    assert fetched.last.rule == "egress.credential"
    assert "tracker" in fetched.last.reason
    assert "/etc/keys" not in repr(fetched.last)
    assert [each.decision.effect for each in net.attempts] == ["deny"]
    assert (net.lookups, net.connections) == ([], [])


async def test_headers_that_an_api_requires_go_with_the_key_and_nowhere_else(wires: Cable) -> None:
    """Those that the profile names; not to another path, nor where a redirect leads, nor one it does not name."""
    lent = credential(headers=("anthropic-version", "Idempotency-Key"), set_headers={"Notion-Version": "2022-06-28"})
    said = [("anthropic-version", "2023-06-01"), ("idempotency-key", "k1"), ("notion-version", "0"), ("x-api-key", "x")]
    wanted = [b"anthropic-version: 2023-06-01", b"idempotency-key: k1", b"notion-version: 2022-06-28"]
    async with asked(wires, ok(b"hello"), lent=lent, headers=said) as (fetched, requests, _):
        lines = requests[0].lower().split(b"\r\n")
        assert [
            line for line in lines if line.startswith((b"anthropic", b"idempotency", b"notion", b"x-api"))
        ] == wanted
        assert f"Authorization: Bearer {KEY}".encode() in requests[0]
        assert fetched.head.said["dropped"] == ("'notion-version'", "'x-api-key'")
    async with asked(wires, ok(b"hello"), f"https://{API}/v2/me", lent=lent, headers=said) as (fetched, requests, _):
        assert not any(line.split(b":")[0] in requests[0].lower() for line in wanted)
        assert len(fetched.head.said["dropped"]) == 4
    async with internet(wires) as net:
        net.zone |= {API: [[SITE]], ELSEWHERE: [[OTHER]]}
        away = list[bytes]()
        await net.serve(SITE, 443, answering(redirect(f"https://{ELSEWHERE}/v1/me")), name=API)
        await net.serve(OTHER, 443, answering(ok(b"end"), away), name=ELSEWHERE)
        gate = net.gate(*RULES, lender=lends(lent))
        assert (await fetch(gate, f"https://{API}/v1/me", headers=said)).body == b"end"
    assert not any(line.split(b":")[0] in away[0].lower() for line in wanted)


async def test_a_header_that_is_said_twice_is_refused_with_a_key_too(wires: Cable) -> None:
    """Nothing is sent; the control is once."""
    lent, said = credential(headers=("Prefer",)), ("prefer", "a")
    for headers, sent in (([said, said], 0), ([said], 1)):
        async with asked(wires, ok(b"hello"), lent=lent, headers=headers) as (fetched, requests, _):
            assert len(requests) == sent
            assert isinstance(fetched.last, Denied) is not sent
