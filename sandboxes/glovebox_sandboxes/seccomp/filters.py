"""The policy in the two forms runtimes take: a BPF program (bubblewrap) and Docker's JSON document.

The only user of libseccomp.
"""

import os
import platform
import struct
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def compiling() -> Iterator[Any]:
    """Provide libseccomp; raise SandboxError if it is missing, or refuses a rule in the block."""
    library = libseccomp()
    try:
        yield library
    except OSError as error:
        raise SandboxError(
            "compile the seccomp filter", f"libseccomp refused a rule ({error})", "Update libseccomp2 to 2.5 or later"
        ) from error


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
    for group, answer in _answers(policy):
        action = library.ALLOW if answer is None else library.ERRNO(answer)
        for name in group.syscalls:
            for alternative in group.alternatives():
                comparisons = [_comparison(library, condition, value) for condition, value in alternative]
                yield action, name, library.resolve_syscall(native, name), comparisons


def _answers(policy: SeccompPolicy) -> Iterator[tuple[Allow | Refuse, int | None]]:
    """Yield each group that is not answered as everything else, and its errno; None for what is allowed."""
    yield from ((group, None) for group in policy.allow)
    yield from ((group, group.errno) for group in policy.refuse if group.errno != policy.errno)


def _comparison(library: Any, condition: Condition, value: int) -> Any:
    if condition.mask == FULL_MASK:
        return library.Arg(condition.argument, library.EQ, value)
    return library.Arg(condition.argument, library.MASKED_EQ, condition.mask, value)


def compile_policy(policy: SeccompPolicy, machine: str) -> bytes:
    """Compile ``policy`` for ``machine`` (as in ``uname -m``): an array of ``struct sock_filter``.

    Raises SandboxError: libseccomp is missing or refuses the policy, or the policy does not know the machine.
    """
    if machine not in policy.architectures:
        raise SandboxError(
            "compile the seccomp filter",
            f"the policy has no rules for {machine}",
            f"Run on {' or '.join(policy.architectures)}, or use a driver that brings its own kernel",
        )
    newest = 0
    with compiling() as library:
        arch, native = _AUDIT_ARCH[machine], library.system_arch()
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
    return _answer_newer(arch, newest, policy.newer_errno) + main


def exported(rules: Any) -> bytes:
    """Return libseccomp's program for its rules: an array of ``struct sock_filter``. Raises OSError."""
    # Not a temporary file: even a briefly named one stays if the server is killed at that moment.
    with os.fdopen(os.memfd_create("filter", os.MFD_CLOEXEC), "w+b") as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()


def number(name: str, machine: str) -> int | None:
    """Return the number of a system call on ``machine``; None if the machine or this libseccomp has none.

    Raises SandboxError: libseccomp is missing.
    """
    found = int(libseccomp().resolve_syscall(_AUDIT_ARCH[machine], name))
    return found if found >= 0 else None


def bpf() -> bytes:
    """Return the compiled filter for this machine, for ``bwrap --seccomp FD``. Raises SandboxError."""
    return _compiled()


def bpf_for_filtering() -> bytes:
    """Return :func:`bpf` for a guest that puts a further filter on programs: it may, and they may not."""
    return _compiled(_call("prctl", 0, PR_SET_SECCOMP=22))


def bpf_for_zygote() -> bytes:
    """Return :func:`bpf` for the zygote: it may make namespaces and mounts, and put :func:`bpf` on what it forks."""
    return _compiled(
        _call("clone"),
        _call("unshare"),
        _call("mount"),
        _call("prctl", 0, PR_SET_SECCOMP=22, PR_CAPBSET_DROP=24),
        _call("ioctl", 1, SIOCSIFFLAGS=0x8914),
        _call("madvise", 2, MADV_COLLAPSE=25),
    )


def _call(name: str, argument: int = 0, **values: int) -> Allow:
    """Return an allowance for our own code: of a call, if an ``int`` argument is one of these values."""
    when = (Condition(argument=argument, mask=0xFFFF_FFFF, values=tuple(values.items())),) if values else ()
    return Allow(id="own", needed_by="the guest", syscalls=(name,), when=when)


@cache
def _compiled(*more: Allow) -> bytes:
    policy = load()
    return compile_policy(policy.model_copy(update={"allow": (*policy.allow, *more)}), platform.machine())


def docker_profile() -> dict[str, Any]:
    """Return the document for Docker's ``--security-opt seccomp=…``, for every architecture the policy names.

    Format: https://docs.docker.com/engine/security/seccomp/ and the OCI runtime specification, config-linux.md.
    """
    policy = load()
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": policy.errno,
        # No subArchitectures: a 32-bit program finds no filter rules for its architecture and is killed.
        "archMap": [{"architecture": _DOCKER_ARCH[name], "subArchitectures": []} for name in policy.architectures],
        "syscalls": [rule for group, answer in _answers(policy) for rule in _docker_rules(group, answer)],
    }


def _docker_rules(group: Allow | Refuse, answer: int | None) -> Iterator[dict[str, Any]]:
    action = {"action": "SCMP_ACT_ALLOW"} if answer is None else {"action": "SCMP_ACT_ERRNO", "errnoRet": answer}
    why = group.needed_by if isinstance(group, Allow) else group.why
    for alternative in group.alternatives():
        arguments = [_docker_argument(condition, value) for condition, value in alternative]
        yield {"names": list(group.syscalls), **action, "args": arguments, "comment": f"{group.id}: {why}"}


def _docker_argument(condition: Condition, value: int) -> dict[str, Any]:
    if condition.mask == FULL_MASK:
        return {"index": condition.argument, "value": value, "op": "SCMP_CMP_EQ"}
    return {"index": condition.argument, "value": condition.mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}
