"""The HTTP the sandbox's proxy reads and writes, whatever a program sends (E1, E10, E16)."""

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from _glovebox_guest.proxy.http import BadRequestError, Chunks, parse, refusal

HEADS = st.binary(max_size=300) | st.lists(
    st.sampled_from(
        [b"GET ", b"CONNECT ", b"http://a.example/", b"a.example:443", b" HTTP/1.1", b"\r\n", b"\n", b"\r", b"\0", b" ",
         b"Content-Length: 3", b"Content-Length: +3", b"Transfer-Encoding: chunked", b"Host: b", b":", b"\xff"]
    )
).map(b"".join)  # fmt: skip


@given(HEADS)
def test_any_head_is_read_or_refused(head: bytes) -> None:
    """No other exception can end the guest, and what is opened is one of two streams with a countable body."""
    try:
        asked = parse(head, len(head))
    except BadRequestError:
        return
    assert asked.kind in ("connect", "request")
    assert asked.body >= 0
    if asked.kind == "request":
        assert "://" in asked.meta["url"]
        assert not {name for name, _ in asked.meta["headers"]} & {"host", "connection", "content-length"}


@given(st.text(max_size=700), st.text(max_size=700), st.text(max_size=30))
def test_a_refusal_is_one_response_whatever_it_says(reason: str, hint: str, rule: str) -> None:
    """A reason with line feeds in it can neither add a header nor a second response."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="http://a.example/", headers=[("Host", "a.example")]))
    client.send(h11.EndOfMessage())
    client.receive_data(refusal(403, rule, reason, hint))
    response = client.next_event()
    assert isinstance(response, h11.Response)
    assert response.status_code == 403
    assert {name for name, _ in response.headers} == {b"content-type", b"content-length", b"connection"}
    body = client.next_event()
    assert isinstance(body, h11.Data)
    assert isinstance(client.next_event(), h11.EndOfMessage)
    assert client.trailing_data == (b"", False)


@given(st.lists(st.binary(max_size=50)))
def test_a_whole_answer_arrives_whole(pieces: list[bytes]) -> None:
    """Chunks carry any bytes, and without the last one a client knows that something is missing."""
    asked = parse(b"GET http://a.example/ HTTP/1.1", 30)
    head = asked.head({"status": 200, "headers": [], "hops": [], "dropped": [], "url": "http://a.example/"})
    sent = head + b"".join(map(asked.data, pieces))
    assert _body(sent + asked.last()) == b"".join(pieces)
    with pytest.raises(h11.RemoteProtocolError, match="without sending complete message body"):
        _body(sent)


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (b"GET / HTTP/1.1", "names an absolute URL"),
        (b"GET http://a.example/ HTTP/1.0", "in HTTP/1.1 only"),
        (b"GET http://a.example/ HTTP/2.0", "not a request line"),
        (b"GET  http://a.example/ HTTP/1.1", "not a request line"),
        (b"GET http://a.example/ HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2", "not one number"),
        (b"GET http://a.example/ HTTP/1.1\r\nContent-Length: 0x1", "not one number"),
        (b"GET http://a.example/ HTTP/1.1\r\nTransfer-Encoding: gzip, chunked", "and nothing else"),
        (b"GET http://a.example/ HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 1", "and nothing else"),
        (b"GET http://a.example/ HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: x", "and nothing else"),
        (b"GET http://a.example/ HTTP/1.1\r\nA: b\r\n c", "not a header"),
        (b"GET http://a.example/ HTTP/1.1\r\nA : b", "not a header"),
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(head: bytes, reason: str) -> None:
    """E10: nothing is repaired; the plain spelling beside each is read (control)."""
    with pytest.raises(BadRequestError, match=reason):
        parse(head, len(head))
    plain = b"GET http://a.example/ HTTP/1.1\r\nA: b\r\nContent-Length: 1"
    assert parse(plain, len(plain)).body == 1


def test_a_tunnel_is_asked_for_in_either_version() -> None:
    """Python's own client asks in HTTP/1.0."""
    for version in (b"1.0", b"1.1"):
        head = b"CONNECT a.example:443 HTTP/" + version
        asked = parse(head, len(head))
        assert asked.kind == "connect"
        assert asked.meta == {"authority": "a.example:443"}


def test_a_head_that_does_not_end_is_refused() -> None:
    """E16: the caller says so with a negative end."""
    with pytest.raises(BadRequestError, match="longer than 24576 bytes"):
        parse(b"GET ", -1)


@given(st.lists(st.binary(min_size=1, max_size=50)), st.integers(1, 60), st.binary(max_size=20))
def test_a_body_in_chunks_is_read_however_it_comes(pieces: list[bytes], size: int, after: bytes) -> None:
    """What it carries, and where it ends: what follows is the next request's."""
    sent = b"".join(b"%X ;a=b\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\nA: b\r\n\r\n" + after
    chunks, carried, rest = Chunks(), b"", b""
    for at in range(0, len(sent), size):
        if chunks.over:
            rest += sent[at : at + size]
        else:
            carried += chunks.feed(sent[at : at + size])
    assert chunks.over
    assert (carried, chunks.rest + rest) == (b"".join(pieces), after)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"zz\r\n", "no size"),
        (b"\r\n", "no size"),
        (b"-1\r\n", "no size"),
        (b"0x1\r\n", "no size"),
        (b"123456789\r\n", "no size"),
        (b"1\r\nab\r\n", "longer than its size"),
        (b"1\r\na\n1\r\n", "longer than its size"),
        (b"1;" + b"a" * 1024, "not in chunks"),
        (b"0\r\n" + b"A: b\r\n" * 65, "too much behind it"),
    ],
)
def test_a_body_that_is_not_in_chunks_is_refused(body: bytes, reason: str) -> None:
    """E10: nor repaired; its neighbours without the flaw are read (control)."""
    bad = Chunks()
    assert bad.feed(body) in (b"", b"a")
    assert reason in bad.problem
    good = Chunks()
    assert good.feed(b"1;" + b"a" * 1000 + b"\r\na\r\n0\r\n" + b"A: b\r\n" * 63 + b"\r\n") == b"a"
    assert good.over


def test_a_request_inside_tls_is_for_the_server_that_was_named() -> None:
    """A path becomes a URL of that server; anything else, another server's URL too, is refused."""
    head = b"GET /a?b HTTP/1.1\r\nHost: evil.example"
    asked = parse(head, len(head), "a.example:443")
    assert (asked.kind, asked.meta["url"], asked.keeps) == ("request", "https://a.example/a?b", True)
    port = parse(head, len(head), "a.example:8443")
    assert port.meta["url"] == "https://a.example:8443/a?b"
    for target in (b"https://b.example/", b"*", b"b.example:443", b"@b.example/", b""):
        for method in (b"GET ", b"CONNECT "):
            other = method + target + b" HTTP/1.1"
            with pytest.raises(BadRequestError):
                parse(other, len(other), "a.example:443")
    closing = head + b"\r\nConnection: Close"
    last = parse(closing, len(closing), "a.example:443")
    assert not last.keeps


def _body(data: bytes) -> bytes:
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="http://a.example/", headers=[("Host", "a.example")]))
    client.send(h11.EndOfMessage())
    client.receive_data(data)
    client.receive_data(b"")
    body = b""
    while not isinstance(event := client.next_event(), h11.EndOfMessage):
        if isinstance(event, h11.Data):
            body += event.data
    return body
