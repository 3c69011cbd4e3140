"""Verify one receipt offline: signature, form, and its place in an audit log or a copy of it. Reads only."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from glovebox_audit import chain, read
from glovebox_audit.chain import EvidenceError, Head
from glovebox_audit.events import ReceiptSigned
from glovebox_audit.receipts import dsse, statement
from glovebox_audit.receipts.statement import Statement
from glovebox_audit.segments.files import LOG_NAME
from glovebox_audit.verify import verify as verify_log


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedReceipt:
    """A verified receipt."""

    statement: Statement
    digest: str
    key_id: str


def verify(content: bytes, key: Ed25519PublicKey, audit: Path | None = None) -> VerifiedReceipt:
    """Check one receipt, as ``glovebox receipt show --json`` or ``receipt://…`` gives it.

    The receipt's sender must not control how you get the key. Only with ``audit``, a log or copy, is its place proved.

    Raises:
        EvidenceError: the receipt does not hold; the message is the exact reason.
        AuditError: the log cannot be read.
    """
    envelope = dsse.parse(content)
    dsse.check(envelope, key)
    found = statement.parse(envelope.payload)
    digest = "sha256:" + hashlib.sha256(content.removesuffix(b"\n")).hexdigest()
    if audit is not None:
        _place(found, digest, audit)
    return VerifiedReceipt(statement=found, digest=digest, key_id=envelope.key_id)


def of_call(directory: Path, call_id: str) -> bytes | None:
    """Return a call's receipt from the log, None if there is none; raises AuditError."""
    found = None
    for record in read.records_of(directory, call_id):
        if record.kind == ReceiptSigned.kind:
            found = chain.canonical(record.data.get("envelope"))
    return found


def _place(found: Statement, digest: str, audit: Path) -> None:
    position, call = found.predicate.audit, found.predicate.call
    report = verify_log(audit, Head(seq=position.seq, hash=position.hash))
    for problem in report.problems[:1]:
        if problem.kind == "anchor" and problem.line is None:  # retention removed it, on record
            raise EvidenceError(f"its place in the audit log cannot be checked: {problem.detail}")
        line = "" if problem.line is None else f"line {problem.line}"
        file = "" if line and problem.file == LOG_NAME else problem.file
        where = f"({' '.join(filter(None, (file, line)))}: {problem.kind}: {problem.detail})"
        if problem.kind == "anchor":
            reason = f"the log holds no record {position.seq} with its hash"
            raise EvidenceError(f"its place in the audit log does not match: {reason} {where}")
        raise EvidenceError(f"the audit log is not what was written {where}")
    records = list(read.records_of(audit, call.id))
    last = next((record for record in records if record.seq == position.seq), None)
    if last is None or last.kind != found.predicate.outcome.kind:
        raise EvidenceError(f"its place in the audit log does not match: record {position.seq} does not end its call")
    signed = [record.data.get("digest") for record in records if record.kind == ReceiptSigned.kind]
    if signed != [digest]:
        raise EvidenceError(f"the audit log holds {'another' if signed else 'no'} receipt of call {call.id}")
