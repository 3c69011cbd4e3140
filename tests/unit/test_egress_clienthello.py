"""The ClientHello reader: one readable server name, or a refusal that says why."""

import pytest
from tests.fixtures.tls_hello import made_hello, real_hello, server_name, vector

from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server.egress.serve import MAX_HELLO, ClientHello

NAME = server_name(b"files.example.org")


def test_a_real_hello_names_its_server_however_it_is_cut() -> None:
    hello = real_hello("Files.Example.org")
    assert ClientHello().feed(hello) == "files.example.org"
    reader = ClientHello()
    names = [reader.feed(hello[at : at + 1]) for at in range(len(hello))]
    assert names[-1] == "files.example.org"
    assert set(names[:-1]) == {None}
    assert bytes(reader.raw) == hello


def test_a_hello_may_span_records() -> None:
    """Records of one byte each are legal; the name is found all the same."""
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
