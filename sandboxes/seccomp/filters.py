"""The policy in the two forms runtimes take: a BPF program (bubblewrap) and Docker's JSON document.

The only place that knows libseccomp. Nothing here may import a driver, a profile or the server.
"""

import platform
import struct
import tempfile
from functools import cache
from types import ModuleType
from typing import Any

from sandboxes.errors import SandboxUnavailable
from sandboxes.seccomp.policy import FULL_MASK, Condition, Policy, load

#: ``AUDIT_ARCH_*`` of each architecture the policy can name, and Docker's word for it (linux/audit.h, seccomp_arch_add(3)).
_AUDIT_ARCH = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_DOCKER_ARCH = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}

#: Numbers from here on are x32 calls on x86_64 (``__X32_SYSCALL_BIT``); the main filter kills those.
_X32_BIT = 0x4000_0000

# Classic BPF, as seccomp(2) shows it: opcode, jump if true, jump if false, constant.
_INSTRUCTION = struct.Struct("=HBBI")
_LOAD_WORD, _JUMP_EQUAL, _JUMP_GREATER, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x06
_OFFSET_NUMBER, _OFFSET_ARCH = 0, 4  # struct seccomp_data
_RET_ERRNO = 0x0005_0000


def _libseccomp() -> ModuleType:
    try:
        import pyseccomp  # noqa: PLC0415 - importing it loads the C library, which may be missing; only bpf() needs it
    except (ImportError, RuntimeError) as error:
        raise SandboxUnavailable(
            "compile the seccomp filter",
            f"libseccomp cannot be loaded ({error})",
            "Install it: apt-get install libseccomp2",
        ) from error
    return pyseccomp


def _numbers(library: ModuleType, policy: Policy, arch: int) -> dict[str, int]:
    """Number of each answered name on ``arch``. Names that this libseccomp or architecture lacks are left out.

    Leaving out is safe: what has no rule is refused.
    """
    found = {name: int(library.resolve_syscall(arch, name)) for name in policy.answered()}
    return {name: number for name, number in found.items() if number >= 0}


def _answer_newer(audit_arch: int, newest: int, answer: int) -> bytes:
    """Instructions to put first: a call above ``newest`` gets ``answer``, everything else reaches the main filter.

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


def compile_policy(policy: Policy, machine: str) -> bytes:
    """Compile ``policy`` for ``machine`` (as ``uname -m`` says it): an array of ``struct sock_filter``.

    Raises:
        SandboxUnavailable: libseccomp is missing or refuses the policy, or the policy does not know the machine.
    """
    if machine not in policy.architectures:
        raise SandboxUnavailable(
            "compile the seccomp filter",
            f"the policy has no rules for {machine}",
            f"Run on {' or '.join(policy.architectures)}, or use a driver that brings its own kernel",
        )
    library = _libseccomp()
    arch = _AUDIT_ARCH[machine]
    numbers = _numbers(library, policy, arch)
    native = library.system_arch()
    try:
        rules = library.SyscallFilter(library.ERRNO(policy.errno))
        rules.set_attr(library.Attr.ACT_BADARCH, library.KILL_PROCESS)
        if arch != native:
            rules.remove_arch(native)
            rules.add_arch(arch)
        for group in policy.allow:
            for name in group.syscalls:
                if name not in numbers:
                    continue
                for alternative in group.alternatives():
                    comparisons = [_comparison(library, condition, value) for condition, value in alternative]
                    # Rules are given in native numbers; libseccomp translates them to the filter's architecture.
                    rules.add_rule(library.ALLOW, library.resolve_syscall(native, name), *comparisons)
        for refusal in policy.refuse:
            for name in refusal.syscalls:
                if name in numbers:
                    rules.add_rule(library.ERRNO(refusal.errno), library.resolve_syscall(native, name))
        with tempfile.TemporaryFile() as file:
            rules.export_bpf(file)
            file.seek(0)
            main = file.read()
    except OSError as error:
        raise SandboxUnavailable(
            "compile the seccomp filter",
            f"libseccomp refused a rule ({error})",
            "Update libseccomp2 to 2.5 or later",
        ) from error
    return _answer_newer(arch, max(numbers.values()), policy.newer_errno) + main


def _comparison(library: ModuleType, condition: Condition, value: int) -> Any:  # noqa: ANN401 - an untyped library's type
    if condition.mask == FULL_MASK:
        return library.Arg(condition.argument, library.EQ, value)
    return library.Arg(condition.argument, library.MASKED_EQ, condition.mask, value)


@cache
def bpf() -> bytes:
    """The compiled filter for this machine, for ``bwrap --seccomp FD``.

    Raises:
        SandboxUnavailable: As :func:`compile_policy`.
    """
    return compile_policy(load(), platform.machine())


def docker_profile() -> dict[str, Any]:
    """The document for Docker's ``--security-opt seccomp=…``, for every architecture the policy names.

    Format: https://docs.docker.com/engine/security/seccomp/ and the OCI runtime specification, config-linux.md.
    """
    policy = load()
    syscalls: list[dict[str, Any]] = []
    for group in policy.allow:
        for alternative in group.alternatives():
            arguments = [_docker_argument(condition, value) for condition, value in alternative]
            syscalls.append(
                {
                    "names": list(group.syscalls),
                    "action": "SCMP_ACT_ALLOW",
                    "args": arguments,
                    "comment": f"{group.id}: {group.needed_by}",
                }
            )
    syscalls.extend(
        {
            "names": list(refusal.syscalls),
            "action": "SCMP_ACT_ERRNO",
            "errnoRet": refusal.errno,
            "comment": f"{refusal.id}: {refusal.why}",
        }
        for refusal in policy.refuse
        if refusal.errno != policy.errno
    )
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": policy.errno,
        # No subArchitectures: a 32-bit program finds no filter rules for its architecture and is killed.
        "archMap": [{"architecture": _DOCKER_ARCH[name], "subArchitectures": []} for name in policy.architectures],
        "syscalls": syscalls,
    }


def _docker_argument(condition: Condition, value: int) -> dict[str, Any]:
    if condition.mask == FULL_MASK:
        return {"index": condition.argument, "value": value, "op": "SCMP_CMP_EQ"}
    return {
        "index": condition.argument,
        "value": condition.mask,
        "valueTwo": value,
        "op": "SCMP_CMP_MASKED_EQ",
    }
