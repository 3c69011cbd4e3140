"""Receipts: what they say, in a form anybody can verify, and each way not to be one, refused with its reason."""

import base64
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures import receipt_fields
from tests.fixtures.audit_logs import log_lines
from tests.fixtures.receipts import CALL_ID, CODE, KEY, OTHER, call_of, finished, profile, public, receipt_log, said

from glovebox_audit import read
from glovebox_audit.chain import EvidenceError, canonical, draft
from glovebox_audit.events import ArtifactCollected, CallCancelled, CallFailed
from glovebox_audit.place import AuditError
from glovebox_audit.receipts import dsse, statement
from glovebox_audit.receipts.statement import of_call, verify
from glovebox_server.calls import Decision
from glovebox_server.guards.journal import journal
from glovebox_server.receipts.recorder import _asked


async def test_what_is_signed_is_what_dsse_says() -> None:
    """The example of the DSSE specification, and the empty one: the encoding is the standard's, not ours."""
    assert dsse.pae("http://example.com/HelloWorld", b"hello world") == (
        b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    )
    assert dsse.pae("", b"") == b"DSSEv1 0  0 "
    assert dsse.pae("é", b"\xff") == b"DSSEv1 2 \xc3\xa9 1 \xff"


async def test_it_binds_everything_the_log_says_of_the_call(tmp_path: Path) -> None:
    """Code, arguments, inputs, profile, plan, isolation, egress, outcome, files, what was withheld, and its place."""
    async with receipt_log(tmp_path) as harness:
        receipt = await harness.receipt()
        content = harness.content()
    told = said(content)
    predicate = told["predicate"]
    records = list(read.records_of(tmp_path, CALL_ID))
    last, signed = records[-2:]
    assert predicate["audit"] == {"seq": last.seq, "hash": last.hash, "time": last.time}
    assert (last.kind, signed.kind) == ("call.finished", "receipt.signed")
    assert receipt.digest == signed.data["digest"] == "sha256:" + hashlib.sha256(content).hexdigest()
    assert receipt.uri == f"receipt://{CALL_ID}"
    assert predicate["call"] == {
        "id": CALL_ID, "tool": "run_python", "principal": "local:1", "transport": "cli",
        "received": "2026-11-20T12:00:00Z", "arguments": records[0].data["arguments_digest"],
        "code": "sha256:" + hashlib.sha256(CODE.encode()).hexdigest(), "client": "C 1", "run": "r_1",
        "workflow": "release",
    }  # fmt: skip
    assert [each["digest"] for each in predicate["inputs"]] == ["sha256:" + "2" * 64]
    assert predicate["policy"] == {"profile": "sha256:p", "rule": "allow"}
    isolation = predicate["isolation"]
    assert (isolation["asked"], isolation["plan"]) == (list(profile().isolation), "sha256:plan")
    assert (isolation["fields"][0]["verdict"], isolation["host"]) == ("ok", {"kernel": "6.1"})
    assert [(each["effect"], each["host"]) for each in predicate["egress"]] == [("allow", "docs.python.org")]
    assert (predicate["outcome"]["ended"], predicate["outcome"]["exit_code"]) == ("exited", 0)
    assert predicate["refused_files"] == 1
    assert [each["name"] for each in told["subject"]] == ["artifact:0.txt", "output:stdout", "arguments"]
    assert told["predicateType"] == "https://glovebox.dev/attestation/call/v1"
    assert predicate["withheld"][0] == "Network: all of it."
    assert predicate["server"] == {"version": "1.2", "id": "g1"}


async def test_the_control_it_verifies_with_and_without_its_log(tmp_path: Path) -> None:
    """What every refusal below is held against; a line feed at the end of the file is fine."""
    async with receipt_log(tmp_path) as harness:
        receipt = await harness.receipt()
        content = harness.content()
    assert verify(content, public()).digest == receipt.digest
    assert verify(content + b"\n", public(), tmp_path).digest == receipt.digest


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda each: each["predicate"]["outcome"].update(exit_code=1), "signature does not fit"),
        (lambda each: each["predicate"]["withheld"].clear(), "signature does not fit"),
        (lambda each: each["subject"].pop(0), "signature does not fit"),
    ],
)
async def test_a_tampered_receipt_is_refused(
    change: Callable[[dict[str, Any]], object], reason: str, tmp_path: Path
) -> None:
    """A word of the statement was changed, and nothing else."""
    async with receipt_log(tmp_path) as harness:
        await harness.receipt()
        content = harness.content()
    told = said(content)
    change(told)
    envelope = {**json.loads(content), "payload": base64.b64encode(json.dumps(told).encode()).decode()}
    with pytest.raises(EvidenceError, match=reason):
        verify(canonical(envelope), public())


