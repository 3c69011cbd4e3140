"""What the records of a call say: each field from its own source, and nothing that its profile withholds."""

import hashlib
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.fixtures.channels import an_outcome
from tests.fixtures.receipts import CALL_ID, call_of, profile, receipt_log, said

from glovebox_audit import chain, read
from glovebox_audit.events import CallCancelled, CallDecided, CallFinished
from glovebox_audit.receipts.parts import Input, Output
from glovebox_profiles.compile import ProfileSet
from glovebox_profiles.model import Audit
from glovebox_sandboxes.contract.outcome import Blob, Captured, Outcome, OverlayChanges, Shown
from glovebox_server.calls import Decision, Grant, Principal, Trace
from glovebox_server.core.rights import Rights
from glovebox_server.guards.journal import journal
from glovebox_server.guards.redaction.detector import derive_forms

TOKEN, LENT = "ghp_" + "a1B2" * 9, "lent-value-0123456789"
GIVEN = (Input(name="in.csv", uri="artifact://" + "1" * 32, sha256="2" * 64, bytes=3),)
WHO = Principal(id="token:alice", transport="http", user="alice@example")
CALL = replace(call_of(), principal=WHO, trace=Trace(parent="00-1-2-01", state="vendor=1"))
OPEN = Decision(effect="allow", rule="allow", reason="It may.", hint="", profile_digest="sha256:p")
ARGUMENTS = dict(CALL.arguments)


def test_a_decision_is_recorded_with_whoever_it_is_owed_to() -> None:
    """Its person, its role, its policy, its trace, what was approved and lifted; what is not there has no field."""
    lifted = Grant(approval="a_2", what="host", target="https://docs.example:443")
    owed: dict[str, Any] = {"role": "r", "policy_digest": "sha256:q", "approval": "a_1", "approved_by": ("local:0",)}
    bare = CallDecided(
        call_id=CALL_ID, transport="http", effect="allow", rule="allow", reason="It may.", profile_digest="sha256:p",
        arguments_digest=chain.digest(ARGUMENTS), arguments_bytes=len(chain.canonical(ARGUMENTS)),
    )  # fmt: skip
    whole = replace(
        bare, **owed, user="alice@example", traceparent="00-1-2-01", tracestate="vendor=1", arguments=ARGUMENTS,
        inputs=GIVEN, grants=("host:https://docs.example:443 (a_2)",),
    )  # fmt: skip
    decision = replace(OPEN, grants=(lifted,), **owed)
    assert journal.decided(CALL, decision, keep_arguments=True, inputs=GIVEN) == whole
    nobody = replace(CALL, trace=None, principal=replace(WHO, user=None))
    assert journal.decided(nobody, OPEN, keep_arguments=False) == bare


QUIET = an_outcome(code=3)
COPY = Shown(name="", data=b"small")
FULL = replace(
    QUIET,
    stdout=Captured(text="o" * (journal.MAX_KEPT + 1), total_bytes=1 << 20, dropped_bytes=1),
    stderr=Captured(text="é", total_bytes=4096, dropped_bytes=4094),
    value={"n": 1},
    blobs=(Blob(media_type="image/png", data=b"one", shown=COPY), Blob(media_type="image/png", data=b"two!")),
    shown=(Shown(name="a.png", data=b"less"), Shown(name="b.png", reason="too large")),
    changes=OverlayChanges(created=(), changed=(), deleted=(), patch=True, counts={"created": 2, "deleted": 1}),
)
USED = {"wall_ms": 1.0, "cpu_ms": 1.0, "memory_peak_bytes": 1, "cpu_from": "none", "memory_from": "none"}


def ended(outcome: Outcome, *keep: Any, **redacted: int) -> CallFinished:
    """The record of an end, without its duration, which is one."""
    own = profile().model_copy(update={"audit": Audit(keep=keep)})
    found = journal.call_finished(CALL, outcome, own, redacted, failed=True)
    assert found.elapsed_ms > 0
    return replace(found, elapsed_ms=0)


def test_an_end_has_a_digest_of_all_that_came_out_and_text_only_where_it_is_kept() -> None:
    """Of streams with the bytes that were put out, not those captured; none of an empty one, or a copy not made."""
    bare = CallFinished(call_id=CALL_ID, ended="exited", exit_code=3, failed=True, elapsed_ms=0, usage=USED)
    pieces = {
        "stdout": (FULL.stdout.text.encode(), 1 << 20), "stderr": ("é".encode(), 4096), "value": (b'{"n": 1}', 8),
        "image:0": (b"one", 3), "image:1": (b"two!", 4), "shown:image:0": (b"small", 5), "shown:a.png": (b"less", 4),
    }  # fmt: skip

    def outputs(**given: tuple[bytes, int]) -> tuple[Output, ...]:
        digests = {name: "sha256:" + hashlib.sha256(data).hexdigest() for name, (data, _) in given.items()}
        return tuple(Output(name=name, digest=digests[name], bytes=size) for name, (_, size) in given.items())

    usage = {**USED, "workspace_created": 2, "workspace_deleted": 1}
    assert ended(QUIET) == bare
    told = replace(bare, outputs=outputs(**pieces), usage=usage)
    assert ended(FULL, "arguments") == told
    kept = {"stdout": "o" * journal.MAX_KEPT, "value": '{"n": 1}'}
    assert ended(FULL, "stdout", "value", key=2) == replace(told, kept=kept, redacted={"key": 2})
    assert ended(FULL, "stderr") == replace(told, kept={"stderr": "é"})


