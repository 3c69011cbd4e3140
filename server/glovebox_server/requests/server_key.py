"""The key of a state directory with which its servers authenticate what clients keep: run handles, request states.

One file, made on first use, the same for every server process of the directory. Each use has a derived key, so that a
value made for one is invalid for another (HKDF, RFC 5869).
"""

import os
import secrets
from pathlib import Path

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from glovebox_server import secret_files
from glovebox_server.secret_files import SecretFileError

DIRECTORY = "keys"
NAME = "server.key"
_KIND = "server key"

BYTES = 32


def load(state_dir: Path) -> bytes:
    """Return the key of a state directory; make it (0600) if missing.

    Raises SecretFileError if it is a link, another user's, open to others, or not ``BYTES`` long.
    """
    with secret_files.opened(state_dir / DIRECTORY, _KIND) as place:
        if NAME not in place.names():
            place.make(NAME, secrets.token_bytes(BYTES))
        key = place.read(NAME, BYTES)
    if len(key) != BYTES:
        path = state_dir / DIRECTORY / NAME
        raise SecretFileError(_KIND, path, f"it does not hold {BYTES} bytes", f"Remove {path}; a new one is made.")
    return key


def exists(state_dir: Path) -> bool:
    """Return whether a server, or a command that makes calls, has ever used the state directory."""
    return os.path.lexists(state_dir / DIRECTORY / NAME)


def derived(key: bytes, use: str) -> bytes:
    """Return the key for one use, e.g. ``runs``: ``BYTES`` long."""
    return HKDF(algorithm=SHA256(), length=BYTES, salt=None, info=f"glovebox {use}".encode()).derive(key)
