"""The policy in the two forms runtimes take: a BPF program (bubblewrap) and Docker's JSON document.

The only user of libseccomp.

Programs alone get further filters, which the guest installs if the kernel or the host lacks something. Linux keeps from
a pid namespace's process 1 every signal of its own namespace that it does not handle (pid_namespaces(7)). gVisor does
not, and has no Landlock to keep signals apart, so a program there may not name process 1 to any call that signals.
Without a control group that counts processor time, the guest counts it, from processes that live or were waited for.
Children of a process that ignores SIGCHLD are never waited for (sigaction(2), SA_NOCLDWAIT), so a program there may not
change that signal's action.
"""

import errno
import os
import platform
import signal
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
_COMPILING = "compile the seccomp filter"


@contextmanager
def compiling() -> Iterator[Any]:
    """Provide libseccomp; raise SandboxError if it is missing, or refuses a rule in the block."""
    try:
        import pyseccomp  # noqa: PLC0415 - importing it loads the C library, which may be missing; only bpf() needs it
    except (ImportError, RuntimeError) as error:
        fix = "Install it: apt-get install libseccomp2"
        raise SandboxError(_COMPILING, f"libseccomp cannot be loaded ({error})", fix) from error
    try:
        yield pyseccomp
    except OSError as error:
        fix = "Update libseccomp2 to 2.5 or later"
        raise SandboxError(_COMPILING, f"libseccomp refused a rule ({error})", fix) from error


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


def compile_policy(policy: SeccompPolicy, machine: str) -> bytes:
    """Compile ``policy`` for ``machine`` (as in ``uname -m``): an array of ``struct sock_filter``.

    Raises SandboxError: libseccomp is missing or refuses the policy, or the policy does not know the machine.
    """
    if machine not in policy.architectures:
        fix = f"Run on {' or '.join(policy.architectures)}, or use a driver that brings its own kernel"
        raise SandboxError(_COMPILING, f"the policy has no rules for {machine}", fix)
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
        for rule in docker_profile(policy)["syscalls"]:
            action = library.ERRNO(rule["errnoRet"]) if "errnoRet" in rule else library.ALLOW
            comparisons = [
                library.Arg(each["index"], library.MASKED_EQ, each["value"], each["valueTwo"])
                if "valueTwo" in each
                else library.Arg(each["index"], library.EQ, each["value"])
                for each in rule["args"]
            ]
            for name in rule["names"]:
                found = library.resolve_syscall(arch, name)
                # Names that this libseccomp does not know are left out, which is safe: without a rule they are refused.
                if found >= 0:
                    # Rules are given in native numbers; libseccomp translates them to the filter's architecture.
                    rules.add_rule(action, library.resolve_syscall(native, name), *comparisons)
                    newest = max(newest, found)
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
    with compiling() as library:
        found = int(library.resolve_syscall(_AUDIT_ARCH[machine], name))
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


def docker_profile(policy: SeccompPolicy | None = None) -> dict[str, Any]:
    """Return the document for Docker's ``--security-opt seccomp=…``, for every architecture the policy names.

    Format: https://docs.docker.com/engine/security/seccomp/ and the OCI runtime specification, config-linux.md.
    """
    policy = policy or load()
    # What is answered as everything else needs no rule.
    groups: list[Allow | Refuse] = [*policy.allow, *(each for each in policy.refuse if each.errno != policy.errno)]
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": policy.errno,
        # No subArchitectures: a 32-bit program finds no filter rules for its architecture and is killed.
        "archMap": [{"architecture": _DOCKER_ARCH[name], "subArchitectures": []} for name in policy.architectures],
        "syscalls": [rule for group in groups for rule in _docker_rules(group)],
    }


