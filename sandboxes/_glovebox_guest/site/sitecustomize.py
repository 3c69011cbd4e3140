"""Has SQLite lock its databases without the kernel's locks, which a sandbox has not: docs/internals/decisions/0029.

Python's ``site`` imports it in what a program starts, the guest in the program itself. Standard library only; imports
nothing of ours. Nothing happens until ``sqlite3`` is imported, or what else the guest does something ``after``.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

_kept: list[Any] = []
"""What SQLite calls from now on must not be freed."""


class _Finder:
    """Finds a module of ``_after`` as everybody does, and has its loader do a little more."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        """See ``importlib.abc.MetaPathFinder``."""
        if name not in _after:
            return None
        others: list[Any] = [each for each in sys.meta_path if each is not self]
        spec: Any = next(filter(None, (each.find_spec(name, path, target) for each in others)), None)
        if spec is not None:
            spec.loader = _Loader(spec.loader, _after[name])
        return spec


class _Loader:
    """The module's own loader, and what comes after it."""

    def __init__(self, own: Any, then: Callable[[Any], None]) -> None:
        self._own = own
        self._then = then

    def create_module(self, spec: object) -> Any:
        """See ``importlib.abc.Loader``."""
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """See ``importlib.abc.Loader``."""
        self._own.exec_module(module)
        self._then(module)


def lock_by_directories(module: ModuleType) -> None:
    """Make SQLite's ``unix-dotfile`` its default: who made the directory ``NAME.lock`` has the lock.

    A database in a place that nobody can write to needs none, and can have none: it is opened with ``unix-none``.

    Args:
        module: ``_sqlite3``, which is bound to the library.
    """
    import ctypes

    # struct sqlite3_vfs as far as it is needed, see https://sqlite.org/c3ref/vfs.html
    class Vfs(ctypes.Structure):
        _fields_ = [
            ("version", ctypes.c_int), ("size", ctypes.c_int), ("longest", ctypes.c_int), ("next", ctypes.c_void_p),
            ("name", ctypes.c_char_p), ("data", ctypes.c_void_p), ("open", ctypes.c_void_p),
        ]  # fmt: skip

    opening = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p
    )
    try:
        library = ctypes.CDLL(getattr(module, "__file__", None))
        find, register = library.sqlite3_vfs_find, library.sqlite3_vfs_register
    except (OSError, AttributeError):
        return  # a library that hides them: it says of each database that it cannot be locked
    find.restype = ctypes.POINTER(Vfs)
    register.argtypes = [ctypes.c_void_p, ctypes.c_int]
    directories, none = find(b"unix-dotfile"), find(b"unix-none")
    if not directories or not none:
        return
    ours, theirs = ctypes.addressof(directories.contents), ctypes.addressof(none.contents)
    own = opening(directories.contents.open)

    def choose(vfs: int, name: int | None, file: int, flags: int, out: int | None) -> int:
        fixed = name and not os.access(os.path.dirname(ctypes.string_at(name)), os.W_OK)
        return int(own(theirs if fixed else vfs, name, file, flags, out))

    chosen = opening(choose)
    _kept.extend((chosen, own))
    directories.contents.open = ctypes.cast(chosen, ctypes.c_void_p)
    register(ours, 1)


_after: dict[str, Callable[[Any], None]] = {"_sqlite3": lock_by_directories}
"""What is done with a module once it has been imported."""


def after(name: str, then: Callable[[Any], None]) -> None:
    """Do this with the module of that name: now where it is imported already, else as soon as it is."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        _after[name] = then


def install() -> None:
    """Have it done when SQLite's module is imported; again, to come before other finders."""
    sys.meta_path[:] = [_Finder(), *(each for each in sys.meta_path if not isinstance(each, _Finder))]


if __name__ == "sitecustomize":
    install()
