"""System calls the guest needs and Python does not have.

On ``_ctypes`` alone: the package around it takes two milliseconds to import, on every cold start. What is used here is
what ``ctypes.CDLL(None, use_errno=True)`` uses.
"""

from __future__ import annotations

import _ctypes
import os
import struct

_PR_GET_DUMPABLE = 3
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_INSTRUCTION_BYTES = 8
_PR_SET_NO_NEW_PRIVS = 38
_PR_GET_NO_NEW_PRIVS = 39


_FILTER_PROGRAM = struct.Struct("@HP")


class _Long(_ctypes._SimpleCData):  # type: ignore[type-arg]  # noqa: SLF001 - none exists at run time
    _type_ = "l"


class _Function(_ctypes.CFuncPtr):
    _flags_ = _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_USE_ERRNO
    _restype_ = _Long


_self = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]  # None is the program itself
_syscall = _Function(_ctypes.dlsym(_self, "syscall"))
_prctl = _Function(_ctypes.dlsym(_self, "prctl"))


def syscall(what: str, number: int, *arguments: int | bytes | None) -> int:
    """Make a system call whose integer arguments fit into 32 bits; bytes are passed as a pointer.

    Raises:
        OSError: it failed; ``what`` is in the message.
    """
    return _checked(what, _syscall(number, *arguments))


def set_dumpable(value: int) -> None:
    """Set whether other processes of this user may look into this one (1) or not (0). Raises OSError."""
    _checked(f"prctl(PR_SET_DUMPABLE, {value})", _prctl(_PR_SET_DUMPABLE, value, 0, 0, 0))


def get_dumpable() -> int:
    """What the kernel says about this process now."""
    return _checked("prctl(PR_GET_DUMPABLE)", _prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0))


def set_no_new_privs() -> None:
    """No program this process starts gets more rights than it has, for good. Raises OSError."""
    _checked("prctl(PR_SET_NO_NEW_PRIVS)", _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def get_no_new_privs() -> int:
    """What the kernel says about this process now. In /proc not every kernel tells."""
    return _checked("prctl(PR_GET_NO_NEW_PRIVS)", _prctl(_PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0))


def add_filter(program: bytes) -> None:
    """Put one more seccomp filter on this process and its future children, for good.

    Args:
        program: an array of ``struct sock_filter``, see seccomp(2).

    Raises:
        OSError: the kernel did not take it.
    """
    from array import array

    held = array("B", program)
    # struct sock_fprog: a number of instructions, and where they are.
    where = _FILTER_PROGRAM.pack(len(program) // _INSTRUCTION_BYTES, held.buffer_info()[0])
    _checked("prctl(PR_SET_SECCOMP)", _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, where, 0, 0))


def _checked(what: str, result: int) -> int:
    # A `long` is returned as it is; -1 is the C library's word for failure.
    if result == -1:
        number = _ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