def _docker_rules(group: Allow | Refuse) -> Iterator[dict[str, Any]]:
    action: dict[str, Any] = {"action": "SCMP_ACT_ALLOW"}
    if isinstance(group, Refuse):
        action = {"action": "SCMP_ACT_ERRNO", "errnoRet": group.errno}
    why = group.needed_by if isinstance(group, Allow) else group.why
    for alternative in group.alternatives():
        arguments = [
            {"index": condition.argument, "value": value, "op": "SCMP_CMP_EQ"}
            if condition.mask == FULL_MASK
            else {"index": condition.argument, "value": condition.mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}
            for condition, value in alternative
        ]
        yield {"names": list(group.syscalls), **action, "args": arguments, "comment": f"{group.id}: {why}"}


_Bits = tuple[int, int, int]
"""A comparison: an argument, the bits of it that count, and their value."""
_INT = 0xFFFF_FFFF
"""The bits of an argument that the kernel reads as an int."""
_EVERYBODY = -1 & _INT
"""To F_SETOWN, the process group 1. To kill(2) it is all processes except process 1, in gVisor too."""
_F_SETOWN, _F_SETOWN_EX = 8, 15
_FIOSETOWN, _SIOCSPGRP = 0x8901, 0x8902
_PR_SET_SECCOMP = 22
_CLONE_PARENT = 0x8000
_SIGNALS = [1 << bit for bit in range(8)]
"""clone(2): the lowest byte of the flags is the parent's signal at the child's end."""

_ALWAYS: list[tuple[str, list[_Bits]]] = [("prctl", [(0, _INT, _PR_SET_SECCOMP)])]
"""The next filter would be the program's own."""
_PROCESS_1: list[tuple[str, list[_Bits]]] = [
    # Calls that signal, or lead to it, by their arguments for the target.
    *((name, [(0, _INT, 1)]) for name in ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo",
                                          "pidfd_open")),
    *((name, [(1, _INT, 1)]) for name in ("tgkill", "rt_tgsigqueueinfo")),
    # Signals for events of a descriptor, sent to its owner.
    *(("fcntl", [(1, _INT, _F_SETOWN), (2, _INT, owner)]) for owner in (1, _EVERYBODY)),
    ("fcntl", [(1, _INT, _F_SETOWN_EX)]), ("ioctl", [(1, _INT, _FIOSETOWN)]), ("ioctl", [(1, _INT, _SIOCSPGRP)]),
    # A child's last signal goes to its parent, which is process 1 after CLONE_PARENT, and for every orphan. So it is
    # SIGCHLD or, as for threads, none. A filter cannot say "not equal" of some bits, but each other bit.
    ("clone", [(0, _CLONE_PARENT, _CLONE_PARENT)]),
    *(("clone", [(0, bit, bit)]) for bit in _SIGNALS if not signal.SIGCHLD & bit),
    *(("clone", [(0, 0xFF, bit)]) for bit in _SIGNALS if signal.SIGCHLD & bit),
]  # fmt: skip


@cache
def for_programs(*, process_1: bool, children: bool) -> bytes:
    """Return the filter as an array of ``struct sock_filter``: EPERM for these calls, everything else is allowed.

    Args:
        process_1: keep programs from signalling process 1.
        children: keep programs from having children that are never waited for. With neither, the filter is empty.

    Raises:
        SandboxError: libseccomp is missing or refuses it.
    """
    if not process_1 and not children:
        return b""
    with compiling() as library:
        rules = library.SyscallFilter(library.ALLOW)
        rules.set_attr(library.Attr.ACT_BADARCH, library.KILL_PROCESS)
        refuse = library.ERRNO(errno.EPERM)
        for name, comparisons in [*_ALWAYS, *(_PROCESS_1 if process_1 else ())]:
            rules.add_rule(refuse, name, *(library.Arg(at, library.MASKED_EQ, *bits) for at, *bits in comparisons))
        if children:
            # Reading the action is harmless: the second argument is then NULL.
            changed = library.Arg(0, library.MASKED_EQ, _INT, int(signal.SIGCHLD)), library.Arg(1, library.NE, 0)
            rules.add_rule(refuse, "rt_sigaction", *changed)
        return exported(rules)
