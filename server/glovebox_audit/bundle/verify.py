"""Verify a bundle offline, from its bytes and public keys. Needs nothing of a server."""

from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from glovebox_audit.bundle import archive, evidence
from glovebox_audit.bundle.evidence import Evidence
from glovebox_audit.chain import EvidenceError


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedBundle:
    """A verified bundle."""

    evidence: Evidence
    report_checked: bool
    """True if this version makes the same page. Else the page claims another version, which proves nothing."""


def verify(content: bytes, keys: Mapping[str, Ed25519PublicKey]) -> VerifiedBundle:
    """Check a bundle.

    Get ``keys``, by id, by a way that the bundle's sender does not control. With none, no signer is proved.

    Raises:
        EvidenceError: it does not hold; the message is the exact reason.
    """
    told, others = archive.evidence_in(content)
    found = evidence.read(told, keys)
    made = archive.parts(found)
    checked = made[archive.REPORT] == others.get(archive.REPORT)
    if not checked and archive.REPORT in others and found.version != evidence.VERSION:
        made[archive.REPORT] = others[archive.REPORT]
    for name in sorted(made.keys() | others.keys()):
        if made.get(name) != others.get(name):
            raise EvidenceError(f"its {ascii(name)[1:-1][:80]} is not what its evidence says")
    return VerifiedBundle(evidence=found, report_checked=checked)
