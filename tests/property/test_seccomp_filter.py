"""The compiled filter does what the policy says, for every number and hostile arguments, on both architectures.

An interpreter of classic BPF, written from seccomp(2) and the kernel's filter documentation, runs the bytes that
libseccomp made. It shares no code with the compiler, so a wrong rule, a wrong translation or a bug of libseccomp (2.6.0
could merge 64-bit comparisons wrongly: GHSA-4q85-33p6-j5g6) shows here, also for the architecture this test does not
run on.
"""

import errno
import struct
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glovebox_sandboxes.seccomp.filters import compile_policy, number
from glovebox_sandboxes.seccomp.policy import Allow, Refuse, SeccompPolicy, load

ALLOW, ERRNO, KILL_PROCESS = 0x7FFF_0000, 0x0005_0000, 0x8000_0000
AUDIT_ARCH = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
I386 = 0x4000_0003
MACHINES = ("x86_64", "aarch64")
#: Above every number Linux has; the tables of both machines end below 500 today.
NUMBERS = range(1024)
WORD = 0xFFFF_FFFF


@cache
def _instructions(machine: str) -> tuple[tuple[int, int, int, int], ...]:
    return tuple(struct.iter_unpack("=HBBI", compile_policy(load(), machine)))


def _decide(machine: str, call: int, arguments: Sequence[int], arch: int | None = None) -> int:
    data = struct.pack("=IIQ6Q", call, AUDIT_ARCH[machine] if arch is None else arch, 0, *arguments)
    program = _instructions(machine)
    position = accumulator = 0
    while True:
        code, if_true, if_false, constant = program[position]
        position += 1
        match code:
            case 0x20:
                (accumulator,) = struct.unpack_from("=I", data, constant)
            case 0x54:
                accumulator &= constant
            case 0x05:
                position += constant
            case 0x15:
                position += if_true if accumulator == constant else if_false
            case 0x25:
                position += if_true if accumulator > constant else if_false
            case 0x35:
                position += if_true if accumulator >= constant else if_false
            case 0x06:
                return constant
            case _:
                raise AssertionError(f"unknown instruction {code:#x}")


@cache
def _named(machine: str) -> dict[int, str]:
    policy = load()
    names = {name for group in policy.allow for name in group.syscalls}
    names |= {name for group in policy.refuse for name in group.syscalls}
    return {found: name for name in names if (found := number(name, machine)) is not None}


@cache
def _newest(machine: str) -> int:
    """The highest number with a rule of its own."""
    policy = load()
    names = {name for group in policy.allow for name in group.syscalls}
    names |= {name for group in policy.refuse if group.errno != policy.errno for name in group.syscalls}
    return max(found for name in names if (found := number(name, machine)) is not None)


def _expected(policy: SeccompPolicy, machine: str, call: int, arguments: Sequence[int]) -> int:
    if call > _newest(machine):
        return ERRNO | policy.newer_errno
    name = _named(machine).get(call)

    def meets(group: Allow | Refuse) -> bool:
        return name in group.syscalls and all(
            any(arguments[condition.argument] & condition.mask == value for _, value in condition.values)
            for condition in group.when
        )

    if any(meets(group) for group in policy.allow):
        return ALLOW
    answers = [group.errno for group in policy.refuse if meets(group)]
    return ERRNO | (answers[0] if answers else policy.errno)


@pytest.mark.parametrize("machine", MACHINES)
def test_every_number_is_decided_as_the_policy_says(machine: str) -> None:
    """All numbers with zero arguments: allowed, EPERM, or ENOSYS for what is newer than the policy."""
    zeros = [0] * 6
    for call in NUMBERS:
        assert _decide(machine, call, zeros) == _expected(load(), machine, call, zeros), call


@pytest.mark.parametrize("machine", MACHINES)
def test_other_architectures_are_killed(machine: str) -> None:
    """i386 calls, and x32 numbers on x86_64, kill the process whatever they ask."""
    for call in NUMBERS:
        assert _decide(machine, call, [0] * 6, arch=I386) == KILL_PROCESS
    if machine == "x86_64":
        for call in NUMBERS:
            assert _decide(machine, 0x4000_0000 | call, [0] * 6) == KILL_PROCESS


CONDITIONAL = sorted({name for group in load().allow if group.when for name in group.syscalls})
RULES: tuple[Allow | Refuse, ...] = (*load().allow, *load().refuse)
INTERESTING = sorted({value for group in RULES for c in group.when for _, value in c.values} | {0x5412, 38, 16})
WORDS = st.one_of(
    st.sampled_from(INTERESTING),
    st.sampled_from(INTERESTING).map(lambda value: value | 1 << 32),
    st.builds(lambda value, bit: value ^ (1 << bit), st.sampled_from(INTERESTING), st.integers(0, 63)),
    st.integers(0, 2**64 - 1),
)


@given(
    machine=st.sampled_from(MACHINES),
    name=st.sampled_from(CONDITIONAL),
    arguments=st.lists(WORDS, min_size=6, max_size=6),
)
def test_conditions_hold_for_hostile_arguments(machine: str, name: str, arguments: list[int]) -> None:
    """Values near the allowed ones, with other bits and with the high half set, are decided as the policy says."""
    call = number(name, machine)
    if call is not None:
        assert _decide(machine, call, arguments) == _expected(load(), machine, call, arguments)


REQUESTS = st.one_of(st.sampled_from(INTERESTING), st.integers(0, WORD))


@given(machine=st.sampled_from(MACHINES), request=REQUESTS, high=st.integers(0, WORD))
def test_the_high_half_of_an_ioctl_request_changes_nothing(machine: str, request: int, high: int) -> None:
    """The kernel reads 32 bits of the request; CVE-2019-10063 hid TIOCSTI behind the others."""
    call = number("ioctl", machine)
    assert call is not None
    low = _decide(machine, call, [0, request, 0, 0, 0, 0])
    assert _decide(machine, call, [0, high << 32 | request, 0, 0, 0, 0]) == low


@given(machine=st.sampled_from(MACHINES), flags=st.integers(0, 2**64 - 1))
def test_no_clone_flag_word_makes_a_namespace(machine: str, flags: int) -> None:
    """The clone call is allowed exactly when none of the seven CLONE_NEW* bits is set."""
    call = number("clone", machine)
    assert call is not None
    expected = ERRNO | errno.EPERM if flags & 0x7E02_0000 else ALLOW
    assert _decide(machine, call, [flags, 0, 0, 0, 0, 0]) == expected
