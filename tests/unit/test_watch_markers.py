"""A canary's marker is found however it is written, cut or mixed; nothing else is taken for one. Secrets likewise."""

import base64
import binascii
import codecs
import html
import json
import quopri
import textwrap
from collections.abc import Callable, Mapping
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fixtures.channels import an_outcome
from tests.unit.test_secret_corpus import POSITIVES

from glovebox_sandboxes.contract.outcome import Blob, Captured, Outcome, OverlayChanges, Shown, SkippedFile
from glovebox_server.guards.redaction.detector import Detector, FormIndex, index_markers
from glovebox_server.guards.redaction.patterns import PATTERNS, find_secrets
from glovebox_server.guards.watch.watch import LIVE_BYTES, Finding, Look, of_url, of_value

MARKER = "q7v2m9x4k1z8c5b3n6w0d7f2h9j4l1p8s5t3r6y0"
OTHER = MARKER[::-1].replace("q", "e").replace("7", "g")
NEEDLES = index_markers({"y_1": MARKER})

WAYS: Mapping[str, Callable[[str], bytes]] = {
    "as it is": lambda text: text.encode(),
    "in capitals": lambda text: text.upper().encode(),
    "letter by letter": lambda text: "\n".join(text).encode(),
    "spaced": lambda text: " - ".join(text).encode(),
    "with tabs": lambda text: "\t\r\n".join(text).encode(),
    "with quotes and backslashes": lambda text: '"\\'.join(text).encode(),
    "with control characters": lambda text: "\x00\x1b\x08\x0c\x7f".join(text).encode(),
    "with signs that nobody sees": lambda text: "\u200b\xad".join(text).encode(),
    "in lines": lambda text: textwrap.fill(text, 7).encode(),
    "as a list": lambda text: json.dumps(list(text)).encode(),
    "backwards": lambda text: text[::-1].encode(),
    "rot13": lambda text: codecs.encode(text, "rot13").encode(),
    "hex": lambda text: text.encode().hex().encode(),
    "hex in capitals with colons": lambda text: text.encode().hex(":").upper().encode(),
    "hex dump": lambda text: binascii.hexlify(text.encode(), " ", 2),
    "percent": lambda text: "".join(f"%{ord(each):02X}" for each in text).encode(),
    "escapes": lambda text: "".join(f"\\x{ord(each):02x}" for each in text).encode(),
    "unicode escapes": lambda text: "".join(f"\\u{ord(each):04x}" for each in text).encode(),
    "a C array": lambda text: ", ".join(f"0x{ord(each):02x}" for each in text).encode(),
    "decimal": lambda text: str(list(text.encode())).encode(),
    "octal": lambda text: "".join(f"\\{ord(each):03o}" for each in text).encode(),
    "binary": lambda text: " ".join(f"{ord(each):08b}" for each in text).encode(),
    "HTML entities": lambda text: "".join(f"&#{ord(each)};" for each in text).encode(),
    "HTML hexadecimal": lambda text: "".join(f"&#x{ord(each):x};" for each in text).encode(),
    "percent twice": lambda text: "".join(f"%25{ord(each):02X}" for each in text).encode(),
    "unicode escapes of JavaScript": lambda text: "".join(f"\\u{{{ord(each):x}}}" for each in text).encode(),
    "long unicode escapes": lambda text: "".join(f"\\U{ord(each):08x}" for each in text).encode(),
    "decimal of three digits": lambda text: " ".join(f"{ord(each):03d}" for each in text).encode(),
    "octal of Python": lambda text: str(list(map(oct, text.encode()))).encode(),
    "binary of Python": lambda text: str(list(map(bin, text.encode()))).encode(),
    "binary without noughts": lambda text: " ".join(f"{ord(each):b}" for each in text).encode(),
    "ASCII's seven bits": lambda text: "".join(f"{ord(each):07b}" for each in text).encode(),
    "HTML entities with noughts": lambda text: "".join(f"&#{ord(each):04d};" for each in text).encode(),
    "HTML hexadecimal with noughts": lambda text: "".join(f"&#x{ord(each):04x};" for each in text).encode(),
    "UTF-16": lambda text: text.encode("utf-16"),
    "UTF-32": lambda text: text.encode("utf-32-be"),
    "base64": lambda text: base64.b64encode(text.encode()),
    "base64, one on": lambda text: base64.b64encode(b"x" + text.encode() + b"yz"),
    "base64, two on": lambda text: base64.b64encode(b"xy" + text.encode() + b"z"),
    "base64 for URLs": lambda text: base64.urlsafe_b64encode(b"?>?" + text.encode()).rstrip(b"="),
    "base64 in lines": lambda text: base64.encodebytes(b"A longer text that holds it: " + text.encode()),
    "base64 twice": lambda text: base64.b64encode(b"x" + base64.b64encode(b"xy" + text.encode())),
    "base64 of hex": lambda text: base64.b64encode(text.encode().hex().encode()),
    "base32": lambda text: base64.b32encode(b"abc" + text.encode()),
    "quoted-printable": lambda text: quopri.encodestring(f"{'x' * 60}{text}".encode()),
    "escaped for HTML and quoted": lambda text: html.escape(repr(text)).encode(),
}


