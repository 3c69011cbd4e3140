"""Read and write public keys. The private one is the server's."""

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

#: Longest key file in bytes: an Ed25519 key in PEM is 119 (private) or 113 (public).
MAX_KEY_BYTES = 4096

_NO_PUBLIC_KEY = "it is not an Ed25519 public key in PEM, as `glovebox receipt key` prints it"


def public_pem(key: Ed25519PublicKey) -> str:
    """Return a public key in PEM."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_bytes(serialization.Encoding.PEM, form).decode()


def parse_public(content: bytes) -> Ed25519PublicKey:
    """Parse a public key as ``glovebox receipt key`` prints it; raises ValueError for other bytes."""
    try:
        key = serialization.load_pem_public_key(content)
    except (ValueError, UnsupportedAlgorithm):
        raise ValueError(_NO_PUBLIC_KEY) from None
    if isinstance(key, Ed25519PublicKey):
        return key
    raise ValueError(_NO_PUBLIC_KEY)