async def test_a_receipt_of_another_key_is_refused(tmp_path: Path) -> None:
    """Also where it claims our key's id; a key id may hold anything, and is told in escapes."""
    async with receipt_log(tmp_path, OTHER) as harness:
        await harness.receipt()
        content = harness.content()
    assert verify(content, OTHER.public_key())
    with pytest.raises(EvidenceError, match=r"signed with another key: it names sha256:.*, and yours is sha256:"):
        verify(content, public())
    envelope = json.loads(content)
    envelope["signatures"][0]["keyid"] = dsse.key_id(public())
    with pytest.raises(EvidenceError, match="the signature does not fit"):
        verify(canonical(envelope), public())
    async with receipt_log(tmp_path) as one:
        await one.receipt()
        envelope = json.loads(one.content())
    assert verify(canonical(envelope), public()), "control: it holds as it is"
    envelope["signatures"][0]["keyid"] = "\x1b[2J\x1b]0;owned\x07"
    with pytest.raises(EvidenceError, match="another key") as refused:
        verify(canonical(envelope), public())
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a DSSE envelope"),
        (b"[]", "not a DSSE envelope"),
        (b'{"payload":"","payloadType":"x","signatures":[]}', "not a DSSE envelope"),
        (b'{"payload":"","payloadType":"x","signatures":[{"keyid":"","sig":""}]}', "payload is not application/vnd"),
        (b"[" * 100_000, "not a DSSE envelope"),
        (b" " * (dsse.MAX_BYTES + 1), "longer than"),
    ],
)
def test_what_is_no_receipt_is_refused(content: bytes, reason: str) -> None:
    """Whatever the bytes are."""
    with pytest.raises(EvidenceError, match=reason):
        verify(content, public())


def test_a_statement_about_something_else_is_refused() -> None:
    """Our key, but no call. The reason repeats no endless key (found by fuzzing)."""
    other = {"_type": "https://in-toto.io/Statement/v1", "subject": [], "predicateType": "https://x", "predicate": {}}
    envelope = dsse.EnvelopeSigner(KEY).sign(json.dumps(other).encode())
    with pytest.raises(EvidenceError, match="cannot be read by this version: predicateType"):
        verify(canonical(envelope), public())
    content = json.dumps({"\x1b" * 5000: 1}).encode()
    for payload in (content, json.dumps({"predicate": {"x\n" * 3000: 1}}).encode()):
        with pytest.raises(EvidenceError) as refused:
            statement.parse(payload)
        assert str(refused.value).isprintable()
        assert len(str(refused.value)) < 1500


async def test_a_place_that_does_not_match_is_refused(tmp_path: Path) -> None:
    """The log of another server; an empty one; none at all."""
    async with receipt_log(tmp_path / "a") as harness:
        await harness.receipt()
        content = harness.content()
    async with receipt_log(tmp_path / "b") as harness:
        await harness.receipt()
        await harness.receipt("c_" + "1" * 26)
    async with receipt_log(tmp_path / "c"):
        pass
    with pytest.raises(EvidenceError, match=r"its place in the audit log does not match: .* no record 6 with its hash"):
        verify(content, public(), tmp_path / "b")
    with pytest.raises(EvidenceError, match="its place in the audit log does not match"):
        verify(content, public(), tmp_path / "c")
    with pytest.raises(AuditError):
        verify(content, public(), tmp_path / "none")


async def test_a_log_that_was_changed_elsewhere_proves_nothing(tmp_path: Path) -> None:
    """The chain is whole or it is no witness; the line is named."""
    async with receipt_log(tmp_path) as harness:
        await harness.receipt()
        content = harness.content()
    first, *rest = log_lines(tmp_path)
    (tmp_path / "audit.jsonl").write_bytes(first.replace(b"local:1", b"local:2") + b"".join(rest))
    with pytest.raises(EvidenceError, match=r"the audit log is not what was written \(line 1: edited"):
        verify(content, public(), tmp_path)


async def test_two_receipts_of_one_call_cannot_both_hold(tmp_path: Path) -> None:
    """Whoever has the key can sign a second one for the same place; the log knows which one was given out."""
    async with receipt_log(tmp_path) as harness:
        await harness.receipt()
        content = harness.content()
    told = statement.parse(base64.b64decode(json.loads(content)["payload"]))
    lie = told.model_copy(update={"subject": ()})
    forged = canonical(dsse.EnvelopeSigner(KEY).sign(lie.model_dump_json(exclude_none=True).encode()))
    assert verify(forged, public())
    with pytest.raises(EvidenceError, match="the audit log holds another receipt of call"):
        verify(forged, public(), tmp_path)


