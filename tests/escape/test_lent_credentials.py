"""A key lent at the egress, and an allowed server that tries to hand it back: real TLS on a private internet."""

import base64
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.fixtures.brokered import DRIVERS, glovebox, profile
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

from glovebox_profiles.egress import EgressRule
from glovebox_profiles.model import Credential
from glovebox_server.egress.credentials.lent import Lender
from glovebox_server.egress.credentials.sources import CredentialUnavailable, Value
from glovebox_server.egress.events import Denied, End, Failed

__all__ = ["wires"]

API, ELSEWHERE = "api.example.org", "other.example.org"
KEY = "Zq8-fk2_Lw7Rt5Xv9Bn3Mp6Hs1Dy4Gc0+/e"
RULES = tuple(
    EgressRule.from_table({"host": host, "methods": ["GET", "POST"], "schemes": ["https", "http"]})
    for host in (API, ELSEWHERE)
)


def credential(**changed: Any) -> Credential:
    """A key for one folder of one host."""
    given = {"name": "tracker", "host": API, "paths": ("/v1/*",), "header": "Authorization", "prefix": "Bearer ",
             "source": "env:UNUSED"}  # fmt: skip
    return Credential.model_validate(given | changed)


@asynccontextmanager
async def asked(
    wires: Cable, response: bytes, url: str = f"https://{API}/v1/me", *, lent: Credential | None = None, **request: Any
) -> AsyncIterator[tuple[Fetched, list[bytes], Internet]]:
    """What came of one request to a server that gives this response, and what that server read."""

    async def read(_source: str) -> Value:
        return Value(text=KEY)

    async with internet(wires) as net:
        net.zone |= {API: [[SITE]], ELSEWHERE: [[OTHER]]}
        requests: list[bytes] = []
        await net.serve(SITE, 443, answering(response, requests), name=API)
        lender = Lender(credentials=(lent or credential(),), read=read)
        yield await fetch(net.gate(*RULES, lender=lender), url, **request), requests, net


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
        assert fetched.head.url == f"https://{API}/v1/me?a=1"


