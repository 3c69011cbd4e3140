"""System calls the guest needs and Python lacks, by the C module of ``ctypes`` alone, as ``ctypes.CDLL`` uses it."""

from __future__ import annotations

import os
import struct

from _glovebox_guest.stdlib import Any, ctypes

_PR_SET_PDEATHSIG, _PR_GET_DUMPABLE, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 3, 4, 22
_PR_CAPBSET_READ, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_GET_NO_NEW_PRIVS = 23, 24, 38, 39
_SIGKILL, _SIGCHLD, _EINVAL = 9, 17, 22
_SECCOMP_MODE_FILTER = 2
_INSTRUCTION_BYTES = 8
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine, -1)
_MADV_COLLAPSE = 25
_CAPABILITY_HEADER = struct.pack("=Ii", 0x2008_0522, 0)
"""Version 3 of capset(2), for the calling thread."""
_NO_CAPABILITIES = bytes(24)
"""Effective, permitted and inheritable, two words each."""
_FILTER_PROGRAM = struct.Struct("@HP")


def _type(code: str) -> Any:
    simple: Any = ctypes._SimpleCData  # noqa: SLF001 - its only name
    return type(simple)(code, (simple,), {"_type_": code})


def _function(name: str, result: Any, flags: int = ctypes.FUNCFLAG_USE_ERRNO) -> Any:
    fields = {"_flags_": ctypes.FUNCFLAG_CDECL | flags, "_restype_": result}
    pointer: Any = ctypes.CFuncPtr
    return type(pointer)(name, (pointer,), fields)(ctypes.dlsym(_self, name))


_Int, _Long, _Pointer, _Size = map(_type, "ilPL")
_self = ctypes.dlopen(None, 0)  # type: ignore[arg-type]  # None is the program itself
_HOLDING_THE_INTERPRETER = ctypes.FUNCFLAG_USE_ERRNO | ctypes.FUNCFLAG_PYTHONAPI
_syscall = _function("syscall", _Long)
_clone = _function("syscall", _Long, _HOLDING_THE_INTERPRETER)
_before_fork = _function("PyOS_BeforeFork", _Long, _HOLDING_THE_INTERPRETER)
_after_fork_parent = _function("PyOS_AfterFork_Parent", _Long, _HOLDING_THE_INTERPRETER)
_after_fork_child = _function("PyOS_AfterFork_Child", _Long, _HOLDING_THE_INTERPRETER)
_prctl, _unshare, _mount, _madvise, _capset = (
    _function(name, _Int) for name in ("prctl", "unshare", "mount", "madvise", "capset")
)


def syscall(what: str, number: int, *arguments: int | bytes | None) -> int:
    """Make a system call with 32-bit integers, or bytes as pointers. Raises OSError with ``what`` in its message."""
    return _checked(what, _syscall(number, *arguments))


def set_dumpable(value: int) -> None:
    """Allow (1) or deny (0) other processes of this user access to this one. Raises OSError."""
    _checked(f"prctl(PR_SET_DUMPABLE, {value})", _prctl(_PR_SET_DUMPABLE, value, 0, 0, 0))


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends. Raises OSError."""
    _checked("prctl(PR_SET_PDEATHSIG)", _prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0))


def get_dumpable() -> int:
    """Return PR_GET_DUMPABLE of this process."""
    return _checked("prctl(PR_GET_DUMPABLE)", _prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0))


def set_no_new_privs() -> None:
    """Keep programs that this process starts from gaining privileges, for good. Raises OSError."""
    _checked("prctl(PR_SET_NO_NEW_PRIVS)", _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def get_no_new_privs() -> int:
    """Return PR_GET_NO_NEW_PRIVS of this process. Not every kernel has it in /proc."""
    return _checked("prctl(PR_GET_NO_NEW_PRIVS)", _prctl(_PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0))


def fork_into(namespaces: int) -> int:
    """Fork a child into new namespaces, as their first process: see clone(2).

    ``os.fork`` and unshare(2) would do the same with one more fork, the largest cost. ``namespaces`` are ``CLONE_NEW…``
    flags. Raises OSError.
    """
    _before_fork()
    # Without a stack of its own the child continues where the parent is, inside the interpreter.
    pid = _clone(_SYS_CLONE, _Size(namespaces | _SIGCHLD), _Size(0), _Size(0), _Size(0), _Size(0))
    number = ctypes.get_errno()
    if pid == 0:
        _after_fork_child()
        return 0
    _after_fork_parent()
    if pid == -1:
        raise OSError(number, f"clone({namespaces:#x}): {os.strerror(number)}")
    return int(pid)


def unshare(flags: int) -> None:
    """Move this process into new namespaces. Raises OSError."""
    _checked(f"unshare({flags:#x})", _unshare(flags))


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Put a file system at a place. Raises OSError."""
    words = (source.encode(), target.encode(), kind.encode(), flags, data.encode())
    _checked(f"mount({kind or flags} at {target})", _mount(*words))


def collapse(address: int, size: int) -> bool:
    """Ask the kernel to put memory into huge pages now; return whether it did."""
    return bool(_madvise(_Pointer(address), _Size(size), _MADV_COLLAPSE) == 0)


def drop_capabilities() -> None:
    """Empty all five capability sets of this process, for good, see capabilities(7). Raises OSError."""
    capability = 0
    # The kernel refuses the first capability that it does not have.
    while (held := _prctl(_PR_CAPBSET_READ, capability, 0, 0, 0)) != -1:
        if held:
            _checked(f"prctl(PR_CAPBSET_DROP, {capability})", _prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0))
        capability += 1
    if ctypes.get_errno() != _EINVAL:
        raise OSError(ctypes.get_errno(), "prctl(PR_CAPBSET_READ)")
    # Without an inheritable set there is no ambient one either.
    _checked("capset(2)", _capset(_CAPABILITY_HEADER, _NO_CAPABILITIES))


def add_filter(program: bytes) -> None:
    """Add a seccomp filter to this process and its future children, for good.

    ``program`` is an array of ``struct sock_filter``, see seccomp(2). Raises OSError.
    """
    from array import array

    held = array("B", program)
    # struct sock_fprog: a number of instructions, and where they are.
    where = _FILTER_PROGRAM.pack(len(program) // _INSTRUCTION_BYTES, held.buffer_info()[0])
    _checked("prctl(PR_SET_SECCOMP)", _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, where, 0, 0))


def _checked(what: str, result: int) -> int:
    # -1 is the C library's failure, of the function's own width: read as a wider type, it is none.
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
