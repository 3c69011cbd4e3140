"""Receipts: the statement of one, an in-toto Statement, version 1, with a predicate of ours; and how it is verified.

Offline: signature, form, and its place in an audit log or a copy of it. Reads only.

docs/operate/receipt-fields.csv says what each field means; see also docs/operate/audit.md and
https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md. The models are read from bytes, so they are
strict. A field that is None or empty is not written. Digests are ``sha256:`` and hex, except in ``subject``.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import ConfigDict, Field, ValidationError

from glovebox_audit import chain, read
from glovebox_audit.chain import EvidenceError, Head
from glovebox_audit.events import ReceiptSigned
from glovebox_audit.receipts import dsse
from glovebox_audit.receipts.dsse import PREDICATE_TYPE, STATEMENT_TYPE, is_newer
from glovebox_audit.segments.files import LOG_NAME
from glovebox_audit.segments.merkle import ProofPart
from glovebox_audit.verify import verify as verify_log

_Many = Field(default=(), strict=False)


class ReceiptSubject(ProofPart):
    """in-toto's ResourceDescriptor: one thing the receipt is about."""

    name: str
    digest: dict[str, str]
    uri: str | None = None


class ReceiptCall(ProofPart):
    """The request, its caller and its time."""

    id: str
    tool: str
    principal: str
    transport: str
    received: str
    arguments: str
    code: str | None = None
    client: str | None = None
    run: str | None = None
    workflow: str | None = None


class GivenInput(ProofPart):
    """An artifact of an earlier call that went in."""

    name: str
    uri: str
    digest: str
    bytes: int


class ReceiptPolicy(ProofPart):
    """The rules that allowed the call."""

    profile: str
    rule: str
    role: str | None = None
    policy: str | None = None
    approval: str | None = None
    grants: Annotated[tuple[str, ...], _Many]


class IsolationField(ProofPart):
    """One property of the isolation, from three sides."""

    field: str
    planned: Any = None
    inside: Any = None
    outside: Any = None
    verdict: Literal["ok", "differs", "not measurable"]


class IsolationFound(ProofPart):
    """The isolation asked for, planned and measured."""

    asked: Annotated[tuple[str, ...], _Many]
    enforce: str
    sandbox: str
    driver: str
    level: str
    plan: str
    verified: bool
    table: str | None = None
    fields: Annotated[tuple[IsolationField, ...], _Many]
    host: dict[str, str] = Field(default_factory=dict)


class Connection(ProofPart):
    """One connection that was decided."""

    scheme: str
    host: str
    port: int
    method: str | None = None
    effect: Literal["allow", "deny"]
    rule: str
    address: str | None = None
    credential: str | None = None


class OutcomeTold(ProofPart):
    """Outcome of the call."""

    kind: Literal["call.finished", "call.cancelled", "call.failed"]
    ended: str | None = None
    exit_code: int | None = None
    failed: bool | None = None
    by: str | None = None
    stop: str | None = None
    error: str | None = None
    reason: str | None = None
    elapsed_ms: float
    usage: dict[str, Any] = Field(default_factory=dict)


class Position(ProofPart):
    """Place of the call's last record in the audit log. Its hash covers every record before it."""

    seq: int
    hash: str
    time: str


class Server(ProofPart):
    """The server that makes the statement."""

    version: str
    id: str


class Predicate(ProofPart):
    """Everything a receipt says of a call."""

    call: ReceiptCall
    inputs: Annotated[tuple[GivenInput, ...], _Many]
    policy: ReceiptPolicy
    isolation: IsolationFound | None = None
    egress: Annotated[tuple[Connection, ...], _Many]
    outcome: OutcomeTold
    refused_files: int = 0
    unlisted: int = 0
    withheld: Annotated[tuple[str, ...], _Many]
    audit: Position
    server: Server


class Statement(ProofPart):
    """in-toto's Statement."""

    model_config = ConfigDict(serialize_by_alias=True)

    type: Literal["https://in-toto.io/Statement/v1"] = Field(default=STATEMENT_TYPE, alias="_type")
    subject: Annotated[tuple[ReceiptSubject, ...], _Many]
    predicateType: Literal["https://glovebox.dev/attestation/call/v1"] = PREDICATE_TYPE  # noqa: N815 - in-toto's name
    predicate: Predicate


def parse(payload: bytes) -> Statement:
    """Parse a payload whose signature was checked.

    Raises:
        EvidenceError: it is no statement of this version about a call; says if a newer one made it.
    """
    try:
        return Statement.model_validate_json(payload)
    except ValidationError as problem:
        errors = problem.errors()
        first = errors[0]
        where = ascii(".".join(str(part) for part in first["loc"])[:200])[1:-1]
        kinds = [each["input"] for each in errors if each["loc"] == ("predicateType",)]
        if kinds and is_newer(kinds[0], PREDICATE_TYPE):
            raise EvidenceError(f"made by a newer Glovebox ({kinds[0]}): upgrade to read it") from None
        if all(each["type"] == "extra_forbidden" for each in errors):
            raise EvidenceError(f"made by a newer Glovebox, that says {where}: upgrade to read it") from None
        raise EvidenceError(f"its statement cannot be read by this version: {where}: {first['msg'][:300]}") from None


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
    found = parse(envelope.payload)
    digest = chain.digest_of(content.removesuffix(b"\n"))
    if audit is not None:
        _place(found, digest, audit)
    return VerifiedReceipt(statement=found, digest=digest, key_id=envelope.key_id)


def of_call(directory: Path, call_id: str) -> bytes | None:
    """Return a call's receipt from the log, None if there is none; raises AuditError."""
    signed = [record for record in read.records_of(directory, call_id) if record.kind == ReceiptSigned.kind]
    return chain.canonical(signed[-1].data.get("envelope")) if signed else None


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
