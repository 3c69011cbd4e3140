"""The log says how a call came out for its caller: an error is found as one, whatever the program's exit code."""

import json
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.fixtures.audit_logs import finished
from tests.unit.test_audit_query import begun, found, log, run, write

from glovebox_audit.bundle import report
from glovebox_audit.chain import Head, draft, seal
from glovebox_audit.events import (
    ApprovalAnswered,
    ArtifactCollected,
    CallCancelled,
    EgressAnswered,
    EgressDecided,
    PromotionApplied,
    StopMade,
)
from glovebox_audit.receipts.parts import PromotedFile
from glovebox_server.cli.options import time_or_age

__all__ = ["log"]

URI = "artifact://" + "7" * 32
ASKED = EgressDecided(
    call_id="c_net", scheme="https", host="a.example", port=443, method="GET", asked_digest="sha256:" + "1" * 64,
    effect="allow", rule="egress.allow", credential="github",
)  # fmt: skip


@pytest.fixture
def calls(log: Path) -> Path:
    write(log, begun("c_tool"), replace(finished("c_tool"), failed=True))
    write(log, begun("c_good"), replace(finished("c_good"), failed=False))
    write(log, begun("c_stop"), CallCancelled(call_id="c_stop", by="stop", elapsed_ms=1.0))
    return log


def test_failed_finds_every_allowed_call_whose_result_was_an_error(calls: Path) -> None:
    """Each keeps its own word; a refusal is denied, and who cancels a call reads no result."""
    assert found(calls, outcomes=("failed",)) == ["c_exit", "c_time", "c_fail", "c_tool", "c_stop"]
    assert found(calls, outcomes=("denied",)) == ["c_deny"]
    assert found(calls, outcomes=("succeeded",)) == ["c_ok", "c_file", "c_web", "c_good"]
    code, out, _ = run("audit", "query", "--outcome", "failed", "--json", "--state-dir", calls.parent)
    told = {each["call_id"]: (each["outcome"], each["is_error"]) for each in json.loads(out)["calls"]}
    assert (code, told["c_tool"], told["c_time"]) == (0, ("failed", True), ("timed_out", True))
    _, out, _ = run("audit", "show", "c_tool", "--state-dir", calls.parent)
    assert "ended     failed, exit_code 0, its result is an error" in out.replace("exit code", "exit_code")


def test_what_was_reached_is_what_answered(log: Path) -> None:
    """Refused, without an answer, and answered: three words; an earlier log's connections are as they were."""
    refused = replace(ASKED, host="b.example", effect="deny", rule="egress.host", credential=None)
    silent = replace(ASKED, host="c.example", asked_digest="sha256:" + "2" * 64, credential=None)
    answer = EgressAnswered(
        call_id="c_net", host="a.example", asked_digest=ASKED.asked_digest, status=404, type="text/html", bytes=1234,
        complete=False,
    )  # fmt: skip
    write(log, begun("c_net"), ASKED, answer, refused, silent, finished("c_net"))
    _, out, _ = run("audit", "show", "c_net", "--state-dir", log.parent)
    lines = [" ".join(line.split()) for line in out.splitlines() if ".example" in line]
    answered = "404, 1234 bytes, cut off, with the credential github"
    assert lines == [
        f"reached GET https://a.example:443 by the rule egress.allow, {answered}",
        "refused GET https://b.example:443 by the rule egress.host",
        "asked GET https://c.example:443 by the rule egress.allow, no answer on record",
    ]


def test_the_page_names_who_approved_where_and_what_was_changed(log: Path) -> None:
    """Also in an earlier log, which has the approver in the answer alone; and the settings that keep arguments."""
    answer = ApprovalAnswered(
        approval="a_1", digest="sha256:0", principal="local:0", run="r_1", tool="run_python", effect="allow",
        answered_by="local:1000", channel="operator", reach="call", yes=1, state="allowed",
    )  # fmt: skip
    files = (PromotedFile(name="a.csv", origin=URI),)
    put = PromotionApplied(promotion="p_1", by="local:0", folder="reports", digest="sha256:1", files=files)
    file = ArtifactCollected(call_id="c_new", name="a.csv", uri=URI, sha256="0" * 64, bytes=3, media_type="text/csv")
    write(log, answer, begun("c_old", approval="a_1"), finished("c_old"))
    begins = begun("c_new", approval="a_2", approved_by=("token:ops",), workspace="sales")
    write(log, begins, file, finished("c_new"), put)
    made = StopMade(stop="s_1", scope="all", name="", because="lunch", by="local:0")
    write(log, begun("c_cut"), made, CallCancelled(call_id="c_cut", by="stop", stop="s_1", elapsed_ms=1.0))
    _, cut, _ = run("audit", "show", "c_cut", "--state-dir", log.parent)
    assert "stopped   by local:0: lunch\n" in cut
    _, old, _ = run("audit", "show", "c_old", "--state-dir", log.parent)
    _, new, _ = run("audit", "show", "c_new", "--state-dir", log.parent)
    assert "approved by local:1000" in old
    assert "`audit.keep" in old
    assert "GLOVEBOX_AUDIT_ARGUMENTS_KEY" in old
    assert "approved by token:ops" in new
    assert "workspace sales" in new
    assert "changed   a.csv in reports, by promotion p_1" in new
    _, kept, _ = run("audit", "show", "c_runs", "--state-dir", log.parent)
    assert "audit.keep" not in kept


def test_the_page_of_a_bundle_says_the_same() -> None:
    """Of the call's own records: an approver, the workspace, each connection, and the promotion."""
    digest = ASKED.asked_digest
    answer = EgressAnswered(call_id="c_1", host="a", asked_digest=digest, status=200, bytes=5, complete=True)
    ended = replace(finished("c_1"), failed=True, promotion="p_1")
    events = (begun("c_1", approved_by=("token:ops",), workspace="sales"), replace(ASKED, call_id="c_1"), answer, ended)
    head, records = Head(), []
    for event in events:
        records.append(seal(draft(event), seq=head.seq + 1, time="2026-11-23T00:00:00Z", server="s_1", prev=head.hash))
        head = Head(seq=records[-1].seq, hash=records[-1].hash)
    page = report._call("c_1", records, None)
    for words in (
        "token:ops", "<td>sales<", "reached: GET https://a.example:443 by the rule egress.allow, 200, 5 bytes",
        "with the credential github", "put there by promotion p_1", "exited 0, its result is an error",
    ):  # fmt: skip
        assert words in page


def test_yesterday_is_a_local_day(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From midnight to midnight where the operator is; the neighbours are the seconds around it."""
    monkeypatch.setenv("TZ", "Pacific/Kiritimati")  # 14 hours ahead of UTC
    time.tzset()
    try:
        midnight = datetime.combine(datetime.now(UTC).astimezone().date(), datetime.min.time()).astimezone(UTC)
        read = time_or_age
        assert read("today") == read(str(midnight.astimezone().date())) == midnight
        assert read("yesterday") == midnight - timedelta(days=1)
        assert read("2026-11-22T00:00") == datetime(2026, 11, 22, tzinfo=UTC)
        late = midnight - timedelta(seconds=1)
        monkeypatch.setattr("glovebox_audit.file._now", lambda: f"{late:%Y-%m-%dT%H:%M:%S.%fZ}")
        write(log, begun("c_late"), finished("c_late"))
        code, out, _ = run(
            "audit", "query", "--since", "yesterday", "--until", "today", "--json", "--state-dir", log.parent
        )
        assert (code, [each["call_id"] for each in json.loads(out)["calls"]]) == (0, ["c_late"])
    finally:
        monkeypatch.undo()
        time.tzset()
