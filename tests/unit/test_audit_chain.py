"""The chain's format: what a line is, and that nothing else is one."""

import hashlib
import json
from typing import Any

import pytest
import rfc8785
from tests.fixtures.audit_logs import decided

from glovebox_audit import chain
from glovebox_audit.chain import GENESIS, Draft, EvidenceError, Head, Record, draft


def sealed(data: dict[str, Any] | None = None, call_id: str | None = "c_1") -> Record:
    data = {"n": 1} if data is None else data
    item = Draft(kind="call.decided", call_id=call_id, data=data, encoded=chain.canonical(data))
    return chain.seal(item, seq=1, time="2026-11-20T12:00:00.000001Z", server="s_1", prev=GENESIS)


@pytest.mark.parametrize("call_id", ["c_1", None])
@pytest.mark.parametrize("data", [{}, {"b": [1, 2.5, None, True], "a": {"hash": "x", "é": "\u20ac\n\u0001"}}])
def test_a_line_is_the_canonical_json_of_its_record(data: dict[str, Any], call_id: str | None) -> None:
    """Rule 1 and rule 2, against a second way of computing them."""
    record = sealed(data, call_id)
    fields: dict[str, Any] = {name: getattr(record, name) for name in ("seq", "time", "server", "kind", "prev")}
    fields |= {"data": data} | ({"call_id": call_id} if call_id else {})
    assert record.hash == hashlib.sha256(rfc8785.dumps(fields)).hexdigest()
    assert record.line == rfc8785.dumps(fields | {"hash": record.hash}) + b"\n"
    assert chain.parse(record.line) == record
    item = draft(decided())
    assert chain.parse(chain.seal(item, seq=7, time=record.time, server="s_1", prev="f" * 64).line).data == item.data


LINE = sealed().line
DEEP = b'{"call_id":"c_1","data":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe\n", "not JSON"),
        (DEEP, "not JSON"),
        (b"[]\n", "keys"),
        (b"{}\n", "keys"),
        (LINE[:-1], "canonical"),
        (LINE[:-1] + b" \n", "canonical"),
        (LINE[:-1] + b"\r\n", "canonical"),
        (b" " + LINE, "canonical"),
        (LINE.replace(b'"n":1', b'"n":1.0'), "canonical"),
        (LINE.replace(b'"n":1', b'"n":0,"n":1'), "canonical"),
        (LINE.replace(b'"n":1', b'"n":NaN'), "canonical JSON does not"),
        (LINE.replace(b'"n":1', b'"n":1e400'), "canonical JSON does not"),
        (LINE.replace(b'"n":1', b'"n":9007199254740993'), "canonical JSON does not"),
        (LINE.replace(b'"n":1', b'"n":"\\ud800"'), "canonical JSON does not"),
        (LINE.replace(b'"seq":1', b'"seq":true'), "wrong form"),
        (LINE.replace(b'"seq":1', b'"seq":0'), "wrong form"),
        (LINE.replace(b'"seq":1', b'"seq":1.0'), "wrong form"),
        (LINE.replace(b'"c_1"', b'"c 1"'), "wrong form"),
        (LINE.replace(b'"s_1"', b"null"), "wrong form"),
        (LINE.replace(b"Z", b"+00:00"), "wrong form"),
        (LINE.replace(b'"kind"', b'"extra":1,"kind"'), "keys"),
        (b"x" * (chain.MAX_LINE_BYTES + 1), "longer"),
    ],
)
def test_bytes_that_break_a_rule_are_no_record(line: bytes, reason: str) -> None:
    """Rule 5: each neighbour of a good line is refused, for its own reason; the good line itself is read."""
    assert chain.parse(LINE).data == {"n": 1}
    with pytest.raises(EvidenceError, match=reason) as caught:
        chain.parse(line)
    assert caught.value.kind is None


def test_an_edit_that_keeps_the_form_is_named_as_an_edit() -> None:
    with pytest.raises(EvidenceError) as caught:
        chain.parse(LINE.replace(b'"n":1', b'"n":2'))
    assert (caught.value.kind, caught.value.seq) == ("edited", 1)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("name\udcff", '"name\\\\udcff"'),
        (2**53, '"0x20000000000000"'),
        (2.0**53, '"0x20000000000000"'),
        (1.0, "1"),
        (1e21, "1e+21"),
        (float("nan"), '"nan"'),
        (float("-inf"), '"-inf"'),
        ({1: (True, None)}, '{"1":[true,null]}'),
        ("\u2028é\u202e", '"\u2028é\u202e"'),
    ],
)
def test_what_json_cannot_hold_becomes_text(value: object, written: str) -> None:
    """A hostile name or number never makes an event unrecordable; the digest is that of the canonical bytes."""
    assert chain.canonical(value).decode() == written
    assert chain.digest(value) == "sha256:" + hashlib.sha256(written.encode()).hexdigest()


def test_what_is_no_json_at_all_is_refused() -> None:
    """Objects and endless nesting are the caller's mistake and say so."""
    with pytest.raises(ValueError, match="object has no place in JSON"):
        chain.canonical([object()])
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(ValueError, match="nested too deeply"):
        chain.canonical(nested)


def test_head_is_read_back_and_has_one_length() -> None:
    for head in (Head(), Head(seq=2**53 - 1, hash="f" * 64, size=2**53 - 1)):
        content = chain.encode_head(head)
        assert len(content) == chain.HEAD_BYTES
        assert chain.parse_head(content) == head


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[" * 256,
        chain.encode_head(Head())[:-1],
        chain.encode_head(Head()) + b"\n",
        chain.encode_head(Head(seq=-1)),
        chain.encode_head(Head(hash="G" * 64)),
        json.dumps({"hash": GENESIS, "seq": True, "size": 0}).encode(),
    ],
)
def test_other_bytes_are_no_head(content: bytes) -> None:
    """A damaged head.json is recognised, never guessed at."""
    with pytest.raises(EvidenceError, match="not the head"):
        chain.parse_head(content)


def test_an_anchor_is_seq_and_hash() -> None:
    """What `glovebox audit head` prints is what `verify --anchor` takes."""
    assert chain.parse_anchor("12:" + "a" * 64) == Head(seq=12, hash="a" * 64)
    for text in ("", "12", "12:", "-1:" + "a" * 64, "12:" + "A" * 64, "12:" + "a" * 65, "٣:" + "a" * 64):
        with pytest.raises(ValueError, match="is not an anchor: it is SEQ:HASH"):
            chain.parse_anchor(text)
