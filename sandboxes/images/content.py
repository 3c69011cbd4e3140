"""What is in our image, as a name: change the recipe, the packages or the guest, and it is another image. Pure.

A server only ever uses the image with exactly its own content, so an upgraded server cannot meet an old guest.
"""

import functools
import hashlib
from pathlib import Path

from sandboxes import guest_tree

RECIPE = Path(__file__).parent / "python"
LOCK = Path(__file__).parent.parent / "runtime-requirements.lock"
REPOSITORY = "glovebox/python"


@functools.cache
def tag() -> str:
    """Name of the image this version needs, e.g. ``glovebox/python:0f3a…``."""
    whole = hashlib.sha256(guest_tree.digest().encode())
    for path in (LOCK, *sorted(path for path in RECIPE.iterdir() if path.is_file())):
        whole.update(hashlib.sha256(path.read_bytes()).digest())
    return f"{REPOSITORY}:{whole.hexdigest()[:16]}"
