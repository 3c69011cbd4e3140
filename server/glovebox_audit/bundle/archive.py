"""The bundle file: a zip whose other parts derive from ``evidence.json`` alone. Bytes in, bytes out.

A verifier makes them again. So the page shows what was proved, and a bundle has one form only. Nothing in it is
compressed, so its length bounds the cost of reading it.
"""

import io
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from glovebox_audit import chain
from glovebox_audit.bundle import evidence, report
from glovebox_audit.bundle.evidence import Evidence
from glovebox_audit.chain import EvidenceError

MAX_BYTES = 512 << 20
"""Longest bundle: a run of about 20,000 calls."""

EVIDENCE, REPORT = "evidence.json", "report.html"

_BEGAN = (1980, 1, 1, 0, 0, 0)
"""Time of every part: the first moment that a zip can name."""


def parts(evidence: Evidence) -> dict[str, bytes]:
    """Return the parts derived from the evidence: receipts, profiles, policies, and the page."""
    found = {f"receipts/{call}.json": content + b"\n" for call, content in evidence.receipts.items()}
    for folder, texts in (("profiles", evidence.profiles), ("policies", evidence.policies)):
        for digest, text in texts.items():
            if text is not None:
                found[f"{folder}/{digest.removeprefix('sha256:')}.json"] = chain.canonical(text) + b"\n"
    return found | {REPORT: report.page(evidence).encode()}


def written(evidence: bytes, others: dict[str, bytes]) -> bytes:
    """Return the bytes of the bundle file."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as file:
        for name, content in sorted({**others, EVIDENCE: evidence}.items()):
            item = zipfile.ZipInfo(name, _BEGAN)
            item.create_system, item.external_attr = 3, 0o644 << 16
            file.writestr(item, content)
    return out.getvalue()


def evidence_in(content: bytes) -> tuple[bytes, dict[str, bytes]]:
    """Return the evidence of a bundle, and its other parts; raises EvidenceError if it is none."""
    if len(content) > MAX_BYTES:
        raise EvidenceError(f"it is longer than {MAX_BYTES} bytes")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as file:
            if any(each.compress_type != zipfile.ZIP_STORED for each in file.infolist()):
                raise EvidenceError("it is not as it was written: a part is compressed")
            # A stored part has at most its stated size; overlapping parts could state more than there is.
            if sum(each.file_size for each in file.infolist()) > len(content):
                raise EvidenceError("it is not as it was written: its parts overlap")
            found = {each.filename: file.read(each) for each in file.infolist()}
            evidence = found.pop(EVIDENCE)
    except (zipfile.BadZipFile, LookupError, ValueError, OSError, EOFError, RuntimeError, struct.error):
        raise EvidenceError("it is no bundle, or one that was damaged") from None
    if written(evidence, found) != content:
        raise EvidenceError("it is not as it was written: bytes were changed or added")
    return evidence, found


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedBundle:
    """A verified bundle."""

    evidence: Evidence
    report_checked: bool
    """True if this version makes the same page. Else the page claims another version, which proves nothing."""


def make(directory: Path, of: str, identity: str, texts: evidence.Texts) -> bytes:
    """Return the bundle of a ``call`` or ``run``. Raises like ``prove``."""
    content = evidence.prove(directory, of, identity, texts)
    return written(content, parts(evidence.read(content, {})))


def verify(content: bytes, keys: Mapping[str, Ed25519PublicKey]) -> VerifiedBundle:
    """Check a bundle.

    Get ``keys``, by id, by a way that the bundle's sender does not control. With none, no signer is proved.

    Raises:
        EvidenceError: it does not hold; the message is the exact reason.
    """
    told, others = evidence_in(content)
    found = evidence.read(told, keys)
    made = parts(found)
    checked = made[REPORT] == others.get(REPORT)
    if not checked and REPORT in others and found.version != evidence.VERSION:
        made[REPORT] = others[REPORT]
    for name in sorted(made.keys() | others.keys()):
        if made.get(name) != others.get(name):
            raise EvidenceError(f"its {ascii(name)[1:-1][:80]} is not what its evidence says")
    return VerifiedBundle(evidence=found, report_checked=checked)
