"""What is in our images, as names: change the recipe, the packages or the guest, and it is another image. Pure.

A server only ever uses the image with exactly its own content, so an upgraded server cannot meet an old guest.
"""

import functools
import hashlib
from pathlib import Path

from glovebox_sandboxes.runtime import guest_tree

RECIPE = Path(__file__).parent / "python"
LOCK = Path(__file__).parents[3] / "runtime" / "requirements.lock"


@functools.cache
def tag() -> str:
    """Name of the image this version needs, e.g. ``glovebox/python:0f3a…``."""
    return f"glovebox/python:{_digest(guest_tree.digest(), 'Dockerfile', 'guest.Dockerfile', 'finish.py')}"


def runtime_tag(base: str) -> str:
    """Name of the image of the first step: all but the guest, for this base."""
    return f"glovebox/runtime:{_digest(base, 'Dockerfile', 'finish.py')}"


def _digest(start: str, *recipe: str) -> str:
    whole = hashlib.sha256(start.encode())
    for path in (LOCK, *(RECIPE / name for name in recipe)):
        whole.update(hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()[:16]
