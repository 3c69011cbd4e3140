"""Makes ``/output`` write-only, all but it and scratch read-only, and takes terminals away from untrusted code.

Mounts cannot say "write but do not read", and a read-only mount lets a program write into a FIFO that lies in it.
Landlock can, and a process can put it on itself without privileges:
https://docs.kernel.org/userspace-api/landlock.html. Standard library only; runs inside every sandbox.
"""

from __future__ import annotations

import os
import stat
import struct

from _glovebox_guest.kernel import prctl, syscall

# Numbers since Linux 5.13, the same on every architecture (asm-generic/unistd.h).
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CREATE_RULESET_VERSION = _RULE_PATH_BENEATH = 1

# LANDLOCK_ACCESS_FS_*, linux/landlock.h.
(
    _EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_DIR, _REMOVE_FILE, _MAKE_CHAR, _MAKE_DIR, _MAKE_REG,
    _MAKE_SOCK, _MAKE_FIFO, _MAKE_BLOCK, _MAKE_SYM, _REFER, _TRUNCATE,
) = (1 << bit for bit in range(15))  # fmt: skip

# Every right is denied wherever no rule grants it. These are granted in three parts.
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_WRITE = _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG
_MAKE = _MAKE_CHAR | _MAKE_SOCK | _MAKE_FIFO | _MAKE_BLOCK | _MAKE_SYM
# Rights of files that are not directories; the kernel refuses a rule with others.
_FOR_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE

# Writable places beside ``/output``, as far as the mounts allow.
_WRITABLE = ("/dev/shm", "/tmp")  # noqa: S108 - inside the sandbox
# Permitted devices. No terminals: opening /dev/ptmx, for reading too, creates one, and the kernel bounds their number
# for the whole machine (kernel.pty.max, pty(7)).
_DEVICES = ("/dev/full", "/dev/null", "/dev/random", "/dev/urandom", "/dev/zero")

# The versions that brought each.
_ABI_REFER, _ABI_TRUNCATE, _ABI_SCOPES, _ABI_LOGS = 2, 3, 6, 7
# LANDLOCK_RESTRICT_SELF_LOG_SAME_EXEC_OFF and …_SUBDOMAINS_OFF: refusals of a program, however many, do not fill the
# host's audit log, neither for these rules nor for rules it makes itself.
_QUIET = 1 << 0 | 1 << 2
# LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET and LANDLOCK_SCOPE_SIGNAL: neither the guest nor any process outside this one's
# descendants can be signalled or reached by name.
_SCOPES = 1 << 0 | 1 << 1

# ``struct landlock_ruleset_attr`` (older kernels take its first field alone) and ``struct landlock_path_beneath_attr``,
# which is packed.
_RULESET = struct.Struct("=QQQ")
_PATH_BENEATH = struct.Struct("=Qi")


def abi_version() -> int:
    """Return Landlock's version in this kernel; 0 if absent, switched off at boot, or refused by a filter."""
    try:
        return syscall("landlock_create_ruleset", _CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION)
    except OSError:
        return 0


def restrict_output_write_only(output: str = "/output", *, also_writable: tuple[str, ...] = ()) -> int:
    """Deny reading beneath ``output``, and writing outside of it and scratch, in this thread and future children.

    For good. Beneath ``output``, files can be created, written, truncated, renamed and removed, and directories made;
    not read, executed or listed, and symbolic links, FIFOs, sockets and devices not made. In ``/tmp``, ``/dev/shm`` and
    ``also_writable`` the mounts decide as before. Of the devices the harmless ones can be opened, and none that is a
    terminal or makes one. Everywhere else nothing can be written, not even a FIFO or a device in a read-only mount, nor
    a process's own files in ``/proc``: with its login id it would choose its name in the host's audit log. ``/`` itself
    cannot be listed, because a rule for it would cover ``output`` too. Landlock does not cover stat(2).

    Call it while the process has one thread: Landlock restricts the calling thread only. Returns the Landlock version
    reached: from 6 on, signals and abstract sockets outside this process's descendants are out of reach too; at 1 a
    file cannot be moved to another directory anywhere. Raises OSError where Landlock is absent or a step was refused:
    nothing, or not everything, is restricted, so nothing untrusted may run.
    """
    abi = abi_version()
    if not abi:
        raise PermissionError("landlock_create_ruleset was refused: is Landlock in this kernel, and in its lsm= list?")
    writable = (*_WRITABLE, *also_writable)
    move = _REFER if abi >= _ABI_REFER else 0
    write = _WRITE | (_TRUNCATE if abi >= _ABI_TRUNCATE else 0)
    attributes = _RULESET.pack(_READ | write | _MAKE | move, 0, _SCOPES if abi >= _ABI_SCOPES else 0)
    # The first field alone is the structure of version 1; every kernel takes it.
    size = len(attributes) if abi >= _ABI_SCOPES else 8
    ruleset = syscall("landlock_create_ruleset", _CREATE_RULESET, attributes, size, 0)
    try:
        with os.scandir("/") as entries:
            # A link is resolved when it is used: its target is granted, or not, under its own name.
            top = [entry.path for entry in entries if not entry.is_symlink()]
        for path in top:
            if path == output:
                _grant(ruleset, path, write | move)
            elif path == "/dev":
                _grant(ruleset, path, _READ_DIR)
            elif path not in writable:
                _grant(ruleset, path, _READ)
        for path in filter(os.path.exists, (*writable, *_DEVICES)):
            _grant(ruleset, path, _READ | write | _MAKE | move)
        prctl("PR_SET_NO_NEW_PRIVS", 1)
        syscall("landlock_restrict_self", _RESTRICT_SELF, ruleset, _QUIET if abi >= _ABI_LOGS else 0)
    finally:
        os.close(ruleset)
    return abi


def _grant(ruleset: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _FOR_FILES
        rule = _PATH_BENEATH.pack(rights, descriptor)
        syscall(f"landlock_add_rule for {path}", _ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0)
    finally:
        os.close(descriptor)
