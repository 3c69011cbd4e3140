"""Lets libraries that open files for writing *and* reading write to ``/output``, which cannot be read.

Pillow, and matplotlib through it, opens every picture it saves with ``"w+b"`` and then only writes. Where the kernel
refused reading (see ``landlock``), the library needs the same open without reading. A convenience inside the process of
the untrusted program: nothing relies on it. Standard library only.
"""

from __future__ import annotations

import builtins
import io
import os
import types

from _glovebox_guest.stdlib import Any


def open_without_reading() -> None:
    """Make ``open(path, "w+")`` beneath ``/output`` fall back to ``"w"`` when reading is refused.

    ``"x+"`` and ``"a+"`` too; ``"r+"`` stays refused: an update needs the file's content. Paths alone, here alone.
    """

    def fall_back(original: Any, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        try:
            return original(file, mode, *args, **kwargs)
        except PermissionError:
            if "+" not in mode or "r" in mode or not isinstance(file, (str, bytes, os.PathLike)):
                raise
            if not os.path.realpath(os.fsdecode(file)).startswith("/output/"):
                raise
            # "x+" has created the file before the kernel refused to open it for reading: it is this call's own.
            return original(file, mode.replace("+", "").replace("x", "w"), *args, **kwargs)

    # A method object: a class that keeps ``open`` as an attribute gets it back unbound, as it does the original.
    builtins.open = io.open = types.MethodType(fall_back, io.open)