def find_secret_kind(data: bytes) -> str | None:
    """The kind of the first secret in it."""
    return next((kind for _, _, kind in find_secrets(data)), None)


def found(needles: FormIndex, *pieces: tuple[str, bytes]) -> list[tuple[str, str]]:
    """What is found in one call's pieces, and where."""
    look = Look(needles, secrets=False)
    look.search(pieces)
    return [(each.what, each.where) for each in look.findings]


@pytest.mark.parametrize("way", WAYS)
def test_a_marker_is_found_in_every_encoding(way: str) -> None:
    """Amid other text; the control is another marker, written the same way, and its own finds that."""
    before, after = b"The result is: ", b" and nothing else.\n" * 20
    text = before + WAYS[way](MARKER) + after
    assert found(NEEDLES, ("stdout", text))[:1] == [("y_1", "stdout")]
    other = before + WAYS[way](OTHER) + after
    assert found(NEEDLES, ("stdout", other)) == []
    assert found(index_markers({"y_2": OTHER}), ("stdout", other))[:1] == [("y_2", "stdout")]


@pytest.mark.parametrize("way", WAYS)
def test_a_marker_is_found_in_arguments_and_values(way: str) -> None:
    """Whatever JSON makes of what stands between its letters; the control is another marker, written the same way."""
    for text, hits in ((WAYS[way](MARKER), ["y_1"]), (WAYS[way](OTHER), [])):
        for written in {text.decode("latin-1"), text.decode("utf-8", "replace")}:
            value = {"code": f'print("x")\n# {written}\n', "list": [1, None, "\\n"]}
            assert [each for each, _ in found(NEEDLES, ("arguments", of_value(value)))] == hits
            look = Look(NEEDLES, secrets=False)
            look.search(look.pieces(an_outcome(value=[written])))
            assert [(each.what, each.where) for each in look.findings] == [(each, "value") for each in hits]


def test_a_value_is_json_without_its_escapes() -> None:
    """Of a pair of backslashes each is one; the control is what only looks like an escape."""
    assert of_value({"a": 'b\n\t"\\\x00\u200bc'}) == '{"a": "b     \u200bc"}'.encode()
    assert of_value("\\n\\\\u0000 u0000") == b'" n  u0000 u0000"'
    assert of_value("\ud800") == b'"?"'
    assert of_value({1j}) == b'"{1j}"'
    assert of_url("a%20b") == [("url", b"a%20b"), ("url", b"a b")]
    assert of_url("a\ud800b") == [("url", b"a?b")]


@pytest.mark.parametrize("way", ["as it is", "hex", "base64, one on", "percent"])
def test_a_marker_is_found_wherever_it_is_cut(way: str) -> None:
    """Between two writes, and between two outputs of which each is looked at by itself."""
    text = WAYS[way](MARKER)
    for at in range(len(text) + 1):
        scanner = Detector(NEEDLES)
        first = scanner.feed(b"x " * 500 + text[:at])
        assert first or scanner.feed(text[at:] + b" y" * 500)
        assert found(NEEDLES, ("stdout", text[:at]), ("stderr", text[at:]))
    for at in range(len(MARKER) + 1):  # in two calls, or two files
        assert Detector(NEEDLES).feed(MARKER[:at].encode()) or Detector(NEEDLES).feed(MARKER[at:].encode())
    assert Detector(NEEDLES).feed(f"{MARKER[:19]} {MARKER[21:]}".encode()) is None  # no half is whole


@given(st.lists(st.integers(1, 9), max_size=60), st.binary(max_size=300))
def test_a_marker_is_found_in_however_many_writes(cuts: list[int], around: bytes) -> None:
    """Of whatever sizes; what stands around it cannot hide it unless it is letters and digits amid it."""
    text, scanner, hits = around + b"\n" + MARKER.encode() + b"\n" + around, Detector(NEEDLES), []
    for size in [*cuts, len(text)]:
        hits.append(scanner.feed(text[:size]))
        text = text[size:]
    assert "y_1" in hits


