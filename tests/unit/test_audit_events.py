"""Events: each documented, each recordable whatever hostile text it quotes, none with more than it should keep."""

import csv
import io
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

import pytest
from tests.fixtures import audit_fields
from tests.fixtures.audit_logs import decided, fill, finished

from glovebox_audit import chain
from glovebox_audit.chain import draft
from glovebox_audit.events import EVENTS, ArtifactRefused, CallFinished, SandboxStarted
from glovebox_audit.verify import ProblemKind
from glovebox_server.calls import Decision, Principal, ToolCall
from glovebox_server.guards.journal import journal

DOCUMENT = Path(__file__).parents[2] / "docs" / "operate" / "audit.md"


def test_every_event_and_field_is_documented() -> None:
    text = audit_fields.DOCUMENT.read_text()
    assert audit_fields.table() == text, "run `python -m tests.fixtures.audit_fields`, and say what is new"
    assert [row for row in csv.reader(io.StringIO(text)) if not row[3].endswith(".")][1:] == []


def test_every_kind_of_problem_is_explained() -> None:
    """A reviewer finds each word `verify` may say, and no other."""
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


def test_call_id_stands_outside_of_data_and_absent_fields_are_absent() -> None:
    item = draft(decided("c_9"))
    assert item.call_id == "c_9"
    assert not {"call_id", "client", "arguments", "kind"} & item.data.keys()
    assert None not in item.data.values()


def test_outputs_are_written_by_name_digest_and_size() -> None:
    assert draft(finished()).data["outputs"] == [{"name": "stdout", "digest": "sha256:" + "c" * 64, "bytes": 2}]


def call(arguments: Mapping[str, object]) -> ToolCall:
    principal = Principal(id="token:alice", transport="http", client="claude-code")
    now = datetime(2026, 11, 20, tzinfo=UTC)
    return ToolCall(id="c_1", principal=principal, session=None, tool="run_python", arguments=arguments, received=now)


DECISION = Decision(effect="deny", rule="limits.wall_seconds", reason="Too long.", hint="", profile_digest="sha256:0")


def test_arguments_are_kept_only_where_the_profile_says_so() -> None:
    secret = {"code": "print('canary-7f3a')"}
    hidden = journal.decided(call(secret), DECISION, keep_arguments=False)
    kept = journal.decided(call(secret), DECISION, keep_arguments=True)
    assert b"canary" not in draft(hidden).encoded
    assert draft(kept).data["arguments"] == secret
    assert hidden.arguments_digest == kept.arguments_digest == chain.digest(secret)
    assert hidden.arguments_bytes == len(json.dumps(secret, separators=(",", ":")))
    assert (hidden.rule, hidden.transport) == ("limits.wall_seconds", "http")


def test_hostile_text_is_recorded_and_not_refused() -> None:
    """A file name that is no UTF-8, control characters and giant numbers cannot make an event unrecordable."""
    item = draft(ArtifactRefused(call_id="c_1", name="a\udcff\x1b[2J\u202e", reason="no UTF-8"))
    assert item.data["name"] == "a\\udcff\x1b[2J\u202e"
    big = draft(CallFinished(call_id="c_1", ended="limit", elapsed_ms=1.0, usage={"n": 10**400}))
    assert str(big.data["usage"]).startswith("{'n': '0x")


def test_what_the_caller_changes_later_is_not_recorded() -> None:
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
