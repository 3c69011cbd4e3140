"""Arguments that the log keeps sealed: only the holder of a private key that is kept elsewhere can read them.

HPKE (RFC 9180) in its base mode, bound to the call: what was sealed for one does not open as another's.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from cryptography.exceptions import InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from glovebox_audit import chain
from glovebox_audit.chain import Record
from glovebox_audit.receipts.dsse import MAX_KEY_BYTES
from glovebox_profiles.errors import ProfileError
from glovebox_profiles.load.reading import read_bytes
from glovebox_server import secret_files
from glovebox_server.calls import ToolCall
from glovebox_server.secret_files import SecretFileError

MAX_BYTES: Final = 256 * 1024
"""Longest arguments that are sealed, as JSON: they fit a record beside the same with secrets replaced."""

Opened = Callable[[Record], Mapping[str, Any] | None]
"""Opens the arguments of one ``call.decided``; None without arguments, or if they are sealed to another key."""

_SUITE: Final = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
_KIND: Final = "private key"
_INFO: Final = b"https://glovebox.dev/arguments/v1 "


class Sealer:
    """Seals arguments to a public key. Make it with ``load``."""

    def __init__(self, key: X25519PublicKey) -> None:
        self._key = key

    @classmethod
    def load(cls, path: Path) -> "Sealer":
        """Read the public key. Raises ProfileError if it is unreadable, invalid, or writable by others."""
        try:
            key = serialization.load_pem_public_key(read_bytes(path, MAX_KEY_BYTES))
        except (ValueError, UnsupportedAlgorithm):
            key = None
        if isinstance(key, X25519PublicKey):
            return cls(key)
        fix = "Make it of your private key: `openssl pkey -in KEY -pubout`."
        raise ProfileError(path, None, "", "is no X25519 public key in PEM", fix)

    def seal(self, call: ToolCall) -> str | None:
        """Return the sealed arguments of a call, in base64; None if they are too long."""
        content = chain.canonical(dict(call.arguments))
        if len(content) > MAX_BYTES:
            return None
        return b64encode(_SUITE.encrypt(content, self._key, info=_INFO + call.id.encode())).decode()


def opener(path: Path) -> Opened:
    """Read the private key, and return a function that opens arguments with it.

    Raises SecretFileError if it is missing, a link, another user's, open to others, or no X25519 key.
    """
    make = f"Make one: `openssl genpkey -algorithm x25519 -out {path}`."
    content = secret_files.read_own(path, MAX_KEY_BYTES, _KIND, make)
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, X25519PrivateKey):
        # The file may be the only copy of another key: suggest no command that would overwrite it.
        raise SecretFileError(_KIND, path, "it does not hold an X25519 private key in PEM", "Name the file of one.")

    def opened(record: Record) -> Mapping[str, Any] | None:
        try:
            info = _INFO + str(record.call_id).encode()
            found = json.loads(_SUITE.decrypt(b64decode(record.data["sealed_arguments"]), key, info=info))
        except (LookupError, ValueError, TypeError, InvalidTag, RecursionError):
            return None
        # Anybody can seal: only arguments that match the call's own digest count.
        same = isinstance(found, dict) and chain.digest(found) == record.data.get("arguments_digest")
        return found if same else None

    return opened


def arguments_of(record: Record, opened: Opened | None) -> Mapping[str, Any] | None:
    """Return the original arguments of a ``call.decided``; None if they cannot be known, as without a key."""
    told = record.data.get("arguments")
    if isinstance(told, dict) and not record.data.get("redacted"):
        return told
    return opened(record) if opened is not None else None
