"""The policy file is strict, its digest follows its bytes, and Docker gets the same decisions."""

import copy
import csv
import errno
import io
import itertools
import json
import platform
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.seccomp import bpf, digest, docker_profile, load
from glovebox_sandboxes.seccomp.filters import compile_policy
from glovebox_sandboxes.seccomp.policy import Condition, SeccompPolicy, parse, source

INSTRUCTION_BYTES = 8
#: BPF_MAXINSNS, linux/bpf_common.h: the kernel refuses a longer filter.
MOST_INSTRUCTIONS = 4096

Edit = Callable[[dict[str, Any]], None]


def _edited(edit: Edit) -> bytes:
    data = copy.deepcopy(json.loads(source()))
    edit(data)
    return json.dumps(data).encode()


def test_the_packaged_policy_is_valid_and_says_who_needs_what() -> None:
    """Each allowance says for whom, each refusal why, each id names one group; the digest is of its bytes."""
    policy = load()
    assert all(group.needed_by for group in policy.allow)
    assert all(group.why and group.link.startswith("https://") for group in policy.refuse)
    ids = [group.id for group in load().allow] + [group.id for group in load().refuse]
    assert len(ids) == len(set(ids))
    assert digest() == digest()
    assert digest().startswith("sha256:")
    assert len(digest()) == len("sha256:") + 64


def _allow_bpf(data: dict[str, Any]) -> None:
    data["allow"][0]["syscalls"].append("bpf")


def _allow_clone_plainly(data: dict[str, Any]) -> None:
    data["allow"][0]["syscalls"].append("clone")


def _misspell(data: dict[str, Any]) -> None:
    data["allow"][0]["wehn"] = []


def _no_reason(data: dict[str, Any]) -> None:
    del data["refuse"][0]["why"]


def _empty_condition(data: dict[str, Any]) -> None:
    data["allow"][0]["when"] = [{"argument": 0, "is": {}}]


def _impossible_value(data: dict[str, Any]) -> None:
    data["allow"][0]["when"] = [{"argument": 0, "mask": "0xf", "is": {"too large": "0x10"}}]


def _one_argument_twice(data: dict[str, Any]) -> None:
    data["allow"][0]["when"] = [{"argument": 0, "is": {"a": "1"}}, {"argument": 0, "is": {"b": "2"}}]


def _allow_twice(data: dict[str, Any]) -> None:
    data["allow"][0]["syscalls"].append("read")


def _refuse_what_is_allowed(data: dict[str, Any]) -> None:
    (entry,) = (entry for entry in data["refuse"] if entry["id"] == "record-locks")
    entry["when"][0]["is"]["F_GETFD"] = "1"


def _unknown_errno(data: dict[str, Any]) -> None:
    data["otherwise"]["errno"] = "ENOPE"


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (_allow_bpf, "allowed and refused at once"),
        (_allow_clone_plainly, "with and without conditions"),
        (_impossible_value, "outside its mask"),
        (_one_argument_twice, "two conditions on one argument"),
        (_allow_twice, "allowed twice"),
        (_refuse_what_is_allowed, "'record-locks' and 'descriptor-commands' both answer for fcntl"),
    ],
)
def test_a_policy_that_contradicts_itself_is_found(edit: Edit, reason: str) -> None:
    """A slip in the file is named, never a wider filter. Control: the packaged file says one thing."""
    assert re.search(reason, "; ".join(contradictions(parse(_edited(edit)))))
    assert contradictions(load()) == []


def contradictions(policy: SeccompPolicy) -> list[str]:
    """What libseccomp would take silently for something else."""
    plain = Counter(name for group in policy.allow if not group.when for name in group.syscalls)
    conditional = {name for group in policy.allow if group.when for name in group.syscalls}
    refused = {name for group in policy.refuse if not group.when for name in group.syscalls}
    groups = (*policy.allow, *policy.refuse)
    wrong = {
        "allowed and refused at once": (plain.keys() | conditional) & refused,
        # libseccomp would not count the conditions.
        "allowed with and without conditions": plain.keys() & conditional,
        "allowed twice, keep it where its reason is": {name for name, count in plain.items() if count > 1},
        "a value has bits outside its mask": {
            group.id for group in groups for one in group.when for _, value in one.values if value & ~one.mask
        },
        # One comparison per argument and rule: seccomp_rule_add(3).
        "two conditions on one argument": {
            group.id for group in groups if len({one.argument for one in group.when}) != len(group.when)
        },
    }
    for refusal, group in itertools.product((each for each in policy.refuse if each.when), policy.allow):
        if {*refusal.syscalls} & {*group.syscalls} and not _apart(refusal.when, group.when):
            wrong[f"{refusal.id!r} and {group.id!r} both answer"] = {*refusal.syscalls} & {*group.syscalls}
    return [f"{problem} for {min(names)}" for problem, names in wrong.items() if names]


def _apart(first: tuple[Condition, ...], second: tuple[Condition, ...]) -> bool:
    """No call meets both: they want other values of one argument."""
    return any(
        (one.argument, one.mask) == (other.argument, other.mask)
        and not {value for _, value in one.values} & {value for _, value in other.values}
        for one in first
        for other in second
    )


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (_misspell, r"wehn\n  Extra inputs"),
        (_no_reason, r"why\n  Field required"),
        (_empty_condition, "at least 1 item"),
        (_unknown_errno, "no errno name"),
    ],
)
def test_a_policy_that_is_not_in_form_is_refused(edit: Edit, reason: str) -> None:
    """A slip in the file is an error that names it. Control: the unedited file parses."""
    with pytest.raises(ValueError, match=reason):
        parse(_edited(edit))
    assert parse(source()) == load()


