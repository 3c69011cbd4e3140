"""The soak's own judge: what one call leaves in the log is told from everything else."""

from dataclasses import replace

import pytest
from tests.soak.account import accounted

from glovebox_audit.chain import GENESIS, Draft, Record, seal

TIME = "2026-11-20T12:00:00.000000Z"
NOON = 1795176000.0
FINISHED = ("call.decided", "sandbox.started", "call.finished", "receipt.signed")


def records(*kinds: str, rule: str | None = None, call: str = "c_1") -> list[Record]:
    """Records of one call that was sent as number 1."""
    data = {"rule": rule, "arguments": {"code": "number = 1\nprint(1)"}}
    draft = Draft(kind="call.decided", call_id=call, data=data, encoded=b"{}")
    one = seal(draft, seq=1, time=TIME, server="g1", prev=GENESIS)
    return [replace(one, kind=kind) for kind in kinds]


@pytest.mark.parametrize(
    ("found", "end"),
    [
        (records(*FINISHED), "call.finished"),
        (records("call.decided", "call.cancelled", "receipt.signed"), "call.cancelled"),
        (records("call.decided", rule="limits.wall_seconds"), "denied"),
        (records("call.decided", "sandbox.started", "call.lost"), "call.lost"),
    ],
)
def test_a_call_with_one_end_is_fine(found: list[Record], end: str) -> None:
    """The control for the next."""
    account = accounted(found, {"number = 1\n": "200 Audit unavailable (call c_1)"}, [(NOON - 1, NOON + 1)])
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
        records(*FINISHED, rule="limits.wall_seconds"),
        records("call.decided", rule="repeat.failing"),
        records("call.decided", "call.lost"),
        records("call.decided", "call.lost", "receipt.signed"),
        records("call.decided", "call.lost", "call.lost"),
        records(*FINISHED, "call.lost"),
        records("call.decided", "call.lost", *FINISHED[2:]),
    ],
)
def test_no_end_two_ends_and_two_records_of_one_call_are_problems(found: list[Record]) -> None:
    """Whatever is not exactly one call."""
    assert accounted(found, {"number = 1\n": "200"}, ()).problems


def test_a_call_may_be_lost_only_while_the_disk_was_full() -> None:
    """And a call may be in no record only if its caller left or was told."""
    lost, told = records("call.decided", "call.lost"), {"number = 1\n": "200 Audit unavailable (call c_1)"}
    assert accounted(lost, told, [(NOON - 1, NOON + 1)]).ended == {"call.lost": 1}
    assert accounted(lost, told, [(NOON - 60, NOON - 50)]).problems
    assert accounted(lost, {"number = 1\n": "200 a result"}, [(NOON - 1, NOON + 1)]).problems
    assert accounted(lost[:1], told, [(NOON - 1, NOON + 1)]).problems
    assert accounted([], {"number = 1\n": "left"}, ()).never_arrived == 1
    assert accounted([], {"number = 1\n": "200 Audit unavailable (call c_1)"}, ()).not_recorded_on_a_full_disk == 1
