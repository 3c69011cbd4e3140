"""The proof of a bundle, offline: from its bytes and public keys to what it shows. Needs nothing of a server."""

from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from glovebox_audit.bundle import archive, evidence
from glovebox_audit.bundle.evidence import Evidence
from glovebox_audit.chain import EvidenceError


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedBundle:
    """A bundle that holds."""

    evidence: Evidence
    report_checked: bool
    """Whether its page is what this version makes of the evidence. If not, another version says that it wrote it, which
    anybody can say: the page proves nothing."""


def verify(content: bytes, keys: Mapping[str, Ed25519PublicKey]) -> VerifiedBundle:
    """Check a bundle.

    Args:
        content: the file.
        keys: by id, got by a way that whoever sent the bundle does not control; none proves no signer.

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
