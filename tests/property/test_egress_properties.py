"""Egress under arbitrary input: nothing crashes, nothing unlisted is allowed, composition is exact."""

import posixpath
import re
import ssl
import string
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from urllib.parse import unquote

from hypothesis import example, given
from hypothesis import strategies as st
from tests.fixtures.tls_hello import made_hello, real_hello, server_name

from glovebox_profiles.egress.rules import EgressRule, covers, covers_all, decide, decide_url, meet
from glovebox_profiles.egress.targets import EgressTarget, parse_host, parse_url, pattern_covers
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server.egress.events import PeerError
from glovebox_server.egress.request import PIECE_BYTES, BodyDecoder
from glovebox_server.egress.serve import MAX_HELLO, ClientHello

HOSTS = ["example.org", "a.example.org", "b.a.example.org", "xexample.org", "example.com"]
PATTERNS = [*HOSTS, "*.example.org", "*.a.example.org"]
PATHS = ["/", "/a", "/a/", "/a/b", "/a/b/c", "/ab", "/b"]
PATH_PATTERNS = [*PATHS, "/*", "/a/*", "/a/b/*", "/b/*"]


def _some(values: list[str]) -> st.SearchStrategy[frozenset[str]]:
    return st.frozensets(st.sampled_from(values), min_size=1, max_size=3)


plain_rules = st.builds(
    EgressRule,
    host=st.sampled_from(PATTERNS),
    schemes=_some(["http", "https"]),
    ports=st.frozensets(st.sampled_from([80, 443]), min_size=1),
    methods=_some(["GET", "HEAD", "POST"]),
    paths=_some(PATH_PATTERNS),
)
tunnel_rules = st.builds(
    EgressRule,
    host=st.sampled_from(PATTERNS),
    ports=st.frozensets(st.sampled_from([80, 443]), min_size=1),
    methods=_some(["GET", "HEAD"]).map(lambda methods: methods | {"CONNECT"}),
)
rules = plain_rules | tunnel_rules
rule_lists = st.lists(rules, max_size=4)
TARGETS = [
    EgressTarget(method=method, scheme=scheme, host=host, port=port, path=path)
    for host, (method, scheme, path), port in product(
        HOSTS, [*product(["GET", "POST"], ["http", "https"], PATHS), ("CONNECT", "https", "")], [80, 443]
    )
]


def _allowed(these: list[EgressRule] | tuple[EgressRule, ...]) -> set[EgressTarget]:
    return {target for target in TARGETS if decide(target, these).effect == "allow"}


#: What servers and proxies do to a path before they look for it, in any order; each is known of some.
READINGS: list[Callable[[str], str]] = [
    lambda path: unquote(path, "utf-8", "replace"),
    lambda path: unquote(path, "latin-1"),
    lambda path: unicodedata.normalize("NFKC", path),
    lambda path: unicodedata.normalize("NFKD", path).encode("ascii", "ignore").decode(),
    lambda path: "/".join(part.partition(";")[0] for part in path.split("/")),
    lambda path: "/".join(
        part if part in {".", ".."} else part.rstrip(" .+") or part.strip(" +") for part in path.split("/")
    ),
    lambda path: path.replace("\\", "/"),
    lambda path: re.sub(r"[\x00-\x20\x7f-\xa0\xad\u200b-\u200f\u2060\ufeff]", "", path),
    lambda path: re.split(r"[?#\x00]", path)[0],
    lambda path: path.translate(dict.fromkeys(map(ord, "\u2044\u2215\u2216\u29f8\u29f5\xa5\u20a9"), "/")),
    lambda path: re.sub(r"%u([0-9a-fA-F]{4})", lambda found: chr(int(found[1], 16)), path),
    lambda path: path.replace("\xc0\xae", ".").replace("\xc0\xaf", "/").replace("\xc1\x9c", "/"),
]
PIECES = [
    ".", "..", "/", "a", "%2e", ";", "%3b", "%20", "+", "%2b", "%25", "%252e", "%c0%ae", "%c0%af",
    "%ef%bc%8e", "%ef%bc%8f", "%e2%88%95", "%e2%80%a5", "%e2%80%8b", "%c2%a5", "%c2%ad", "%00", "%09", "%3f",
    "%23", "%u002e", "é", "%c3%a9", ":", "~",
]  # fmt: skip


@example("..%3b/x", [4])
@example("%c0%ae%c0%ae/x", [1, 11])
@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), st.lists(st.integers(0, 11), max_size=5))
def test_no_reading_of_an_allowed_path_leads_out_of_its_folder(tail: str, order: list[int]) -> None:
    """E9: whichever of these a server does, in whatever order, the path stays where the rule says."""
    rule = EgressRule(host="example.org", paths=frozenset({"/a/b/*"}))
    if decide_url("GET", f"https://example.org/a/b/{tail}", [rule]).effect == "allow":
        path = parse_url("GET", f"https://example.org/a/b/{tail}").path
        for number in (0, *order, 0):
            path = READINGS[number](path)
        assert (posixpath.normpath(path) + "/").startswith("/a/b/")