def test_the_filter_fits_the_kernel_and_is_the_same_every_time() -> None:
    """Whole instructions, fewer than the limit; a plan that contains their digest is stable."""
    program = bpf()
    assert len(program) % INSTRUCTION_BYTES == 0
    assert 0 < len(program) // INSTRUCTION_BYTES <= MOST_INSTRUCTIONS
    assert compile_policy(load(), platform.machine()) == bpf()


def test_where_no_filter_can_be_made_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without rules for an architecture, or libseccomp, nothing is compiled: no sandbox without a filter."""
    with pytest.raises(SandboxError, match=r"no rules for riscv64\. Run on x86_64 or aarch64"):
        compile_policy(load(), "riscv64")
    monkeypatch.setitem(sys.modules, "pyseccomp", None)
    with pytest.raises(SandboxError, match="apt-get install libseccomp2"):
        compile_policy(load(), platform.machine())


def test_docker_gets_the_same_defaults() -> None:
    """The answer, architectures without 32-bit relatives, ENOSYS for clone3; as JSON it can be passed inline."""
    profile = docker_profile()
    assert (profile["defaultAction"], profile["defaultErrnoRet"]) == ("SCMP_ACT_ERRNO", errno.EPERM)
    assert [entry["architecture"] for entry in profile["archMap"]] == ["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"]
    assert all(entry["subArchitectures"] == [] for entry in profile["archMap"])
    (clone3,) = [rule for rule in profile["syscalls"] if "clone3" in rule["names"]]
    assert (clone3["action"], clone3["errnoRet"]) == ("SCMP_ACT_ERRNO", errno.ENOSYS)
    assert json.loads(json.dumps(docker_profile())) == docker_profile()


def test_docker_gets_the_same_rules() -> None:
    """Read back from Docker's document, names and conditions are those of the policy, no more and no fewer."""
    theirs = {
        (name, tuple((a["index"], a["op"], a["value"], a.get("valueTwo")) for a in rule["args"]))
        for rule in docker_profile()["syscalls"]
        if rule["action"] == "SCMP_ACT_ALLOW"
        for name in rule["names"]
    }
    full = 0xFFFF_FFFF_FFFF_FFFF
    ours = {
        (
            name,
            tuple(
                (c.argument, "SCMP_CMP_EQ", value, None)
                if c.mask == full
                else (c.argument, "SCMP_CMP_MASKED_EQ", c.mask, value)
                for c, value in alternative
            ),
        )
        for group in load().allow
        for alternative in group.alternatives()
        for name in group.syscalls
    }
    assert theirs == ours


def conditions(when: tuple[Condition, ...]) -> str:
    """In words."""
    return "; ".join(
        f"argument {one.argument} & {one.mask:#x}: {', '.join(name for name, _ in one.values)}" for one in when
    )


def for_reviewers() -> str:
    """docs/internals/seccomp.csv: each rule with its calls, its conditions and its reason."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["rule", "calls", "answer", "only with", "why, or needed by", "source"])
    for group in load().refuse:
        names, answer, only = " ".join(group.syscalls), errno.errorcode.get(group.errno, "0"), conditions(group.when)
        lines.writerow([group.id, names, answer, only, group.why, group.link])
    for allowed in load().allow:
        names, only = " ".join(allowed.syscalls), conditions(allowed.when)
        lines.writerow([allowed.id, names, "the kernel's", only, allowed.needed_by, ""])
    return text.getvalue()


def test_reviewers_have_every_rule_and_call() -> None:
    """seccomp.csv cannot drift: each group, each call, condition, reason and link is in it."""
    folder = Path(__file__).parents[2] / "docs" / "internals"
    assert (folder / "seccomp.csv").read_text() == for_reviewers(), "write `for_reviewers()` there"
    rules = [row["rule"] for row in csv.DictReader(io.StringIO(for_reviewers()))]
    assert rules == [*(rule.id for rule in load().refuse), *(rule.id for rule in load().allow)]
    assert "](seccomp.csv)" in (folder / "seccomp.md").read_text()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b"[" * 100_000,
        b"1" * 5_000,
        json.dumps({**json.loads(source()), "allow": 1}).encode(),
        json.dumps({**json.loads(source()), "architectures": "x86_64"}).encode(),
        json.dumps({**json.loads(source()), "otherwise": {}}).encode(),
        source().replace(b'"argument": 0', b'"argument": 6'),
        source().replace(b'"argument": 0', b'"argument": true'),
        source().replace(b'"0x7e020000"', b'"0x1ffffffffffffffff"'),
        source().replace(b'"0x7e020000"', b'"-1"'),
    ],
    ids=lambda content: repr(content[:12]),
)
def test_whatever_is_no_policy_is_refused_as_one(content: bytes) -> None:
    """Found by fuzzing: other exceptions, and policies with letters for names or with numbers no kernel takes."""
    with pytest.raises(ValueError, match=r"policy\.json"):
        parse(content)
