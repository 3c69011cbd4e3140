"""Name our images by content: another recipe, package or guest makes another image. Pure.

A server only ever uses the image with exactly its own content, so an upgraded server cannot meet an old guest.
"""

import functools
import hashlib
from pathlib import Path

from glovebox_sandboxes.contract.spec import DEFAULT
from glovebox_sandboxes.runtime import environments, guest_tree

RECIPE = Path(__file__).parent / "python"
LOCK = environments.SHIPPED / f"{DEFAULT}.lock"
_RUNTIME = ("Dockerfile", "finish.py", "hosts")


@functools.cache
def tag(lock: str = "") -> str:
    """Return the name of the image this version needs: ``glovebox/python:0f3a…``; ``lock`` is empty for the default."""
    return f"glovebox/python:{_digest(guest_tree.digest(), lock, 'guest.Dockerfile', *_RUNTIME)}"


def runtime_tag(base: str, lock: str = "") -> str:
    """Return the name of the first step's image: all except the guest, for this base."""
    return f"glovebox/runtime:{_digest(base, lock, *_RUNTIME)}"


def _digest(start: str, lock: str, *recipe: str) -> str:
    whole = hashlib.sha256(start.encode())
    whole.update(bytes.fromhex(lock) if lock else hashlib.sha256(LOCK.read_bytes()).digest())
    for name in recipe:
        whole.update(hashlib.sha256((RECIPE / name).read_bytes()).digest())
    return whole.hexdigest()[:16]
