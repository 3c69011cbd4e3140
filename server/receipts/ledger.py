"""A call's records on their way to the audit log, remembered, and the receipt made of them with the last one.

So a receipt cannot say anything else than the log. Both are written by one disk write: see ``AuditLog.append_with``.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from profiles.explain import withheld
from profiles.model import Profile
from server.audit import chain
from server.audit.chain import Record
from server.audit.events import (
    ArtifactCollected,
    ArtifactRefused,
    CallCancelled,
    CallDecided,
    CallFailed,
    CallFinished,
    EgressDecided,
    Event,
    ReceiptSigned,
    SandboxStarted,
)
from server.audit.log import Then
from server.calls import ToolCall
from server.receipts import statement as parts
from server.receipts.statement import Statement

LastWord = CallFinished | CallCancelled | CallFailed

_POSITION_BYTES = 512
"""More than position and subject of the last record take: they are known only when it is written."""


class Log(Protocol):
    """The part of ``AuditLog`` that is needed here."""

    async def append(self, event: Event) -> Record:
        """See ``AuditLog.append``."""

    async def append_with(self, event: Event, then: Then) -> tuple[Record, Record]:
        """See ``AuditLog.append_with``."""


class Signs(Protocol):
    """The part of ``keys.Signer`` that is needed here."""

    @property
    def key_id(self) -> str:
        """Which key."""

    def sign(self, payload: bytes) -> dict[str, Any]:
        """The envelope around ``payload``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """Where a call's receipt is, for its result."""

    uri: str
    """``receipt://`` and the call's id."""
    digest: str
    """Digest of the canonical JSON of the envelope."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Office:
    """Opens one ledger per call: the log, who signs, and as whom."""

    log: Log
    signer: Signs
    server: parts.Server

    def ledger(self, call: ToolCall, profile: Profile | None) -> "Ledger":
        """The ledger of one call."""
        return Ledger(self, call, profile)


class Ledger:
    """The records of one call. Appending to it appends to the log."""

    def __init__(self, office: Office, call: ToolCall, profile: Profile | None) -> None:
        """Begin with no record."""
        self._office = office
        self._call = call
        self._profile = profile
        self._events: list[Event] = []

    async def append(self, event: Event) -> Record:
        """Write one record; see ``AuditLog.append``."""
        record = await self._office.log.append(event)
        self._events.append(event)
        return record

    async def close(self, last: LastWord) -> Receipt:
        """Write the call's last record and its receipt, both or none.

        Raises:
            AuditUnavailable: neither is on the disk.
        """
        office = self._office
        statement = _statement(self._call, self._profile, self._events, last, office.server)
        length = len(statement.model_dump_json(exclude_none=True).encode()) + _POSITION_BYTES
        digest = ""

        def receipt(record: Record) -> ReceiptSigned:
            nonlocal digest
            envelope = office.signer.sign(parts.encode(statement, record))
            digest = chain.digest(envelope)
            return ReceiptSigned(call_id=last.call_id, digest=digest, key=office.signer.key_id, envelope=envelope)

        # Base64 makes four bytes of three; 1,024 hold the envelope's other parts.
        await office.log.append_with(last, Then(event=receipt, bytes=length * 4 // 3 + 1024))
        return Receipt(uri=f"receipt://{last.call_id}", digest=digest)


def _statement(
    call: ToolCall, profile: Profile | None, events: Iterable[Event], last: LastWord, server: parts.Server
) -> Statement:
    """Everything but the position of the last record."""
    of: dict[type[Event], list[Any]] = {}
    for event in events:
        of.setdefault(type(event), []).append(event)
    decided: CallDecided = of[CallDecided][0]
    refused = {event.name for event in of.get(ArtifactRefused, ())}
    files = [event for event in of.get(ArtifactCollected, ()) if event.name not in refused]
    connections = of.get(EgressDecided, ())
    listed = [_file(event) for event in files[: parts.MAX_SUBJECTS]]
    unlisted = len(files) - len(listed) + max(0, len(connections) - parts.MAX_EGRESS)
    return Statement(
        subject=(*listed, *_outputs(last)),
        predicate=parts.Predicate(
            call=_asked(call, decided),
            inputs=tuple(
                parts.GivenInput(name=each.name, uri=each.uri, digest=f"sha256:{each.sha256}", bytes=each.bytes)
                for each in decided.inputs or ()
            ),
            policy=parts.Policy(profile=decided.profile_digest, rule=decided.rule),
            isolation=_isolation(profile, of.get(SandboxStarted, ())),
            egress=tuple(_connection(event) for event in connections[: parts.MAX_EGRESS]),
            outcome=_outcome(last),
            refused_files=len(of.get(ArtifactRefused, ())),
            unlisted=unlisted,
            withheld=withheld(profile) if profile else (),
            audit=parts.Position(seq=0, hash="", time=""),
            server=server,
        ),
    )


def _asked(call: ToolCall, decided: CallDecided) -> parts.Call:
    code = call.arguments.get("code")
    return parts.Call(
        id=call.id,
        tool=call.tool,
        principal=decided.principal,
        transport=decided.transport,
        received=call.received.isoformat().replace("+00:00", "Z"),
        arguments=decided.arguments_digest,
        code=_digest(code.encode("utf-8", "surrogatepass")) if isinstance(code, str) else None,
    )


def _isolation(profile: Profile | None, started: Iterable[SandboxStarted]) -> parts.IsolationFound | None:
    for event in started:
        return parts.IsolationFound(
            asked=profile.isolation if profile else (),
            enforce=profile.limits.enforce if profile else "",
            sandbox=event.sandbox_id,
            driver=event.driver,
            level=event.level,
            plan=event.plan_digest,
            verified=event.verified,
            fields=tuple(parts.IsolationField(**_plain(each)) for each in event.fields),
            host=_plain(event.host or {}),
        )
    return None


def _file(event: ArtifactCollected) -> parts.Subject:
    return parts.Subject(name=_text(f"artifact:{event.name}"), digest={"sha256": event.sha256}, uri=event.uri)


def _outputs(last: LastWord) -> list[parts.Subject]:
    outputs = last.outputs if isinstance(last, CallFinished) else ()
    return [
        parts.Subject(name=f"output:{each.name}", digest={"sha256": each.digest.removeprefix("sha256:")})
        for each in outputs
    ]


def _connection(event: EgressDecided) -> parts.Connection:
    return parts.Connection(
        scheme=event.scheme,
        host=_text(event.host),
        port=event.port,
        method=event.method,
        effect=event.effect,
        rule=event.rule,
        address=event.address,
    )


def _outcome(last: LastWord) -> parts.OutcomeTold:
    told: dict[str, Any] = {"kind": last.kind, "elapsed_ms": last.elapsed_ms}
    match last:
        case CallFinished():
            told |= {"ended": last.ended, "exit_code": last.exit_code, "usage": _plain(last.usage)}
        case CallCancelled():
            told |= {"by": last.by}
        case CallFailed():
            told |= {"error": last.error, "reason": _text(last.reason)}
    return parts.OutcomeTold(**told)


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """As the log has it: what JSON cannot hold has become text."""
    found: Any = chain.recordable(value)
    return dict(found)


def _text(value: str) -> str:
    return str(chain.recordable(value))


def _digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()
