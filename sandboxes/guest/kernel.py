"""The two prctl(2) calls the guest needs and Python does not have."""

from __future__ import annotations

import ctypes
import os

_PR_GET_DUMPABLE = 3
_PR_SET_DUMPABLE = 4

_libc = ctypes.CDLL(None, use_errno=True)


def set_dumpable(value: int) -> None:
    """Set whether other processes of this user may look into this one (1) or not (0). Raises OSError."""
    if _libc.prctl(_PR_SET_DUMPABLE, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl(PR_SET_DUMPABLE, {value}): {os.strerror(ctypes.get_errno())}")


def get_dumpable() -> int:
    """What the kernel says about this process now."""
    return int(_libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0))
