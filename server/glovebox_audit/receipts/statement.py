"""The statement of a receipt: an in-toto Statement, version 1, with a predicate of ours.

See docs/operate/audit.md and https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md. The models are read
from bytes, so they are strict. A field that is None or empty is not written. Digests are ``sha256:`` and hex, except in
``subject``.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from glovebox_audit.chain import EvidenceError
from glovebox_audit.receipts.names import PREDICATE_TYPE, STATEMENT_TYPE, is_newer


class _StatementPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


_Many = Field(default=(), strict=False)


class ReceiptSubject(_StatementPart):
    """in-toto's ResourceDescriptor: one thing the receipt is about."""

    name: str
    """``artifact:<name>`` for a file, ``output:<name>`` for stdout, stderr, value and images, ``arguments``."""
    digest: dict[str, str]
    """``{"sha256": hex}`` of its content; of arguments, of their canonical JSON."""
    uri: str | None = None
    """Address of an artifact."""


class ReceiptCall(_StatementPart):
    """What was asked, by whom, when."""

    id: str
    """The call's id, as in result and log."""
    tool: str
    """Name of the tool."""
    principal: str
    """Who called."""
    transport: str
    """How: ``stdio``, ``http``, ``sse`` or ``cli``."""
    received: str
    """When it arrived: RFC 3339, UTC."""
    arguments: str
    """Digest of the canonical JSON of the arguments."""
    code: str | None = None
    """For ``run_python``: digest of the program's text in UTF-8."""
    client: str | None = None
    """What the client calls itself; self-reported."""
    run: str | None = None
    """Id of the piece of work it belongs to."""
    workflow: str | None = None
    """Name that the operator bound to the caller's token or to the server."""


class GivenInput(_StatementPart):
    """An artifact of an earlier call that went in."""

    name: str
    """Its name below ``/input``."""
    uri: str
    """Its address."""
    digest: str
    """Digest of its content."""
    bytes: int
    """Its size."""


class ReceiptPolicy(_StatementPart):
    """What allowed the call."""

    profile: str
    """Digest of the profile in force."""
    rule: str
    """Id of the rule that decided."""
    role: str | None = None
    """The caller's role, where the operator has a policy."""
    policy: str | None = None
    """Digest of that policy."""
    approval: str | None = None
    """Id of the question that somebody answered with yes; the log has the answer."""
    grants: Annotated[tuple[str, ...], _Many]
    """What was lifted for the call beyond the policy, each as ``what:target (id of the question)``."""


class IsolationField(_StatementPart):
    """One property of the isolation, from three sides."""

    field: str
    """Its name."""
    planned: Any = None
    """What the plan says it must be."""
    inside: Any = None
    """What the guest measured, before it was given the program; absent for what only the host can know."""
    outside: Any = None
    """What the host read from the kernel at that moment, or ``not measurable: …`` and why; absent for what only the
    guest can know."""
    verdict: Literal["ok", "differs", "not measurable"]
    """Whether every measurement is as planned; ``not measurable`` if there is none."""


class IsolationFound(_StatementPart):
    """The isolation asked for, planned and measured."""

    asked: Annotated[tuple[str, ...], _Many]
    """Drivers the profile accepts, best first."""
    enforce: str
    """How limits had to hold: ``cgroup`` for the sandbox as a whole, ``any`` where per process was accepted too."""
    sandbox: str
    """Id of the sandbox."""
    driver: str
    """Which driver made it."""
    level: str
    """Strength class reached."""
    plan: str
    """Digest of the plan that was executed."""
    verified: bool
    """Whether no field differs; where false, the program was never given to it."""
    fields: Annotated[tuple[IsolationField, ...], _Many]
    """Field by field."""
    host: dict[str, str] = Field(default_factory=dict)
    """Versions and digests of what the isolation is made with."""


class Connection(_StatementPart):
    """One connection that was decided."""

    scheme: str
    """``http``, ``https``, or ``unreadable``."""
    host: str
    """Host as asked for."""
    port: int
    """TCP port."""
    method: str | None = None
    """HTTP method, where the broker sees it."""
    effect: Literal["allow", "deny"]
    """``allow`` or ``deny``."""
    rule: str
    """Id of the rule that decided."""
    address: str | None = None
    """The address that was dialled."""
    credential: str | None = None
    """Name of the credential that was added to the request."""


class OutcomeTold(_StatementPart):
    """How the call ended."""

    kind: Literal["call.finished", "call.cancelled", "call.failed"]
    """Kind of the call's last record."""
    ended: str | None = None
    """Finished: ``exited``, ``signalled``, ``timed_out``, ``out_of_memory`` or ``limit``."""
    exit_code: int | None = None
    """Finished: exit code, where it exited."""
    failed: bool | None = None
    """Finished: whether the caller's result is an error; absent in earlier receipts."""
    by: str | None = None
    """Cancelled: by whom."""
    stop: str | None = None
    """Cancelled by a stop: its id."""
    error: str | None = None
    """Failed: class of the failure."""
    reason: str | None = None
    """Failed: what was attempted and why it failed."""
    elapsed_ms: float
    """Milliseconds from receiving the call to this."""
    usage: dict[str, Any] = Field(default_factory=dict)
    """Finished: resources used, as in the record."""


class Position(_StatementPart):
    """Place of the call's last record in the audit log. Its hash covers every record before it."""

    seq: int
    """Number of the record."""
    hash: str
    """Its hash, 64 hex digits."""
    time: str
    """When it was written: RFC 3339, UTC."""


class Server(_StatementPart):
    """Who says all this."""

    version: str
    """Version of Glovebox."""
    id: str
    """Id of the server process, as in its audit records."""


class Predicate(_StatementPart):
    """Everything a receipt says of a call."""

    call: ReceiptCall
    inputs: Annotated[tuple[GivenInput, ...], _Many]
    """What went in beside the arguments."""
    policy: ReceiptPolicy
    isolation: IsolationFound | None = None
    """Absent where no sandbox came to be measured."""
    egress: Annotated[tuple[Connection, ...], _Many]
    """Every connection that was decided, in order; at most 512."""
    outcome: OutcomeTold
    refused_files: int = 0
    """Files that were written and not given back; the log names them."""
    unlisted: int = 0
    """Files and connections that are not listed here because there are too many; the log has them."""
    withheld: Annotated[tuple[str, ...], _Many]
    """What was not granted, in plain words."""
    audit: Position
    server: Server


class Statement(_StatementPart):
    """in-toto's Statement."""

    model_config = ConfigDict(serialize_by_alias=True)

    type: Literal["https://in-toto.io/Statement/v1"] = Field(default=STATEMENT_TYPE, alias="_type")
    """Always ``https://in-toto.io/Statement/v1``."""
    subject: Annotated[tuple[ReceiptSubject, ...], _Many]
    """Files, outputs and arguments, each by digest."""
    predicateType: Literal["https://glovebox.dev/attestation/call/v1"] = PREDICATE_TYPE  # noqa: N815 - in-toto's name
    """Always ``https://glovebox.dev/attestation/call/v1``."""
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
