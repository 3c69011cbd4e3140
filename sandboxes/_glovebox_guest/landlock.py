"""Makes ``/output`` write-only, all but it and scratch read-only, and takes terminals away from untrusted code.

Mounts cannot say "write but do not read", and a read-only mount lets a program write into a FIFO that lies in it.
Landlock can, and a process can put it on itself without privileges:
https://docs.kernel.org/userspace-api/landlock.html. Standard library only; runs inside every sandbox.
"""

from __future__ import annotations

import os
import stat
import struct

from _glovebox_guest.kernel import set_no_new_privs, syscall

# Numbers since Linux 5.13, the same on every architecture (asm-generic/unistd.h).
_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446

_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1

# LANDLOCK_ACCESS_FS_*, linux/landlock.h.
_EXECUTE = 1 << 0
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
_REMOVE_DIR = 1 << 4
_REMOVE_FILE = 1 << 5
_MAKE_CHAR = 1 << 6
_MAKE_DIR = 1 << 7
_MAKE_REG = 1 << 8
_MAKE_SOCK = 1 << 9
_MAKE_FIFO = 1 << 10
_MAKE_BLOCK = 1 << 11
_MAKE_SYM = 1 << 12
_REFER = 1 << 13
_TRUNCATE = 1 << 14

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

_ABI_REFER = 2
_ABI_TRUNCATE = 3
_ABI_SCOPES = 6
_ABI_LOGS = 7
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


def _version() -> int:
    what = "landlock_create_ruleset (is Landlock in this kernel, and in its lsm= list?)"
    return syscall(what, _CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION)


def abi_version() -> int:
    """Return Landlock's version in this kernel; 0 if absent, switched off at boot, or refused by a filter."""
    try:
        return _version()
    except OSError:
        return 0


def restrict_output_write_only(output: str = "/output", *, also_writable: tuple[str, ...] = ()) -> int:
    """Deny reading beneath ``output``, and writing outside of it and scratch, in this thread and future children.

    For good. Beneath ``output``, files can be created, written, truncated, renamed and removed, and directories made.
    Files there cannot be read or executed, directories not listed, and symbolic links, FIFOs, sockets and devices not
    made. In ``/tmp`` and ``/dev/shm`` the mounts decide as before. Of the devices the harmless ones can be opened, and
    none that is a terminal or makes one. Everywhere else nothing can be written, not even a FIFO or a device in a
    read-only mount, nor a process's own files in ``/proc``: with its login id it would choose its name in the host's
    audit log. ``/`` itself cannot be listed, because a rule for it would cover ``output`` too. The attributes of a file
    whose name is known stay visible: Landlock does not cover stat(2).

    Call it while the process has one thread: Landlock restricts the calling thread only.

    Args:
        output: a top-level directory, ``/name``. Where it does not exist, there is nothing to keep from being read.
        also_writable: directories, beside scratch, where the mounts decide.

    Returns:
        The Landlock version reached. From 6 on, signals and abstract sockets outside this process's descendants are out
        of reach too. At 1 a file cannot be moved to another directory anywhere (EXDEV; ``shutil.move`` copies).

    Raises:
        OSError: Landlock is absent or a step was refused; nothing, or not everything, is restricted, so nothing
            untrusted may run.
    """
    abi = _version()
    writable = (*_WRITABLE, *also_writable)
    move = _REFER if abi >= _ABI_REFER else 0
    write = _WRITE | (_TRUNCATE if abi >= _ABI_TRUNCATE else 0)
    ruleset = _create_ruleset(_READ | write | _MAKE | move, abi)
    try:
        for path in _top_level():
            if path == output:
                _grant(ruleset, path, write | move)
            elif path == "/dev":
                _grant(ruleset, path, _READ_DIR)
            elif path not in writable:
                _grant(ruleset, path, _READ)
        for path in filter(os.path.exists, (*writable, *_DEVICES)):
            _grant(ruleset, path, _READ | write | _MAKE | move)
        set_no_new_privs()
        syscall("landlock_restrict_self", _RESTRICT_SELF, ruleset, _QUIET if abi >= _ABI_LOGS else 0)
    finally:
        os.close(ruleset)
    return abi


def _top_level() -> list[str]:
    with os.scandir("/") as entries:
        # A link is resolved when it is used: its target is granted, or not, under its own name.
        return [entry.path for entry in entries if not entry.is_symlink()]


def _create_ruleset(handled: int, abi: int) -> int:
    scoped = _SCOPES if abi >= _ABI_SCOPES else 0
    attributes = _RULESET.pack(handled, 0, scoped)
    # The first field alone is the structure of version 1; every kernel takes it.
    size = len(attributes) if scoped else 8
    return syscall("landlock_create_ruleset", _CREATE_RULESET, attributes, size, 0)


def _grant(ruleset: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _FOR_FILES
        rule = _PATH_BENEATH.pack(rights, descriptor)
        syscall(f"landlock_add_rule for {path}", _ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0)
    finally:
        os.close(descriptor)
