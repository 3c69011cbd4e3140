"""Replaces locks of files and named Unix sockets, which a sandbox lacks, for SQLite and multiprocessing.

About the locks: docs/internals/decisions/0029-no-locks-on-files.md.

Python's ``site`` imports it in the interpreters that a program starts, the guest in the program itself. Standard
library only. Nothing happens until ``sqlite3`` or another module of ``after`` is imported. An interpreter that a
program starts writes to ``/output`` as the program does.
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
"""Objects that SQLite calls from now on, which must not be freed."""


class _Finder:
    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name not in _after:
            return None
        others: list[Any] = [each for each in sys.meta_path if each is not self]
        spec: Any = next(filter(None, (each.find_spec(name, path, target) for each in others)), None)
        if spec is not None:
            spec.loader = _Loader(spec.loader, _after[name])
        return spec


class _Loader:
    def __init__(self, own: Any, then: Callable[[Any], None]) -> None:
        self.create_module = own.create_module
        self._own = own
        self._then = then

    def exec_module(self, module: ModuleType) -> None:
        self._own.exec_module(module)
        self._then(module)


def lock_by_directories(module: ModuleType) -> None:
    """Make SQLite's ``unix-dotfile`` its default: the creator of the directory ``NAME.lock`` has the lock.

    A database in a read-only place needs no lock, and can have none: it is opened with ``unix-none``. ``module`` is
    ``_sqlite3``, which is bound to the library.
    """
    import ctypes

    # The fields of struct sqlite3_vfs that are used, see https://sqlite.org/c3ref/vfs.html
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
        return  # a library that hides them: it reports of each database that it cannot be locked
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


def connect_over_loopback(module: Any) -> None:
    """Have ``Manager`` of ``multiprocessing.connection`` listen on loopback: a sandbox has no named Unix sockets."""
    own = module.arbitrary_address
    module.default_family = "AF_INET"
    # Not localhost, which a container of the Docker Engine does not resolve.
    module.arbitrary_address = lambda family: ("127.0.0.1", 0) if family == "AF_INET" else own(family)


def fork_by_default(module: Any) -> None:
    """Have pools of ``multiprocessing.context`` fork, as before Python 3.14: its default needs named Unix sockets."""
    module._default_context._default_context = module._concrete_contexts["fork"]  # noqa: SLF001 - no name sets the default


def refuse_to_spawn(module: Any) -> None:
    """Raise an error where a spawned process would not find a function of a program that is no file.

    Its pool would start one failing process after the other, and wait forever. ``module`` is ``multiprocessing.spawn``.
    """
    own = module.get_preparation_data

    def reducer_override(_: object, value: Any) -> Any:
        made_here = isinstance(value, (type, type(own))) and value.__module__ == "__main__"
        if made_here and _spawns(module.process):
            import pickle

            raise pickle.PicklingError(f"a process that is spawned cannot find {value.__qualname__} of this program")
        return NotImplemented

    def get_preparation_data(name: str) -> Any:
        data = own(name)
        if data.keys().isdisjoint(("init_main_from_name", "init_main_from_path")):
            module.reduction.ForkingPickler.reducer_override = reducer_override
        return data

    module.get_preparation_data = get_preparation_data


def _spawns(module: Any) -> bool:
    if sys.modules["multiprocessing.context"].get_spawning_popen() is not None:
        return True
    started = [getattr(child, "_popen", None) for child in tuple(module._children)]  # noqa: SLF001 - others wait for them
    return any(getattr(popen, "method", "fork") in {"spawn", "forkserver"} for popen in started)


_after: dict[str, Callable[[Any], None]] = {
    "_sqlite3": lock_by_directories,
    "multiprocessing.connection": connect_over_loopback,
    "multiprocessing.context": fork_by_default,
    "multiprocessing.spawn": refuse_to_spawn,
}
"""Callbacks by module, called once it has been imported."""


def after(name: str, then: Callable[[Any], None]) -> None:
    """Call ``then`` with the module of that name: now if it is imported already, else on import."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        _after[name] = then


def install() -> None:
    """Install the finder; again, to come before other finders."""
    sys.meta_path[:] = [_Finder(), *(each for each in sys.meta_path if not isinstance(each, _Finder))]


if __name__ == "sitecustomize":
    install()
    # As in the program's own process: with the package, for matplotlib's back end, and without its folder on the path.
    sys.path.insert(0, __file__.rpartition("/_glovebox_guest/")[0])
    from _glovebox_guest.program.write_only import open_without_reading

    del sys.path[0]
    open_without_reading()
