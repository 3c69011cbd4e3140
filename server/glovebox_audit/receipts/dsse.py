"""Sign and check DSSE envelopes with one Ed25519 signature. Bytes in, bytes out; no file, no clock, nothing of a call.

https://github.com/secure-systems-lab/dsse (protocol and envelope, version 1). Our envelope has one form only, its
canonical JSON. A receipt with any byte changed is another file or no receipt, even where DSSE itself would not notice,
as in the key's id.
"""

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Any, Final

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from glovebox_audit import chain
from glovebox_audit.chain import EvidenceError

STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"

PREDICATE_TYPE: Final = "https://glovebox.dev/attestation/call/v1"
"""A name, as in-toto demands; never fetched. It changes when a field changes its meaning."""

_MOST_DIGITS: Final = 9
"""Digits of a version, which a stranger may have written."""


def is_newer(kind: object, known: str) -> bool:
    """Return whether ``kind`` is a later version of the known type: ``…/v2`` of ``…/v1``."""
    family, _, version = known.rpartition("/v")
    found = kind.removeprefix(f"{family}/v") if isinstance(kind, str) and kind.startswith(f"{family}/v") else ""
    return found.isascii() and found.isdigit() and len(found) <= _MOST_DIGITS and int(found) > int(version)


MAX_SUBJECTS: Final = 512
"""Files of a call listed one by one: a name may have 512 bytes, and a receipt must fit in one record."""
MAX_EGRESS: Final = 512
"""Connections listed one by one: more than the shipped limits let a call attempt."""

PAYLOAD_TYPE = "application/vnd.in-toto+json"
"""https://github.com/in-toto/attestation/blob/main/spec/v1/envelope.md"""

MAX_BYTES = chain.MAX_LINE_BYTES
"""Longest envelope: a receipt is a line of the audit log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """One signed payload."""

    payload: bytes
    key_id: str
    """Only a hint until the signature was checked."""
    signature: bytes


def pae(payload_type: str, payload: bytes) -> bytes:
    """Return the bytes to sign: DSSE's pre-authentication encoding, version 1."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def key_id(key: Ed25519PublicKey) -> str:
    """Return ``sha256:`` and the hex digest of the key's SubjectPublicKeyInfo (DER, as of ``openssl pkey -pubin``)."""
    encoded = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return chain.digest_of(encoded)


class EnvelopeSigner:
    """A private key that signs statements."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = key.public_key()
        self.key_id = key_id(self.public)

    def sign(self, payload: bytes) -> dict[str, Any]:
        """Return the envelope around a payload, as JSON."""
        signature = self._key.sign(pae(PAYLOAD_TYPE, payload))
        return _fields(Envelope(payload=payload, key_id=self.key_id, signature=signature))


def _fields(envelope: Envelope) -> dict[str, Any]:
    return {
        "payload": base64.b64encode(envelope.payload).decode(),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [{"keyid": envelope.key_id, "sig": base64.b64encode(envelope.signature).decode()}],
    }


def parse(content: bytes) -> Envelope:
    """Parse an unverified envelope; one line feed may end it.

    Raises:
        EvidenceError: it is anything but the canonical JSON of an envelope with one signature.
    """
    if len(content) > MAX_BYTES:
        raise EvidenceError(f"it is longer than {MAX_BYTES} bytes")
    text = content.removesuffix(b"\n")
    try:
        fields = json.loads(text)
        ((signature,), kind) = (fields["signatures"], fields["payloadType"])
        found = Envelope(
            payload=base64.b64decode(fields["payload"], validate=True),
            key_id=signature["keyid"],
            signature=base64.b64decode(signature["sig"], validate=True),
        )
        same = isinstance(found.key_id, str) and chain.canonical(_fields(found)) == text
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, binascii.Error):
        raise EvidenceError("it is not a DSSE envelope with one signature") from None
    if kind != PAYLOAD_TYPE:
        raise EvidenceError(f"its payload is not {PAYLOAD_TYPE}")
    if not same:
        raise EvidenceError("it is not in canonical form, so it was changed or written by something else")
    return found


def check(envelope: Envelope, key: Ed25519PublicKey) -> None:
    """Prove that the holder of ``key`` signed exactly this payload.

    Raises:
        EvidenceError: another key is named, or the signature does not fit.
    """
    given = key_id(key)
    if envelope.key_id != given:
        # Nothing is proved yet: the name is a stranger's text, and a terminal shows this.
        named = ascii(envelope.key_id[:80])[1:-1]
        raise EvidenceError(f"it was signed with another key: it names {named}, and yours is {given}")
    try:
        key.verify(envelope.signature, pae(PAYLOAD_TYPE, envelope.payload))
    except InvalidSignature:
        raise EvidenceError("the signature does not fit: payload or signature were changed") from None


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