@pytest.mark.parametrize(
    ("url", "method"),
    [(f"https://{API}/v2/me", "GET"), (f"https://{API}/v1/me", "POST"), (f"https://{API}/v1", "GET")],
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

        async def read(_source: str) -> Value:
            raise AssertionError("nobody needs it")

        gate = net.gate(*RULES, lender=Lender(credentials=(credential(),), read=read))
        assert (await fetch(gate, f"http://{API}/v1/me")).body == b"open"
        assert b"authorization" not in requests[0].lower()


async def test_a_key_does_not_follow_a_redirect_elsewhere_nor_come_back_from_there(wires: Cable) -> None:
    """To another host, and from there to the first: an address that somebody else chose gets no key."""

    async def read(_source: str) -> Value:
        return Value(text=KEY)

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
        fetched = await fetch(
            net.gate(*RULES, lender=Lender(credentials=(credential(),), read=read)), f"https://{API}/v1/me"
        )
        assert fetched.body == b"end"
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


async def test_a_key_in_a_header_or_a_compressed_body_is_not_handed_back(wires: Cable) -> None:
    """Headers are looked at as the body is; the body once it is unpacked."""
    body = gzip.compress(b"<" + KEY.encode() + b">")
    async with asked(wires, ok(body, "Content-Encoding: gzip", f"X-Debug: Bearer {KEY}")) as (fetched, _, _):
        assert fetched.body == b"<[credential tracker]>"
        assert dict(fetched.head.headers)["x-debug"] == "Bearer [credential tracker]"


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

    async def read(_source: str) -> Value:
        return Value(text=KEY)

    async with internet(wires) as net:
        net.zone[API] = [[SITE]]
        await net.serve(SITE, 443, dribble, name=API)
        fetched = await fetch(
            net.gate(*RULES, lender=Lender(credentials=(credential(),), read=read)), f"https://{API}/v1/me"
        )
    # A handful of its letters has left before what they belong to could be known.
    assert fetched.body == b"before Zq8-fk2_[credential tracker] after"
    assert fetched.last == End(truncated=None)


async def test_a_redirect_to_an_address_with_the_key_in_it_leads_nowhere(wires: Cable) -> None:
    """Neither the next URL nor the list of hops tells it."""
    async with asked(wires, redirect(f"https://{ELSEWHERE}/collect?k={KEY}")) as (fetched, _, net):
        assert isinstance(fetched.last, Denied)
        assert KEY not in repr((fetched.events, net.attempts))
        assert net.lookups == [API]


async def test_a_server_that_breaks_the_protocol_is_not_quoted_with_the_key(wires: Cable) -> None:
    """What is said of it may quote what it sent."""
    async with asked(wires, b"HTTP/1.1 200 OK\r\nbad header Bearer " + KEY.encode() + b"\r\n\r\n") as (fetched, _, _):
        assert isinstance(fetched.last, Failed)
        assert KEY[:12] not in repr(fetched.events)


async def test_a_range_is_refused_with_a_key_and_left_out_without(wires: Cable) -> None:
    """Parts of an answer could be asked for that hold parts of the key."""
    ranged = [("Range", "bytes=0-9")]
    async with asked(wires, ok(b"hello"), headers=ranged) as (fetched, requests, _):
        assert isinstance(fetched.last, Denied)
        assert (fetched.last.decision.rule, requests) == ("egress.credential", [])
    async with asked(wires, ok(b"hello"), f"https://{API}/v2/me", headers=ranged) as (fetched, requests, _):
        assert fetched.body == b"hello"
        assert b"range" not in requests[0].lower()


async def test_a_source_that_fails_refuses_the_request_by_name(wires: Cable) -> None:
    """Nothing is dialled, and the refusal is recorded; no path of the host is in it."""

    async def read(_source: str) -> Value:
        raise CredentialUnavailable("its file cannot be read: Permission denied", "Make /etc/keys/tracker readable.")

    async with internet(wires) as net:
        net.zone[API] = [[SITE]]
        fetched = await fetch(
            net.gate(*RULES, lender=Lender(credentials=(credential(),), read=read)), f"https://{API}/v1/me"
        )
    assert isinstance(fetched.last, Denied)
    assert fetched.last.decision.rule == "egress.credential"
    assert "tracker" in fetched.last.decision.reason
    assert "/etc/keys" not in repr(fetched.last)
    assert [each.decision.effect for each in net.attempts] == ["deny"]
    assert (net.lookups, net.connections) == ([], [])


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_call_uses_a_key_that_it_never_has(
    driver: str, wires: Cable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole call: the server gets the key, and neither result, records, receipt nor state directory hold it."""
    monkeypatch.setenv("TRACKER_TOKEN", KEY)
    lent = f"""
[[network.credential]]
name = "tracker"
host = "{API}"
paths = ["/v1/*"]
header = "Authorization"
prefix = "Bearer "
source = "env:TRACKER_TOKEN"
"""
    text = profile("fetch_url", driver, f'{{ host = "{API}" }}') + lent
    async with internet(wires) as net, glovebox(net, tmp_path, text) as box:
        net.zone[API] = [[SITE]]
        requests: list[bytes] = []
        await net.serve(SITE, 443, answering(ok(f"me: {KEY}".encode(), "Content-Type: text/plain"), requests), name=API)
        called = await box.call("fetch_url", url=f"https://{API}/v1/me")
    assert f"Authorization: Bearer {KEY}".encode() in requests[0]
    assert called.fields["text"] == "me: [credential tracker]"
    assert [each.data["credential"] for each in called.records if each.kind == "egress.decided"] == ["tracker"]
    receipt = next(each for each in called.records if each.kind == "receipt.signed").data
    statement = json.loads(base64.b64decode(receipt["envelope"]["payload"]))
    assert [each["credential"] for each in statement["predicate"]["egress"]] == ["tracker"]
    assert KEY not in repr((called.result, called.records, statement))
    kept = [each.read_bytes() for each in (tmp_path / "state").rglob("*") if each.is_file()]
    assert kept
    assert not any(KEY.encode() in each for each in kept)
