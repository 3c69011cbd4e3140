"""The soak's own judge: what one call leaves in the log is told from everything else."""

from dataclasses import replace

import pytest

from server.audit.chain import GENESIS, Draft, Record, seal
from tests.soak.account import accounted

TIME = "2026-11-20T12:00:00.000000Z"
FINISHED = ("call.decided", "sandbox.started", "call.finished", "receipt.signed")


def records(*kinds: str, effect: str = "allow", call: str = "c_1") -> list[Record]:
    """Records of one call that was sent as number 1."""
    data = {"effect": effect, "arguments": {"code": "# 1\nprint(1)"}}
    draft = Draft(kind="call.decided", call_id=call, data=data, encoded=b"{}")
    one = seal(draft, seq=1, time=TIME, server="g1", prev=GENESIS)
    return [replace(one, kind=kind) for kind in kinds]


@pytest.mark.parametrize(
    ("found", "end"),
    [
        (records(*FINISHED), "call.finished"),
        (records("call.decided", "call.cancelled", "receipt.signed"), "call.cancelled"),
        (records("call.decided", effect="deny"), "denied"),
    ],
)
def test_a_call_with_one_end_is_fine(found: list[Record], end: str) -> None:
    """The control for the next."""
    account = accounted(found, {"# 1\n": "200"}, ())
    assert account.problems == []
    assert account.ended == {end: 1}


@pytest.mark.parametrize(
    "found",
    [
        [],
        records("call.decided"),
        records("call.decided", "sandbox.started"),
        records("call.decided", *FINISHED),
        records(*FINISHED, *FINISHED[2:]),
        records(*FINISHED[:3]),
        records(*FINISHED[1:]),
        [*records(*FINISHED), *records(*FINISHED, call="c_2")],
        records(*FINISHED, effect="deny"),
    ],
)
def test_no_end_two_ends_and_two_records_of_one_call_are_problems(found: list[Record]) -> None:
    """Whatever is not exactly one call."""
    assert accounted(found, {"# 1\n": "200"}, ()).problems


def test_a_record_may_be_missing_only_while_the_disk_was_full() -> None:
    """And a call may be in no record only if its caller left or was told."""
    begun, noon = records("call.decided"), 1795176000.0
    assert accounted(begun, {"# 1\n": "200"}, [(noon - 1, noon + 1)]).without_end_on_a_full_disk == 1
    assert accounted(begun, {"# 1\n": "200"}, [(noon - 60, noon - 50)]).problems
    assert accounted([], {"# 1\n": "left"}, ()).never_arrived == 1
    assert accounted([], {"# 1\n": "200 Audit unavailable (call c_1)"}, ()).not_recorded_on_a_full_disk == 1
