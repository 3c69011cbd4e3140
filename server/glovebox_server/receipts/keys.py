"""The signing key of receipts: one file in the state directory, made on first use.

The private key never leaves its file and this process; nothing here prints or logs it.
"""

import os
from pathlib import Path
from typing import Self

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from glovebox_audit.receipts import dsse
from glovebox_audit.receipts.dsse import MAX_KEY_BYTES
from glovebox_server import secret_files
from glovebox_server.secret_files import SecretFileError

DIRECTORY = "keys"
NAME = "receipts.pem"
_RECEIPT_KEY, _OPERATOR_KEY = "receipt key", "signing key"


class Signer(dsse.EnvelopeSigner):
    """Holds the private key. Make it with ``load``."""

    @classmethod
    def load(cls, state_dir: Path) -> Self:
        """Read the key of a state directory; make it (0600) if missing.

        Raises SecretFileError if it is a link, another user's, open to others, or no Ed25519 key.
        """
        with secret_files.opened(state_dir / DIRECTORY, _RECEIPT_KEY) as place:
            if NAME not in place.names():
                form, secret = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
                key = Ed25519PrivateKey.generate().private_bytes(serialization.Encoding.PEM, form, secret)
                place.make(NAME, key)
            content = place.read(NAME, MAX_KEY_BYTES)
        path = state_dir / DIRECTORY / NAME
        return cls(_private(content, path, f"Move {path} away; a new one is made, and older receipts keep their key."))


def operators(path: Path) -> Ed25519PrivateKey:
    """Return a private key from an operator's own file.

    Raises SecretFileError if it is missing, a link, another user's, open to others, or no Ed25519 key.
    """
    make = f"Make one: `openssl genpkey -algorithm ed25519 -out {path}`."
    content = secret_files.read_own(path, MAX_KEY_BYTES, _OPERATOR_KEY, make)
    # The file may be the only copy of another key: suggest no command that would overwrite it.
    return _private(content, path, "Name the file of one.", _OPERATOR_KEY)


def own_public(state_dir: Path) -> Ed25519PublicKey | None:
    """Return the public key of a state directory; None if no key was made yet. Raises SecretFileError."""
    return Signer.load(state_dir).public if os.path.lexists(state_dir / DIRECTORY / NAME) else None


def _private(content: bytes, path: Path, fix: str, kind: str = _RECEIPT_KEY) -> Ed25519PrivateKey:
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise SecretFileError(kind, path, "it does not hold an Ed25519 private key in PEM", fix)
    return key