async def test_it_is_written_with_the_record_it_names_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One disk write for both; on a full disk neither is there, and the call hears of it like of any lost record."""
    synced: list[int] = []
    real = os.fdatasync

    def sync(fd: int) -> None:
        synced.append(fd)
        real(fd)

    async with receipt_log(tmp_path) as harness:
        recorder = await harness.recorder()
        monkeypatch.setattr(os, "fdatasync", sync)
        await recorder.finish(finished())
        assert len(synced) == 1

        def full(_fd: int) -> None:
            raise OSError(28, "No space left on device")

        recorder = await harness.recorder("c_" + "1" * 26)
        before = log_lines(tmp_path)
        monkeypatch.setattr(os, "fdatasync", full)
        with pytest.raises(AuditError, match="No space left"):
            await recorder.finish(finished("c_" + "1" * 26))
        assert log_lines(tmp_path) == before


async def test_a_last_word_too_long_to_be_recorded_is_a_lost_record(tmp_path: Path) -> None:
    """What does not fit in one record is no other error than a full disk; a word that fits is written (control)."""
    async with receipt_log(tmp_path) as harness:
        recorder = await harness.recorder()
        before = log_lines(tmp_path)
        with pytest.raises(AuditError, match=r"record call\.failed.*a record holds 1047552"):
            await recorder.finish(CallFailed(call_id=CALL_ID, error="E", reason="x" * (1 << 20), elapsed_ms=1.0))
        assert log_lines(tmp_path) == before
        await recorder.finish(CallFailed(call_id=CALL_ID, error="E", reason="x" * 1000, elapsed_ms=1.0))
        assert len(log_lines(tmp_path)) == len(before) + 2


@pytest.mark.parametrize(
    ("last", "outcome"),
    [
        (
            CallFailed(call_id=CALL_ID, error="SandboxError", reason="it died", elapsed_ms=1.5),
            {"kind": "call.failed", "error": "SandboxError", "reason": "it died", "elapsed_ms": 1.5},
        ),
        (
            CallCancelled(call_id=CALL_ID, by="client", elapsed_ms=2.5),
            {"kind": "call.cancelled", "by": "client", "elapsed_ms": 2.5},
        ),
    ],
)
async def test_calls_that_do_not_finish_have_one_too(
    last: CallFailed | CallCancelled, outcome: dict[str, Any], tmp_path: Path
) -> None:
    """Failed and cancelled: what is known of them, bound to their own last record."""
    async with receipt_log(tmp_path) as harness:
        recorder = await harness.recorder()
        await recorder.finish(last)
        content = harness.content()
    assert verify(content, public(), tmp_path).statement.predicate.outcome.kind == last.kind
    assert said(content)["predicate"]["outcome"] == outcome


async def test_a_flood_of_files_still_fits_in_one_record(tmp_path: Path) -> None:
    """The first are listed, the others counted; the log has them all."""
    async with receipt_log(tmp_path) as harness:
        recorder = await harness.recorder(files=0, egress=0)
        name = "é" * 250
        uri, digest = "artifact://" + "1" * 32, "0" * 64
        recorder.published([uri] * 1024)
        for number in range(1024):
            collected = ArtifactCollected(
                call_id=CALL_ID, name=f"{name}{number}", uri=uri, sha256=digest, bytes=1, media_type="text/plain"
            )
            await recorder.record(collected)
        await recorder.finish(finished())
        content = harness.content()
    told = said(content)
    assert len(told["subject"]) == dsse.MAX_SUBJECTS + 2
    assert told["predicate"]["unlisted"] == 1024 - dsse.MAX_SUBJECTS
    assert len(content) < dsse.MAX_BYTES - 2048


def test_a_program_that_is_no_utf8_has_a_digest() -> None:
    """A lone surrogate in the code is no reason to have no receipt."""
    call = call_of(code="'\udcff'")
    allowed = Decision(effect="allow", rule="allow", reason="", hint="", profile_digest="")
    decided = draft(journal.decided(call, allowed, keep_arguments=False)).data
    assert _asked(call, decided)["code"].startswith("sha256:")


async def test_a_call_without_a_receipt_has_none(tmp_path: Path) -> None:
    """Unknown, or not ended."""
    async with receipt_log(tmp_path) as harness:
        await harness.recorder()
        assert of_call(tmp_path, CALL_ID) is None
        assert of_call(tmp_path, "c_" + "9" * 26) is None


def test_every_field_is_documented() -> None:
    """docs/operate/receipt-fields.csv has each of them with its meaning, and nothing else."""
    text = receipt_fields.DOCUMENT.read_text()
    assert ",," not in text
    assert receipt_fields.table() == text, "run `python -m tests.fixtures.receipt_fields`, and say what is new"
