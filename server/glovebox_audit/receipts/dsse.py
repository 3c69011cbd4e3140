"""Sign and check DSSE envelopes with one Ed25519 signature. Bytes in, bytes out; no file, no clock, nothing of a call.

https://github.com/secure-systems-lab/dsse (protocol and envelope, version 1). Our envelope has one form only, its
canonical JSON. A receipt with any byte changed is another file or no receipt, even where DSSE itself would not notice,
as in the key's id.
"""

import base64
import binascii
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from glovebox_audit import chain
from glovebox_audit.chain import EvidenceError

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
    return "sha256:" + hashlib.sha256(encoded).hexdigest()


def sign(payload: bytes, key: Ed25519PrivateKey, identity: str) -> dict[str, Any]:
    """Return the envelope as JSON; ``identity`` is the key's id."""
    signature = key.sign(pae(PAYLOAD_TYPE, payload))
    return {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [{"keyid": identity, "sig": base64.b64encode(signature).decode()}],
    }


class EnvelopeSigner:
    """A private key that signs statements."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.key_id = key_id(key.public_key())

    def sign(self, payload: bytes) -> dict[str, Any]:
        """Return the envelope around a payload, as JSON."""
        return sign(payload, self._key, self.key_id)


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
        same = chain.canonical(fields) == text and set(fields) == {"payload", "payloadType", "signatures"}
        same = same and set(signature) == {"keyid", "sig"} and isinstance(found.key_id, str)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, binascii.Error):
        raise EvidenceError("it is not a DSSE envelope with one signature") from None
    if kind != PAYLOAD_TYPE:
        raise EvidenceError(f"its payload is not {PAYLOAD_TYPE}")
    if not (same and _same(found.payload, fields["payload"]) and _same(found.signature, signature["sig"])):
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


def _same(content: bytes, text: str) -> bool:
    """Return whether this is the canonical base64 of these bytes: readers ignore some of its bits."""
    return base64.b64encode(content).decode() == text
