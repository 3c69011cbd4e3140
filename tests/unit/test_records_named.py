"""Every record of a call says by itself whose call it is."""

from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from tests.fixtures.audit_logs import decided, finished
from tests.fixtures.receipts import CALL_ID, DIGEST, call_of, profile, receipt_log

from glovebox_audit import read
from glovebox_audit.chain import draft
from glovebox_audit.events import NOT_YET, ArtifactRefused, CallCancelled, EgressDecided, SandboxStarted
from glovebox_audit.log import AuditLog
from glovebox_server.calls import Decision, Principal
from glovebox_server.guards.journal import journal
from glovebox_server.receipts.recorder import CallRecorder

ALLOWED = Decision(effect="allow", rule="allow", reason="It may.", hint="", profile_digest="sha256:p")
STARTED = SandboxStarted(
    call_id=NOT_YET, sandbox_id="s1", driver="bubblewrap", level="namespaces", plan_digest="sha256:plan",
    measured={"uid": 1}, host={"kernel": "6.1"}, verified=True,
)  # fmt: skip


async def test_every_record_of_a_call_names_tool_principal_and_client(tmp_path: Path) -> None:
    """A record read alone is enough to know whose call it is; control: events that no recorder wrote name nobody."""
    call = replace(call_of(), principal=Principal(id="token:alice", transport="http", client="editor 1.0"))
    async with receipt_log(tmp_path) as harness:
        recorder = CallRecorder(harness.issuer, call, profile())
        await recorder.record(journal.decided(call, ALLOWED, keep_arguments=False))
        await recorder.record(draft(STARTED))
        await recorder.record(
            EgressDecided(
                call_id=CALL_ID,
                scheme="https",
                host="docs.python.org",
                port=443,
                asked_digest=DIGEST,
                effect="deny",
                rule="egress.path",
            )
        )
        await recorder.record(ArtifactRefused(call_id=CALL_ID, name="x", reason="no UTF-8"))
        await recorder.finish(CallCancelled(call_id=CALL_ID, by="client", elapsed_ms=1.0))
        await harness.audit.append(finished("c_control"))
    records = list(read.records_of(tmp_path, CALL_ID))
    assert [each.kind for each in records] == [
        "call.decided", "sandbox.started", "egress.decided", "artifact.refused", "call.cancelled", "receipt.signed",
    ]  # fmt: skip
    whose = {"tool": "run_python", "principal": "token:alice", "client": "editor 1.0"}
    assert [each.kind for each in records if not whose.items() <= each.data.items()] == []
    assert records[1].data["measured"] == {"uid": 1}
    (control,) = read.records_of(tmp_path, "c_control")
    assert not whose.keys() & control.data.keys()


@pytest.mark.parametrize("measured", [{"uid": 1, "client": "of the guest"}, {"höhe": 1e-7, "n": 2**60, "x": "\udcff"}])
def test_what_was_drafted_ahead_is_encoded_as_if_it_had_not_been(measured: dict[str, object]) -> None:
    """Byte for byte, whatever a guest measured and a client calls itself; else no reader would take the record."""
    ahead = draft(replace(STARTED, measured=measured)).of_call("c_1", {"tool": "t", "client": 'é"\\ 🙂'})
    told = draft(replace(STARTED, call_id="c_1", measured=measured, tool="t", client='é"\\ 🙂'))
    assert (ahead.encoded, ahead.data) == (told.encoded, told.data)
    with pytest.raises(ValueError, match="of a call"):
        told.of_call("c_2", {})


def test_a_call_whose_server_is_gone_is_named_too(tmp_path: Path) -> None:
    """``call.lost`` is written by the next server, which has only the first record to go by."""

    async def killed() -> None:
        async with AuditLog.open(tmp_path, "s_1") as log:
            await log.append(replace(decided("c_1", principal="token:bob"), client="editor 2.0"))

    async def started() -> None:
        async with AuditLog.open(tmp_path, "s_2"):
            pass

    anyio.run(killed)
    anyio.run(started)
    *_, lost = read.records_of(tmp_path, "c_1")
    assert lost.kind == "call.lost"
    assert {name: lost.data[name] for name in ("tool", "principal", "client")} == {
        "tool": "run_python", "principal": "token:bob", "client": "editor 2.0",
    }  # fmt: skip
