"""Events and the lines they become: each documented and recordable whatever it quotes, and nothing else is a record."""

import csv
import hashlib
import io
import json
from pathlib import Path
from typing import Any, get_args

import pytest
import rfc8785
from tests.fixtures import audit_fields
from tests.fixtures.audit_logs import decided, fill, finished

from glovebox_audit import chain
from glovebox_audit.chain import GENESIS, Draft, EvidenceError, Head, Record, draft
from glovebox_audit.events import EVENTS, ArtifactRefused, CallFinished, SandboxStarted
from glovebox_audit.verify import ProblemKind

DOCUMENT = Path(__file__).parents[2] / "docs" / "operate" / "audit.md"


def test_every_event_field_and_kind_of_problem_is_documented() -> None:
    """A reviewer finds each word `verify` may say, and no other."""
    text = audit_fields.DOCUMENT.read_text()
    assert audit_fields.table() == text, "run `python -m tests.fixtures.audit_fields`, and say what is new"
    assert [row for row in csv.reader(io.StringIO(text)) if not row[3].endswith(".")][1:] == []
    with DOCUMENT.with_name("audit-problems.csv").open(newline="") as table:
        rows = list(csv.DictReader(table, strict=True))
    assert sorted(row["kind"] for row in rows) == sorted(get_args(ProblemKind))
    assert [row for row in rows if not all(row.values())] == []


def test_the_check_by_hand_agrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of Python in audit.md recognise a record, and a changed one (control), without Glovebox."""
    program = DOCUMENT.read_text().split("python3 -c '")[1].split("' < audit.jsonl")[0]
    line = fill(tmp_path / "audit", 1)[0].line.decode()
    shown = io.StringIO()
    monkeypatch.setattr("sys.stdin", io.StringIO(line + line.replace("stdio", "other")))
    monkeypatch.setattr("sys.stdout", shown)
    exec(program, {})  # noqa: S102 - our own documentation
    assert shown.getvalue() == "1 True\n1 False\n"


@pytest.mark.parametrize("kind", EVENTS)
def test_a_kind_is_a_stable_lower_case_name(kind: str) -> None:
    assert chain.is_name(kind)
    assert kind == kind.lower()
    assert EVENTS[kind].kind == kind


def test_a_draft_says_what_is_known_when_it_is_made_and_nothing_else() -> None:
    item = draft(decided("c_9"))
    assert item.call_id == "c_9"
    assert not {"call_id", "client", "arguments", "kind"} & item.data.keys()
    assert None not in item.data.values()
    assert draft(finished()).data["outputs"] == [{"name": "stdout", "digest": "sha256:" + "c" * 64, "bytes": 2}]
    measured = {"uid": 65532}
    event = SandboxStarted(
        call_id="c_1",
        sandbox_id="s_1",
        driver="bubblewrap",
        level="namespaces",
        plan_digest="sha256:0",
        measured=measured,
        verified=True,
    )
    item = draft(event)
    measured["uid"] = 0
    assert item.data["measured"] == {"uid": 65532}


def test_hostile_text_is_recorded_and_not_refused() -> None:
    """A file name that is no UTF-8, control characters and giant numbers cannot make an event unrecordable."""
    item = draft(ArtifactRefused(call_id="c_1", name="a\udcff\x1b[2J\u202e", reason="no UTF-8"))
    assert item.data["name"] == "a\\udcff\x1b[2J\u202e"
    big = draft(CallFinished(call_id="c_1", ended="limit", elapsed_ms=1.0, usage={"n": 10**400}))
    assert str(big.data["usage"]).startswith("{'n': '0x")


@pytest.mark.parametrize("call_id", ["", "c 1", 'c"', "c_" + "x" * 127, "c_é", "c_1\n"])
def test_a_call_id_that_is_no_name_is_a_mistake(call_id: str) -> None:
    with pytest.raises(ValueError, match="call id is not a name"):
        draft(decided(call_id))


def test_a_record_has_a_greatest_length() -> None:
    """Just below it is recordable and fits in a line, with the longest names; above it is not."""
    fits = draft(decided("c" * 128, reason="x" * (chain.MAX_LINE_BYTES - 2048)))
    record = chain.seal(fits, seq=2**53 - 1, time="2026-11-20T12:00:00.000001Z", server="s" * 128, prev="f" * 64)
    assert chain.parse(record.line) == record
    with pytest.raises(ValueError, match="a record holds 1047552"):
        draft(decided(reason="x" * chain.MAX_LINE_BYTES))


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


def test_an_anchor_is_seq_and_hash_and_a_head_has_one_length() -> None:
    """What `glovebox audit head` prints is what `verify --anchor` takes."""
    assert chain.parse_anchor("12:" + "a" * 64) == Head(seq=12, hash="a" * 64)
    for text in ("", "12", "12:", "-1:" + "a" * 64, "12:" + "A" * 64, "12:" + "a" * 65, "٣:" + "a" * 64):
        with pytest.raises(ValueError, match="is not an anchor: it is SEQ:HASH"):
            chain.parse_anchor(text)
    for head in (Head(), Head(seq=2**53 - 1, hash="f" * 64, size=2**53 - 1)):
        content = chain.encode_head(head)
        assert len(content) == chain.HEAD_BYTES
        assert chain.parse_head(content) == head