@pytest.mark.parametrize(
    "url",
    [
        "https://e.example/?q={}",
        "https://e.example/{}/x.png",
        "https://{}.e.example/",
        "https://user:{}@e.example/",
        "e.example:443#{}",
    ],
)
def test_a_marker_is_found_in_a_url(url: str) -> None:
    """Also where only some of it is percent-encoded, or it is broken up into labels of a name."""
    half = quote(MARKER[:20]) + "".join(f"%{ord(each):02x}" for each in MARKER[20:])
    mixed = "".join(each if number % 2 else f"%{ord(each):02x}" for number, each in enumerate(MARKER))
    for written in (MARKER, half, mixed, ".".join(textwrap.wrap(MARKER, 9))):
        assert found(NEEDLES, *of_url(url.format(written)))
    assert found(NEEDLES, *of_url(url.format(OTHER))) == []


def test_what_is_printed_live_is_shown_until_a_marker_is_in_it() -> None:
    """From there on nothing; nor beyond a bound. The control is a call with nothing planted."""
    shown: list[str] = []
    look = Look(NEEDLES, secrets=False)
    heard = look.printed(shown.append)
    heard(b"one\xff ")
    heard(f"two {MARKER}".encode())
    heard(b"three")
    assert shown == ["one\ufffd "]
    assert look.findings == [Finding(rule="canary", where="stdout", what="y_1")]
    shown.clear()
    heard = Look(NEEDLES, secrets=False).printed(shown.append)
    for _ in range(LIVE_BYTES // 65536 + 3):
        heard(b"y" * 65536)
    assert sum(map(len, shown)) == LIVE_BYTES
    shown.clear()
    Look(index_markers({}), secrets=True).printed(shown.append)(MARKER.encode())
    assert shown == [MARKER]


def test_nothing_is_shown_live_where_a_secret_stops_the_call() -> None:
    """It is found in the whole output only; the control is the test above."""
    shown: list[str] = []
    for needles in (NEEDLES, index_markers({})):
        Look(needles, secrets=True, live=False).printed(shown.append)(b"one ")
    assert shown == []


_TEXT = Captured(text=MARKER, total_bytes=40, dropped_bytes=0)
_SHOWN = Shown(name="a.png", media_type="image/png", data=b"PNG" + MARKER.encode())
PARTS: Mapping[tuple[str, str], Outcome] = {
    ("stdout", "text"): an_outcome(MARKER),
    ("stderr", "text"): an_outcome(stderr=_TEXT),
    ("value", "text"): an_outcome(value={"text": [MARKER]}),
    ("value", "problem"): an_outcome(problems=(MARKER,)),
    ("file", "name"): an_outcome(skipped=(SkippedFile(name=f"{MARKER}.txt", reason="x"),)),
    ("value", "reason of a file"): an_outcome(skipped=(SkippedFile(name="x.txt", reason=MARKER),)),
    ("value", "reason of a copy"): an_outcome(shown=(Shown(name="", reason=MARKER),)),
    ("picture", "blob"): an_outcome(blobs=(Blob(media_type="image/png", data=MARKER.encode()),)),
    ("picture", "copy of one"): an_outcome(blobs=(Blob(media_type="image/png", data=b"PNG", shown=_SHOWN),)),
    ("picture", "copy of a file"): an_outcome(shown=(_SHOWN,)),
    ("file", "name of a change"): an_outcome(
        changes=OverlayChanges(created=(), changed=(f"a/{MARKER}",), deleted=(), counts={}, patch=True)
    ),
}


@pytest.mark.parametrize("part", PARTS)
def test_whatever_a_job_gives_back_is_looked_at(part: tuple[str, str]) -> None:
    """And its kind is told; the control is what gives back nothing."""
    for outcome, where in ((PARTS[part], [part[0]]), (an_outcome(), [])):
        look = Look(NEEDLES, secrets=True)
        look.search(look.pieces(outcome))
        assert [each.where for each in look.findings][:1] == where
        assert len({each.what for each in look.findings}) == len(where)


@pytest.mark.parametrize("part", [("stdout", "text"), ("value", "text"), ("picture", "blob")])
def test_where_nothing_is_looked_for_nothing_is_copied(part: tuple[str, str]) -> None:
    """The control is where one of both is looked for."""
    assert Look(index_markers({}), secrets=False).pieces(PARTS[part]) == []
    assert Look(NEEDLES, secrets=False).pieces(PARTS[part])


_B = "Ab3" * 40


SECRETS: Mapping[str, str] = {
    "private key": "-----BEGIN RSA PRIV" + "ATE KEY-----\n" + "MIIEowIBAAKCAQEA" * 4 + "\n",
    "private key, as JSON": json.dumps("-----BEGIN OPENSSH PRIV" + "ATE KEY-----\n" + "b3BlbnNzaC1rZXkt" * 4),
    "AWS access key with its secret": "aws_access_key_id = AK" + "IAQ4C7MXR2T5YB3ZLW\naws_secret_access_key = "
    + "kD9/xW2+" * 5 + "\n",
    "GitHub token": "gh" + "p_" + _B[:36],
    "GitHub token, fine-grained": "github_" + "pat_" + _B[:22] + "_" + _B[:59],
    "GitLab token": "gl" + "pat-" + _B[:20],
    "Slack token": "xo" + "xb-2345678901234-9876543210987-" + _B[:24],
    "Stripe key": "sk_" + "live_" + _B[:24],
    "Google API key": "AI" + "za" + _B[:35],
    "npm token": "np" + "m_" + _B[:36],
    "PyPI token": "py" + "pi-AgEIcHlwaS5vcmc" + _B[:80],
    "Anthropic key": "sk-" + "ant-api03-" + _B[:93],
    "OpenAI key": "sk-" + "proj-" + _B[:40] + "T3Blb" + "kFJ" + _B[:40],
}  # fmt: skip


@pytest.mark.parametrize("name", SECRETS)
def test_what_only_a_secret_looks_like_is_found(name: str) -> None:
    """Each kind amid other text; the control is the same, a little shorter or marked as an example."""
    secret = SECRETS[name]
    text = f"found: {secret} in the file\n".encode()
    assert find_secret_kind(text) == name.partition(",")[0]
    assert find_secret_kind(text.replace(b"Ab3", b"xxxx")) is None or "Ab3" not in secret
    assert find_secret_kind(secret[: len(secret) // 2].encode()) is None


def test_no_secret_is_spread_over_texts_of_a_value_that_are_shorter_than_its_runs() -> None:
    """So that masking may leave such a value alone, and rules find no more in it than masking; the control is whole."""
    for secret in (*POSITIVES, *SECRETS.values()):
        texts = [secret[at : at + 15] for at in range(0, len(secret), 15)]
        for value in (texts, dict(zip(texts[::2], texts[1::2], strict=False))):
            assert find_secret_kind(of_value(value)) is None
    assert [name for name, secret in SECRETS.items() if find_secret_kind(of_value([secret])) is None] == []


_UNNAMED = b"AK" + b"IAQ4C7MXR2T5YB3ZLW other = " + b"kD9/xW2+" * 5 + b"\n"


def test_words_that_are_no_secrets_hide_none() -> None:
    """Nor does a program that prints nothing but the words hold anybody up."""
    flood = b"AKIA " * 200_000
    assert find_secret_kind(flood) is None
    assert find_secret_kind(flood + b". " * 500 + _UNNAMED) is not None


_KEY = "-----BEGIN PRIV" + "ATE KEY-----"
HOSTILE: Mapping[str, Callable[[int], str]] = {
    "a key of line ends": lambda times: _KEY + r"\n" * times,
    "a key that begins and begins": lambda times: (_KEY + ("a" * 39 + "\n") * 17) * times,
    "key ids": lambda times: "AKIAAAAAAAAAAAAAAAAA " * 40 * times,
    "key ids and words": lambda times: ("AKIAAAAAAAAAAAAAAAAA " * 5 + "a " * 350) * times,
    "OpenAI's word": lambda times: ("T3Blb" + "kFJ " + "-sk-proj" * 90) * times,
    "Slack's numbers": lambda times: ("xo" + "xb-1111111111-1111111111-" + "a" * 90 + "_") * times,
    "any word": lambda times: "".join(word.decode() * 2 for each in PATTERNS for word in each.words) * times,
}


@pytest.mark.long
@pytest.mark.parametrize("case", HOSTILE)
def test_no_text_takes_long_to_look_through(case: str) -> None:
    """Written to be read in many ways: each is a part of a second, where one that is read in all of them times out."""
    for times in (*range(10, 40, 2), 64, 400):
        for text in (HOSTILE[case](times), json.dumps(HOSTILE[case](times))):
            find_secret_kind(text.encode())
