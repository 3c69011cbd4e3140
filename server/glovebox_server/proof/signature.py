"""The signature of a lock: a DSSE envelope beside it, ``FILE.sig``, as receipts have. Bytes in, bytes out."""

import hashlib
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from glovebox_audit import chain
from glovebox_audit.chain import EvidenceError
from glovebox_audit.receipts import dsse, keys
from glovebox_audit.receipts.names import STATEMENT_TYPE
from glovebox_profiles.errors import ProfileError
from glovebox_profiles.load.reading import read_bytes
from glovebox_server.proof.lock import Lock

PREDICATE_TYPE = "https://glovebox.dev/attestation/lock/v1"
"""A name, as in-toto requires: nothing is fetched from there. It changes when a field changes its meaning."""


def place(lock: Path) -> Path:
    """Return the path of a lock's signature."""
    return lock.with_name(f"{lock.name}.sig")


def payload(lock: bytes) -> bytes:
    """Return the signed statement: the lock has exactly these bytes. One form, so that the lock determines it."""
    return chain.canonical(
        {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": "glovebox.lock", "digest": {"sha256": hashlib.sha256(lock).hexdigest()}}],
            "predicateType": PREDICATE_TYPE,
            "predicate": {},
        }
    )


def sign(lock: bytes, key: Ed25519PrivateKey) -> bytes:
    """Return the content of ``FILE.sig``."""
    return chain.canonical(dsse.sign(payload(lock), key, dsse.key_id(key.public_key()))) + b"\n"


def require(lock: Lock, key_file: Path) -> str:
    """Refuse a lock that the holder of a key did not sign; return the key's id.

    Raises ProfileError if the signature is missing or of another key, or the key cannot be used.
    """
    try:
        key = keys.parse_public(read_bytes(key_file, keys.MAX_KEY_BYTES))
    except ValueError as problem:
        raise ProfileError(key_file, None, "", str(problem), "Name the public key.") from None
    where = place(lock.path)
    fix = f"Review the lock, and sign it: `glovebox profiles sign {lock.path} --key KEY`."
    if not where.exists():
        raise ProfileError(lock.path, None, "", "is not signed", fix)
    try:
        return _checked(read_bytes(where, dsse.MAX_BYTES), lock.data, key)
    except EvidenceError as problem:
        raise ProfileError(where, None, "", str(problem), fix) from None


def _checked(content: bytes, lock: bytes, key: Ed25519PublicKey) -> str:
    envelope = dsse.parse(content)
    dsse.check(envelope, key)
    if envelope.payload != payload(lock):
        raise EvidenceError("it is of another lock, or this one was changed since")
    return envelope.key_id
