"""The policy in the two forms runtimes take: a BPF program (bubblewrap) and Docker's JSON document.

The only user of libseccomp. Nothing here may import a driver, a profile or the server.
"""

import os
import platform
import struct
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.seccomp.policy import FULL_MASK, Allow, Condition, Refuse, SeccompPolicy, load

#: ``AUDIT_ARCH_*`` (linux/audit.h) of each architecture the policy can name, and Docker's word for it.
_AUDIT_ARCH = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_DOCKER_ARCH = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}

#: Numbers from here on are x32 calls on x86_64 (``__X32_SYSCALL_BIT``); the main filter kills those.
_X32_BIT = 0x4000_0000

# Classic BPF, as seccomp(2) shows it: opcode, jump if true, jump if false, constant.
_INSTRUCTION = struct.Struct("=HBBI")
_LOAD_WORD, _JUMP_EQUAL, _JUMP_GREATER, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x06
_TREE = 2  # SCMP_FLTATR_CTL_OPTIMIZE, seccomp_attr_set(3)
_OFFSET_NUMBER, _OFFSET_ARCH = 0, 4  # struct seccomp_data
_RET_ERRNO = 0x0005_0000


def libseccomp() -> Any:
    """Return the library's binding; raises SandboxError where the library is missing."""
    try:
        import pyseccomp  # noqa: PLC0415 - importing it loads the C library, which may be missing; only bpf() needs it
    except (ImportError, RuntimeError) as error:
        raise SandboxError(
            "compile the seccomp filter",
            f"libseccomp cannot be loaded ({error})",
            "Install it: apt-get install libseccomp2",
        ) from error
    return pyseccomp


def _answer_newer(audit_arch: int, newest: int, answer: int) -> bytes:
    """Return the first instructions: a call above ``newest`` gets ``answer``, all others reach the main filter.

    libseccomp cannot compare numbers by size. runc prepends the same test to Docker's filter, so that both drivers
    answer alike: https://github.com/opencontainers/runc/pull/2750.
    """
    to_main_filter = 5
    program = (
        (_LOAD_WORD, 0, 0, _OFFSET_ARCH),
        (_JUMP_EQUAL, 0, to_main_filter - 1, audit_arch),
        (_LOAD_WORD, 0, 0, _OFFSET_NUMBER),
        (_JUMP_AT_LEAST, to_main_filter - 3, 0, _X32_BIT),
        (_JUMP_GREATER, 0, to_main_filter - 4, newest),
        (_RETURN, 0, 0, _RET_ERRNO | answer),
    )
    return b"".join(_INSTRUCTION.pack(*instruction) for instruction in program)


def _rules(library: Any, policy: SeccompPolicy, native: int) -> Iterator[tuple[int, str, int, list[Any]]]:
    """Yield every rule: action, name, native number, comparisons.

    Names that this libseccomp does not know yet are left out. That is safe: calls without a rule are refused.
    """
    answers: list[tuple[int, Allow | Refuse]] = [(library.ALLOW, group) for group in policy.allow]
    answers += [(library.ERRNO(each.errno), each) for each in policy.refuse if each.errno != policy.errno]
    for action, group in answers:
        for name in group.syscalls:
            for alternative in group.alternatives():
                comparisons = [_comparison(library, condition, value) for condition, value in alternative]
                yield action, name, library.resolve_syscall(native, name), comparisons


def _comparison(library: Any, condition: Condition, value: int) -> Any:
    if condition.mask == FULL_MASK:
        return library.Arg(condition.argument, library.EQ, value)
    return library.Arg(condition.argument, library.MASKED_EQ, condition.mask, value)


def compile_policy(policy: SeccompPolicy, machine: str) -> bytes:
    """Compile ``policy`` for ``machine`` (as in ``uname -m``): an array of ``struct sock_filter``.

    Raises:
        SandboxError: libseccomp is missing or refuses the policy, or the policy does not know the machine.
    """
    if machine not in policy.architectures:
        raise SandboxError(
            "compile the seccomp filter",
            f"the policy has no rules for {machine}",
            f"Run on {' or '.join(policy.architectures)}, or use a driver that brings its own kernel",
        )
    library = libseccomp()
    arch, native = _AUDIT_ARCH[machine], library.system_arch()
    newest = 0
    try:
        rules = library.SyscallFilter(library.ERRNO(policy.errno))
        rules.set_attr(library.Attr.ACT_BADARCH, library.KILL_PROCESS)
        # A tree of numbers, not a list: a call with conditions, which the kernel cannot cache, meets 40 instructions
        # and not 270.
        rules.set_attr(library.Attr.CTL_OPTIMIZE, _TREE)
        if arch != native:
            rules.remove_arch(native)
            rules.add_arch(arch)
        for action, name, native_number, comparisons in _rules(library, policy, native):
            number = library.resolve_syscall(arch, name)
            if number >= 0:
                # Rules are given in native numbers; libseccomp translates them to the filter's architecture.
                rules.add_rule(action, native_number, *comparisons)
                newest = max(newest, number)
        main = exported(rules)
    except OSError as error:
        raise SandboxError(
            "compile the seccomp filter",
            f"libseccomp refused a rule ({error})",
            "Update libseccomp2 to 2.5 or later",
        ) from error
    return _answer_newer(arch, newest, policy.newer_errno) + main


