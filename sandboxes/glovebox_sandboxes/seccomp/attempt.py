"""Runs inside a sandbox, in front of ``conformance.case.attempts``: makes one system call.

Standard library only, one file, imports nothing of ours.
"""

import ctypes
import errno
import mmap
import os
import pty
import socket
import tempfile
from collections.abc import Callable
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _argument(value: Any) -> Any:
    """Turn one JSON argument into what ``syscall`` takes.

    Numbers and ``"0x…"`` are themselves, other strings are C strings, null is NULL, and ``{"zeros": n}``,
    ``{"number": n}`` (a pointer to it), ``{"fd": "pty" | "file" | "tcp" | "tcp6"}`` and ``{"pid": "self"}`` are made on
    the spot.
    """
    if value is None:
        return ctypes.c_void_p(None)
    if isinstance(value, str):
        return ctypes.c_ulong(int(value, 16)) if value.startswith("0x") else ctypes.c_char_p(value.encode())
    if isinstance(value, dict):
        ((kind, what),) = value.items()
        return _MADE[kind](what)
    return ctypes.c_long(value)


def _terminal() -> int:
    """Return a new controlling pseudo-terminal; a pipe in a sandbox that allows none."""
    os.setsid()
    try:
        _, slave = pty.openpty()
    except OSError:
        return os.pipe()[0]  # the filter looks at the numbers, not at what a descriptor is
    os.close(os.open(os.ttyname(slave), os.O_RDWR))  # the first terminal a session leader opens becomes its own
    return slave


_DESCRIPTORS: dict[str, Callable[[], int]] = {
    "pty": _terminal,
    "file": lambda: tempfile.mkstemp()[0],
    "tcp": lambda: socket.socket(socket.AF_INET).detach(),
    "tcp6": lambda: socket.socket(socket.AF_INET6).detach(),
}
_MADE: dict[str, Callable[[Any], Any]] = {
    "zeros": ctypes.create_string_buffer,
    "number": lambda number: ctypes.byref(ctypes.c_int(number)),
    "pid": lambda _: ctypes.c_long(os.getpid()),
    "fd": lambda what: ctypes.c_long(_DESCRIPTORS[what]()),
}


def _i386(number: int) -> int:
    """Make an i386 system call from a 64-bit x86 process: mov eax, number; int 0x80; ret."""
    code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\xb8" + number.to_bytes(4, "little") + b"\xcd\x80\xc3")
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    return int(ctypes.CFUNCTYPE(ctypes.c_int)(address)())


def call(attempt: dict[str, Any]) -> str:
    """Make a call of ``number``, ``args`` and ``abi``; return ``ok`` or the name of its errno."""
    if attempt.get("abi") == "i386":
        result = _i386(attempt["number"])
        return "ok" if result >= 0 else errno.errorcode.get(-result, str(-result))
    arguments = [_argument(value) for value in attempt["args"]]
    arguments += [ctypes.c_long(0)] * (6 - len(arguments))
    result = _libc.syscall(ctypes.c_long(attempt["number"]), *arguments)
    number = ctypes.get_errno()
    return "ok" if result != -1 else errno.errorcode.get(number, str(number))
