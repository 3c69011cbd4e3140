"""Every record of a call says by itself whose call it is."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.fixtures.audit_logs import finished
from tests.fixtures.receipts import CALL_ID, receipt_log

from glovebox_audit import read
from glovebox_audit.chain import draft
from glovebox_audit.event import NOT_YET
from glovebox_audit.events import CallCancelled, SandboxStarted
from glovebox_server.calls import Decision

ALLOWED = Decision(effect="allow", rule="allow", reason="It may.", hint="", profile_digest="sha256:p")
STARTED = SandboxStarted(
    call_id=NOT_YET, sandbox_id="s1", driver="bubblewrap", level="namespaces", plan_digest="sha256:plan",
    measured={"uid": 1}, host={"kernel": "6.1"}, verified=True,
)  # fmt: skip


async def test_every_record_of_a_call_names_tool_principal_and_client(tmp_path: Path) -> None:
    """A record read alone is enough to know whose call it is; control: events that no recorder wrote name nobody."""
    async with receipt_log(tmp_path) as harness:
        recorder = await harness.recorder()
        await recorder.record(draft(STARTED))
        await recorder.finish(CallCancelled(call_id=CALL_ID, by="client", elapsed_ms=1.0))
        await harness.audit.append(finished("c_control"))
    records = list(read.records_of(tmp_path, CALL_ID))
    whose = {"tool": "run_python", "principal": "local:1", "client": "C 1", "run": "r_1", "workflow": "release"}
    assert [each.kind for each in records] == [
        "call.decided", "sandbox.started", "egress.decided", "artifact.collected", "artifact.refused",
        "sandbox.started", "call.cancelled", "receipt.signed",
    ]  # fmt: skip
    assert [each.kind for each in records if not whose.items() <= each.data.items()] == []
    assert (records[-3].kind, records[-3].data["measured"]) == ("sandbox.started", {"uid": 1})
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