@given(rule_lists, rule_lists)
def test_meet_allows_exactly_what_both_allow(left: list[EgressRule], right: list[EgressRule]) -> None:
    """Composition never widens, and never loses what both sides grant."""
    assert _allowed(meet(left, right)) == _allowed(left) & _allowed(right)


@given(rule_lists, rule_lists)
def test_a_covering_list_allows_all_that_the_other_allows(left: list[EgressRule], right: list[EgressRule]) -> None:
    """``covers`` never says yes wrongly, so a diff never hides a widening; and a meet is covered by both sides."""
    if covers_all(left, right):
        assert _allowed(right) <= _allowed(left)
    assert covers_all(left, meet(left, right))
    assert covers_all(right, meet(left, right))


@given(rules)
def test_a_rule_covers_itself_and_survives_its_table(rule: EgressRule) -> None:
    """What a profile writes is what it reads."""
    assert covers(rule, rule)
    assert EgressRule.model_validate(rule.model_dump()) == rule


hostile = st.text(st.characters() | st.sampled_from(".-:%@/\\[]?#\x00\r\n*\uff0e\u3002"), max_size=80)


@given(hostile)
@example("evil\x00.example.org")
def test_any_text_is_a_canonical_host_or_a_refusal(text: str) -> None:
    """The grammar is total, idempotent, and what it lets through is plain."""
    with suppress(RefusedError):
        host = parse_host(text)
        assert parse_host(host) == host
        assert set(host) <= set(string.ascii_lowercase + string.digits + "-.:")
        assert host == text.lower()


@given(hostile, st.sampled_from(["https://", "http://", "https://example.org", "https://a.example.org/", ""]))
def test_any_url_is_denied_unless_its_host_is_listed(text: str, start: str) -> None:
    """Deny by default: whatever is written around it, an allowed target is one that the rule names."""
    rule = EgressRule(host="*.example.org")
    decision = decide_url("GET", start + text, [rule])
    if decision.effect == "allow":
        target = parse_url("GET", start + text)
        assert pattern_covers(rule.host, target.host)
        assert (target.scheme, target.port) == ("https", 443)
        assert parse_url("GET", target.url) == target
        assert target.url.isascii()
        assert target.url.isprintable()
    else:
        assert decision.reason
        assert decision.hint


@given(st.binary(max_size=200), st.sampled_from([b"", b"\x16\x03\x01", b"\x16\x03\x01\x00\x60\x01\x00\x00\x5c"]))
def test_any_bytes_are_a_name_a_refusal_or_not_enough(data: bytes, start: bytes) -> None:
    """The ClientHello reader is total and bounded."""
    reader = ClientHello()
    with suppress(RefusedError):
        reader.feed(start + data)
        assert len(reader.raw) <= MAX_HELLO


REAL = real_hello("files.example.org")


@given(st.integers(min_value=0, max_value=len(REAL) - 1), st.integers(min_value=1, max_value=255), st.data())
def test_a_damaged_hello_is_read_the_same_whole_and_in_pieces(at: int, flip: int, data: st.DataObject) -> None:
    """How the bytes are cut never changes what is read from them."""
    damaged = bytearray(REAL)
    damaged[at] ^= flip
    cut = data.draw(st.integers(min_value=0, max_value=len(damaged)))

    def read(*pieces: bytes) -> str | None:
        reader, name = ClientHello(), None
        try:
            for piece in pieces:
                name = name or reader.feed(piece)
        except RefusedError as refused:
            return refused.reason
        return name

    whole, pieces = read(bytes(damaged)), read(bytes(damaged[:cut]), bytes(damaged[cut:]))
    assert whole == pieces


@given(st.text(st.sampled_from(string.ascii_letters + string.digits + "-."), min_size=1, max_size=40))
def test_the_hello_reader_agrees_with_the_grammar(name: str) -> None:
    """Whatever name is inside, the reader says what ``parse_host`` says."""
    try:
        expected: str | None = parse_host(name)
    except RefusedError:
        expected = None
    try:
        found = ClientHello().feed(made_hello(server_name(name.encode())))
    except RefusedError:
        found = None
    assert found == expected


@given(st.lists(st.binary(max_size=100), max_size=20), st.sampled_from(["gzip", "deflate", "identity", ""]))
def test_any_bytes_decode_within_bounds_or_are_refused(pieces: list[bytes], encoding: str) -> None:
    """The decoder is total, and no piece is larger than the bound."""
    decoder = BodyDecoder(encoding, ratio=100, grace=1000)
    with suppress(PeerError):
        for piece in pieces:
            assert all(len(plain) <= PIECE_BYTES for plain in decoder.feed(piece))
        decoder.finish()


def test_the_real_hello_is_one() -> None:
    """The control for the damaged ones."""
    assert ClientHello().feed(REAL) == "files.example.org"
    assert ssl.HAS_TLSv1_3
