"""System calls the guest needs and Python lacks, by the C module of ``ctypes`` alone, as ``ctypes.CDLL`` uses it."""

from __future__ import annotations

import os
import struct

from _glovebox_guest.stdlib import Any, Callable, ctypes

_PRCTL = {
    "PR_SET_PDEATHSIG": 1, "PR_GET_DUMPABLE": 3, "PR_SET_DUMPABLE": 4, "PR_SET_SECCOMP": 22,
    "PR_SET_NO_NEW_PRIVS": 38, "PR_GET_NO_NEW_PRIVS": 39,
}  # fmt: skip
_PR_CAPBSET_DROP = 24
_SIGCHLD, _EINVAL = 17, 22
_SECCOMP_MODE_FILTER = 2
_INSTRUCTION_BYTES = 8
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine, -1)
_MADV_COLLAPSE = 25
_READ = 16_384
_CAPABILITY_HEADER = struct.pack("=Ii", 0x2008_0522, 0)
"""Version 3 of capset(2), for the calling thread."""
_NO_CAPABILITIES = bytes(24)
"""Effective, permitted and inheritable, two words each."""
_FILTER_PROGRAM = struct.Struct("@HP")


def _type(code: str) -> Any:
    simple: Any = ctypes._SimpleCData  # noqa: SLF001 - its only name
    return type(simple)(code, (simple,), {"_type_": code})


def _function(name: str, result: Any, flags: int = ctypes.FUNCFLAG_USE_ERRNO, library: int = 0) -> Any:
    fields = {"_flags_": ctypes.FUNCFLAG_CDECL | flags, "_restype_": result}
    pointer: Any = ctypes.CFuncPtr
    return type(pointer)(name, (pointer,), fields)(ctypes.dlsym(library or _self, name))


_Int, _Long, Pointer, _Size = map(_type, "ilPL")
_self = ctypes.dlopen(None, 0)  # type: ignore[arg-type]  # None is the program itself
_HOLDING_THE_INTERPRETER = ctypes.FUNCFLAG_USE_ERRNO | ctypes.FUNCFLAG_PYTHONAPI
_RTLD_NOW = 2
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


def prctl(option: str, value: int = 0, structure: bytes | int = 0) -> int:
    """Set or return a property of this process, by its name in the manual. Raises OSError."""
    return _checked(f"prctl({option}, {value})", _prctl(_PRCTL[option], value, structure, 0, 0))


def fork_into(namespaces: int) -> int:
    """Fork a child into new namespaces, as their first process: see clone(2).

    ``os.fork`` and unshare(2) would do the same with one more fork, the largest cost. ``namespaces`` are ``CLONE_NEW…``
    flags. Raises OSError.
    """

    def clone() -> int:
        # Without a stack of its own the child continues where the parent is, inside the interpreter.
        pid = _clone(_SYS_CLONE, _Size(namespaces | _SIGCHLD), _Size(0), _Size(0), _Size(0), _Size(0))
        return -ctypes.get_errno() if pid == -1 else pid

    return forked(clone)


def forked(fork: Callable[[], int]) -> int:
    """Call a function that forks, as os.fork does: its result is 0 in the child. Raises OSError for one below 0."""
    _before_fork()
    pid = fork()
    if pid == 0:
        _after_fork_child()
        return 0
    _after_fork_parent()
    if pid < 0:
        raise OSError(-pid, f"clone(2): {os.strerror(-pid)}")
    return pid


def load(path: str, *names: str) -> list[Any]:
    """Return functions of a library that return an int, and hold the interpreter. Raises OSError."""
    library = ctypes.dlopen(path, _RTLD_NOW)
    return [_function(name, _Int, _HOLDING_THE_INTERPRETER, library) for name in names]


def unshare(flags: int) -> None:
    """Move this process into new namespaces. Raises OSError."""
    _checked(f"unshare({flags:#x})", _unshare(flags))


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Put a file system at a place. Raises OSError."""
    words = (source.encode(), target.encode(), kind.encode(), flags, data.encode())
    _checked(f"mount({kind or flags} at {target})", _mount(*words))


def collapse(address: int, size: int) -> bool:
    """Ask the kernel to put memory into huge pages now; return whether it did."""
    return bool(_madvise(Pointer(address), _Size(size), _MADV_COLLAPSE) == 0)


def drop_capabilities() -> None:
    """Empty all five capability sets of this process, for good, see capabilities(7). Raises OSError."""
    capability = 0
    # The kernel refuses the first capability that it does not have.
    while _prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != -1:
        capability += 1
    if ctypes.get_errno() != _EINVAL:
        raise OSError(ctypes.get_errno(), "prctl(PR_CAPBSET_DROP)")
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
    prctl("PR_SET_SECCOMP", _SECCOMP_MODE_FILTER, where)


def read(path: str) -> str:
    """Return a file of proc(5). Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return b"".join(iter(lambda: os.read(descriptor, _READ), b"")).decode("utf-8", "surrogateescape")
    finally:
        os.close(descriptor)


def write(path: str, text: str) -> None:
    """Write to a file of proc(5). Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _checked(what: str, result: int) -> int:
    # -1 is the C library's failure, of the function's own width: read as a wider type, it is none.
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
