"""Hostile system calls under the real filter in a real sandbox (I4: the kernel's surface).

The sandbox keeps every capability in its own user namespace, which no sandbox of ours does: so most attempts would
succeed, and only the filter is left to refuse them.
"""

import dataclasses
import platform

import pytest
from tests.fixtures import bubblewrap

from glovebox_sandboxes.conformance import case as texts
from glovebox_sandboxes.seccomp import bpf, load
from glovebox_sandboxes.seccomp.cases import ALLOWED, SyscallCase, attempts, load_cases, program
from glovebox_sandboxes.seccomp.filters import compile_policy

pytestmark = pytest.mark.driver("bubblewrap")

MACHINE = platform.machine()
CASES = load_cases(MACHINE)
#: An errno no kernel code returns: whoever answers it is the filter, and not a check for capabilities.
MARK = 1234
CAPABLE = ("--uid", "0", "--gid", "0", "--cap-add", "ALL")


def _marked() -> bytes:
    policy = load()
    refuse = tuple(
        group.model_copy(update={"errno": MARK}) if group.errno == policy.errno else group for group in policy.refuse
    )
    return compile_policy(policy.model_copy(update={"errno": MARK, "refuse": refuse}), MACHINE)


def _answers(filter_program: bytes | None) -> dict[str, str]:
    text = program() + texts.attempts(attempts(CASES))
    done = bubblewrap.run(text, seccomp=filter_program, options=CAPABLE)
    assert done.returncode == 0, done.stderr
    return texts.answers(done.stdout)


@pytest.fixture(scope="module")
def guarded() -> dict[str, str]:
    """All attempts under the shipped filter."""
    return _answers(bpf())


@pytest.fixture(scope="module")
def marked() -> dict[str, str]:
    """All attempts under the same policy with a default answer of its own."""
    return _answers(_marked())


@pytest.fixture(scope="module")
def unguarded() -> dict[str, str]:
    """The control run: all attempts without a filter."""
    return _answers(None)


def _id(case: SyscallCase) -> str:
    return case.id


@pytest.mark.parametrize("case", CASES, ids=_id)
def test_refused_by_the_filter_and_by_nothing_else(
    case: SyscallCase, guarded: dict[str, str], marked: dict[str, str], unguarded: dict[str, str]
) -> None:
    """I4: the attempt gets the policy's answer, from the filter; without it the kernel answers otherwise."""
    assert guarded[case.id] == case.answer
    if case.answer == "EPERM":
        assert marked[case.id] == str(MARK), "something else than the filter refused"
    assert unguarded[case.id] in case.without


@pytest.mark.parametrize("case", CASES, ids=_id)
def test_the_nearest_neighbour_is_allowed(
    case: SyscallCase, guarded: dict[str, str], unguarded: dict[str, str]
) -> None:
    """I4: the filter is not wider than its reason: the nearest useful call works, as it does without the filter."""
    neighbour = f"near {case.id}"
    assert unguarded[neighbour] == ALLOWED, "the control itself does not work here"
    assert guarded[neighbour] == ALLOWED


@pytest.mark.parametrize("nice", [5, 19])
def test_a_server_of_low_priority_has_the_same_neighbours(nice: int) -> None:
    """Under ``nice`` as without it, since each only lowers; going back to 0 is refused there, which is the control."""
    cases = [case for case in CASES if case.rule == "own-niceness"]
    back = dataclasses.replace(cases[0], neighbour={**cases[0].neighbour, "id": "back", "args": [0, 0, 0]})
    lowered = f"{program()}\nos.nice({nice})\n{texts.attempts(attempts([*cases, back]))}"
    answers = texts.answers(bubblewrap.run(lowered, seccomp=bpf(), options=CAPABLE).stdout)
    assert answers.pop("back") == "EACCES"
    assert answers == {
        name: answer for case in cases for name, answer in ((case.id, "EPERM"), (f"near {case.id}", ALLOWED))
    }


def test_every_refused_call_is_attempted() -> None:
    """I4: no name under 'refuse' is without a case."""
    attempted = {(case.rule, case.call) for case in load_cases("x86_64")}
    promised = {(group.id, name) for group in load().refuse for name in group.syscalls}
    assert promised <= attempted


def test_every_condition_is_attempted_from_outside() -> None:
    """I4: each allowance with conditions has a case in which they do not hold."""
    attempted = {case.rule for case in load_cases("x86_64")}
    assert {group.id for group in load().allow if group.when} <= attempted