def exported(rules: Any) -> bytes:
    """Return libseccomp's program for its rules: an array of ``struct sock_filter``. Raises OSError."""
    # Not a temporary file: even a briefly named one stays if the server is killed at that moment.
    with os.fdopen(os.memfd_create("filter", os.MFD_CLOEXEC), "w+b") as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()


@cache
def bpf_for_filtering() -> bytes:
    """Return :func:`bpf` for a guest that puts a further filter on programs: it may, and they may not.

    Raises:
        SandboxError: As :func:`compile_policy`.
    """
    policy = load()
    narrowing = Allow(
        id="further-filter",
        needed_by="the guest",
        syscalls=("prctl",),
        when=(Condition(argument=0, mask=0xFFFF_FFFF, values=(("PR_SET_SECCOMP", 22),)),),
    )
    return compile_policy(replace(policy, allow=(*policy.allow, narrowing)), platform.machine())


@cache
def bpf_for_zygote() -> bytes:
    """Return :func:`bpf` for the zygote: it may make namespaces and mounts, and put :func:`bpf` on what it forks.

    Raises:
        SandboxError: As :func:`compile_policy`.
    """
    policy = load()
    made = Allow(id="zygote", needed_by="the zygote", syscalls=("clone", "unshare", "mount"), when=())
    prctl = (("PR_SET_SECCOMP", 22), ("PR_CAPBSET_DROP", 24))
    rights = Allow(
        id="zygote-rights",
        needed_by="the zygote",
        syscalls=("prctl",),
        when=(Condition(argument=0, mask=0xFFFF_FFFF, values=prctl),),
    )
    loopback = Allow(
        id="zygote-loopback",
        needed_by="the zygote",
        syscalls=("ioctl",),
        when=(Condition(argument=1, mask=0xFFFF_FFFF, values=(("SIOCSIFFLAGS", 0x8914),)),),
    )
    pages = Allow(
        id="zygote-pages",
        needed_by="the zygote",
        syscalls=("madvise",),
        when=(Condition(argument=2, mask=0xFFFF_FFFF, values=(("MADV_COLLAPSE", 25),)),),
    )
    return compile_policy(replace(policy, allow=(*policy.allow, made, rights, loopback, pages)), platform.machine())


def number(name: str, machine: str) -> int | None:
    """Return the number of a system call on ``machine``; None if the machine or this libseccomp has none.

    Raises:
        SandboxError: libseccomp is missing.
    """
    found = int(libseccomp().resolve_syscall(_AUDIT_ARCH[machine], name))
    return found if found >= 0 else None


@cache
def bpf() -> bytes:
    """Return the compiled filter for this machine, for ``bwrap --seccomp FD``.

    Raises:
        SandboxError: As :func:`compile_policy`.
    """
    return compile_policy(load(), platform.machine())


def docker_profile() -> dict[str, Any]:
    """Return the document for Docker's ``--security-opt seccomp=…``, for every architecture the policy names.

    Format: https://docs.docker.com/engine/security/seccomp/ and the OCI runtime specification, config-linux.md.
    """
    policy = load()
    syscalls: list[dict[str, Any]] = []
    for group in policy.allow:
        syscalls += _docker_rules(group, {"action": "SCMP_ACT_ALLOW"}, group.needed_by)
    for refusal in policy.refuse:
        if refusal.errno != policy.errno:
            answer = {"action": "SCMP_ACT_ERRNO", "errnoRet": refusal.errno}
            syscalls += _docker_rules(refusal, answer, refusal.why)
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": policy.errno,
        # No subArchitectures: a 32-bit program finds no filter rules for its architecture and is killed.
        "archMap": [{"architecture": _DOCKER_ARCH[name], "subArchitectures": []} for name in policy.architectures],
        "syscalls": syscalls,
    }


def _docker_rules(group: Allow | Refuse, answer: dict[str, Any], why: str) -> Iterator[dict[str, Any]]:
    for alternative in group.alternatives():
        arguments = [_docker_argument(condition, value) for condition, value in alternative]
        yield {"names": list(group.syscalls), **answer, "args": arguments, "comment": f"{group.id}: {why}"}


def _docker_argument(condition: Condition, value: int) -> dict[str, Any]:
    if condition.mask == FULL_MASK:
        return {"index": condition.argument, "value": value, "op": "SCMP_CMP_EQ"}
    return {
        "index": condition.argument,
        "value": condition.mask,
        "valueTwo": value,
        "op": "SCMP_CMP_MASKED_EQ",
    }
