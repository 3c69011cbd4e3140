"""C modules beneath the standard library's packages, imported by the guest instead: they are quick.

A sandbox that is started for its call makes the caller wait for every import. Milliseconds of processor time beyond a
bare ``python3 -I -S``, which takes 8.8; medians of 80 starts of each, interleaved, Python 3.11:

    json      9.6    _json    0.3        ctypes       3.8    _ctypes  0.6
    socket    9.0    _socket  0.1        hashlib      3.5    _sha1    0.1
    ast       9.7    _ast     1.1        typing      12.6
    signal    5.6    _signal  0.0        dataclasses 19.3

The guest with all it imports before its job takes 5.4. Each is imported on first use. Where names or contents change
with a version of Python, this is the place. Types are here too: only the checker has them.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _ast as ast
    import _ctypes as ctypes
    import _json as json
    import _signal as signal
    import _socket as socket
    import _ssl as ssl
    from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
    from typing import Any, BinaryIO, Literal, NoReturn, Self, TypeAlias

    sha1: Any

    __all__ = [
        "TYPE_CHECKING", "Any", "BinaryIO", "Callable", "Container", "Generator", "Iterable", "Iterator", "Literal",
        "Mapping", "NoReturn", "Self", "Sequence", "TypeAlias", "ast", "ctypes", "json", "sha1", "signal", "socket",
        "ssl",
    ]  # fmt: skip
else:

    def __getattr__(name: str) -> object:
        """Return a module by its package's name, or nothing for a type; see PEP 562."""
        if name == "sha1":
            return __import__("_sha1").sha1
        if name in ("ast", "ctypes", "json", "signal", "socket", "ssl"):
            return __import__(f"_{name}")
        if name[0].isupper():
            return None
        raise AttributeError(name)