SEALER = SimpleNamespace(seal=lambda call: f"sealed {call.id}")
SEALED = {"sealed_arguments": f"sealed {CALL_ID}"}
MASKED = {"arguments": "[secret: GitHub token]", "redacted": {"GitHub token": 1}}


@pytest.mark.parametrize(
    ("code", "keep", "more", "recorded"),
    [
        ("1", "stdout", {}, {}),
        ("no UTF-8: \udcff", "stdout", {}, {}),
        ("1", "arguments", {}, {"arguments": "1"}),
        ("1", "arguments", {"sealer": SEALER}, {"arguments": "1"}),
        (TOKEN, "arguments", {}, MASKED),
        (TOKEN, "arguments", {"sealer": SEALER}, MASKED | SEALED),
        (TOKEN, "arguments", {"redact": "none"}, {"arguments": TOKEN}),
        (TOKEN, "stdout", {"sealer": SEALER}, SEALED),
        (LENT, "arguments", {}, {"arguments": "[credential tracker]", "redacted": {"credential of the server": 1}}),
        ("1", "stdout", {"workspace": Path("/srv/sales")}, {"workspace": "sales"}),
        ("1", "stdout", {"workspace": Path("/")}, {}),
        ("1", "stdout", {"workspace": Path("/srv/sales"), "files": "none"}, {}),
        (TOKEN, "arguments", {"workspace": Path("/srv/sales"), "without": "a profile"}, {}),
        (TOKEN, "arguments", {"sealer": SEALER, "without": "a profile"}, SEALED),
    ],
)
async def test_arguments_and_workspace_are_recorded_as_the_profile_in_effect_says(
    tmp_path: Path, code: str, keep: Any, more: dict[str, Any], recorded: dict[str, Any]
) -> None:
    """Kept without secrets, or sealed; a call whose caller has no profile is recorded and receipted without one."""
    own, has = profile(), "without" not in more
    files = own.files.model_copy(update={"workspace": more.get("files", "read")})
    result = own.result.model_copy(update={"redact": more.get("redact", "mask")})
    own = own.model_copy(update={"audit": Audit(keep=(keep,)), "files": files, "result": result})
    rights = Rights(profiles=ProfileSet({"run_python": own} if has else {}, {}), workspace=more.get("workspace"))
    now = SimpleNamespace(
        rights=rights, decision=OPEN, inputs=SimpleNamespace(listed=GIVEN) if has else None, profile=own
    )
    call: Any = SimpleNamespace(now=now, request=call_of(code=code))
    forms = {id(rights): derive_forms("tracker", LENT)}
    async with receipt_log(tmp_path) as log:
        kept = journal.CallJournal(receipts=log.issuer, forms_of=lambda of: forms[id(of)], sealer=more.get("sealer"))
        await (await kept.decide(call)).finish(CallCancelled(call_id=CALL_ID, by="client", elapsed_ms=1.0))
        withheld = said(log.content())["predicate"]["withheld"]
    found = next(iter(read.records_of(tmp_path, CALL_ID))).data
    told = {name: found[name] for name in ("redacted", "sealed_arguments", "workspace") if name in found}
    assert told | ({"arguments": found["arguments"]["code"]} if "arguments" in found else {}) == recorded
    assert ("inputs" in found, bool(withheld)) == (has, has)


@pytest.mark.parametrize(
    ("outcome", "bad", "withheld"),
    [(QUIET, False, None), (replace(FULL, shown=()), True, None), (replace(FULL, blobs=()), False, "a refusal")],
)
async def test_the_last_record_of_a_call_that_ran(
    monkeypatch: pytest.MonkeyPatch, outcome: Outcome, bad: bool, withheld: Any
) -> None:
    """Withheld counts as failed; other parts add to its usage and its fields; pictures hold up no other call."""
    threads, finish = list[threading.Thread](), journal.call_finished

    def finished(*given: Any, **more: Any) -> CallFinished:
        threads.append(threading.current_thread())
        return finish(*given, **more)

    monkeypatch.setattr(journal, "call_finished", finished)
    now = SimpleNamespace(profile=profile(), withheld=withheld, redacted={"key": 1})
    answer, call = SimpleNamespace(failed=bad), cast("Any", SimpleNamespace(now=now, request=CALL))
    ran: Any = SimpleNamespace(outcome=outcome, answer=answer, usage={"scan_ms": 4}, recorded={"promotion": "p_1"})
    unused: Any = None
    found = await journal.CallJournal(receipts=unused, forms_of=unused).describe_end(call, ran)
    assert found.elapsed_ms > 0
    plain = finish(CALL, outcome, profile(), {"key": 1}, failed=outcome is not QUIET)
    usage = {**plain.usage, "scan_ms": 4}
    assert found == replace(plain, elapsed_ms=found.elapsed_ms, usage=usage, promotion="p_1")
    assert (threads == [threading.main_thread()]) is (outcome is QUIET)
