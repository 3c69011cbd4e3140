"""Records one call in the audit log and issues its receipt from the same records.

So a receipt cannot differ from the log. One disk write holds both: see ``AuditLog.append_all``.
"""

import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import anyio

from glovebox_audit import events
from glovebox_audit.chain import Draft, Head, Record, draft
from glovebox_audit.event import CallEvent, Event
from glovebox_audit.file import Follower
from glovebox_audit.log import AuditLog
from glovebox_audit.place import AuditError
from glovebox_audit.receipts import dsse
from glovebox_profiles import words
from glovebox_profiles.compile import CHANGES
from glovebox_profiles.model import Profile
from glovebox_server.artifacts.record import ArtifactStoreError
from glovebox_server.calls import Principal, ToolCall
from glovebox_server.errors import without_paths
from glovebox_server.failures import foreseen

TerminalEvent = events.CallFinished | events.CallCancelled | events.CallFailed

_MS_DIGITS = 3
"""Decimal places of milliseconds; more would be noise."""
_POSITION_BYTES = 512
"""More than the position of the last record takes: it is known only at the write."""
_ENVELOPE_BYTES = 2048
"""More than an envelope has beside its payload, and a record beside its envelope."""

_CONNECTION = ("scheme", "host", "port", "method", "effect", "rule", "address", "credential")
#: Fields of the statement, each with the record's that it repeats; what has no value has no key.
_CALL = {
    "principal": "principal", "transport": "transport", "arguments": "arguments_digest", "client": "client",
    "run": "run", "workflow": "workflow",
}  # fmt: skip
_POLICY = {
    "profile": "profile_digest", "rule": "rule", "role": "role", "policy": "policy_digest", "approval": "approval",
    "grants": "grants",
}  # fmt: skip
_ISOLATION = {
    "sandbox": "sandbox_id", "driver": "driver", "level": "level", "plan": "plan_digest", "verified": "verified",
    "table": "table", "host": "host", "fields": "fields",
}  # fmt: skip
_STATEMENT = {"_type": dsse.STATEMENT_TYPE, "predicateType": dsse.PREDICATE_TYPE}
_OUTCOME = ("ended", "exit_code", "failed", "by", "stop", "error", "reason", "elapsed_ms", "usage")


def whose(principal: Principal, run: str | None) -> dict[str, str]:
    """Return caller, client, run and workflow for records, results and refusals."""
    said = {"principal": principal.id, "client": principal.client, "run": run, "workflow": principal.workflow}
    return {name: value for name, value in said.items() if value is not None}


def elapsed_ms(call: ToolCall) -> float:
    """Return the milliseconds since a call's turn came."""
    return round((datetime.now(UTC) - call.received).total_seconds() * 1000, _MS_DIGITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The address and digest of a call's receipt, for its result."""

    uri: str
    """``receipt://`` and the call's id."""
    digest: str
    """Of the canonical JSON of the envelope."""
    head: Head
    """Of the log's chain: the receipt's own record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiptIssuer:
    """Issues a signed receipt with the last record of each call."""

    log: AuditLog
    signer: dsse.EnvelopeSigner
    version: str
    server_id: str
    """Id of the server process, as in its records."""


class CallRecorder:
    """Writes the records of one call to the audit log, and its receipt with the last one.

    It alone decides which records share a disk write.
    """

    def __init__(self, issuer: ReceiptIssuer, call: ToolCall, profile: Profile | None) -> None:
        self._issuer = issuer
        self._call = call
        self._profile = profile
        self._whose = {"tool": call.tool, **whose(call.principal, call.run)}
        self._written: list[Record] = []
        self._held: list[Event | Draft] = []
        self._published: tuple[str, ...] = ()
        self._take_back: Callable[[], Awaitable[None]] | None = None

    @property
    def head(self) -> Head:
        """Return the head of the log's chain."""
        return self._issuer.log.head

    async def record(self, event: CallEvent | Draft) -> None:
        """Write one record; it is on the disk on return, except for a decision to allow.

        That one shares the disk write of the next record, which comes before anything else happens if a sandbox stands
        ready. A caller that is about to do what it announces before another record calls ``flush``.

        Raises AuditError if the record is not in the log: what it announces must not happen.
        """
        if isinstance(event, events.CallDecided) and event.effect == "allow":
            self._held.append(self._named(event))
        else:
            await self._write([self._named(event)])

    def hold(self, event: CallEvent) -> None:
        """Write one record with the next one: it announces nothing, and is not worth a disk write."""
        self._held.append(self._named(event))

    def published(self, uris: Iterable[str], take_back: Callable[[], Awaitable[None]] | None = None) -> None:
        """Set the addresses of files that the caller can read from now on, for the call's last record and receipt.

        ``take_back`` removes them, for when no last record can be written.
        """
        self._published, self._take_back = tuple(uris), take_back

    async def flush(self) -> None:
        """Write held records. Raises AuditError if they are not in the log."""
        if self._held:
            await self._write([])

    def _named(self, event: CallEvent | Draft) -> Event | Draft:
        """Return the event with its attribution: each record has its own."""
        if isinstance(event, Draft):
            return event.of_call(self._call.id, self._whose)
        return replace(event, **self._whose)

    async def _write(self, following: Sequence[Event | Draft]) -> None:
        # Dropped even on failure: they may be in the log already, and a decision must be there only once.
        held, self._held = self._held, []
        self._written += await self._issuer.log.append_all([*held, *following])

    @asynccontextmanager
    async def until_ended(self, ended_by: Callable[[], tuple[str, str | None]]) -> AsyncIterator[None]:
        """Record how the call ended if the block is cancelled or fails.

        ``ended_by`` returns who cancelled it (``client``, ``stream closed``, ``token removed``, ``server stopping`` or
        ``stop``), and the id of the stop.
        """
        try:
            yield
        except anyio.get_cancelled_exc_class():
            by, stop = ended_by()
            await self._finish_anyway(
                events.CallCancelled(call_id=self._call.id, by=by, stop=stop, elapsed_ms=elapsed_ms(self._call))
            )
            raise
        except Exception as problem:
            # Also for internal errors: a call without its last record would look as if it still ran.
            reason = str(problem) if foreseen(problem) else "Internal error; see the server's log."
            await self._finish_anyway(
                events.CallFailed(
                    call_id=self._call.id,
                    error=type(problem).__name__,
                    reason=without_paths(reason)[:500],
                    elapsed_ms=elapsed_ms(self._call),
                )
            )
            raise

    async def _finish_anyway(self, event: TerminalEvent) -> None:
        """Record how the call ended although it is being cancelled, or although the log is what failed."""
        with anyio.CancelScope(shield=True):
            try:
                await self.finish(event)
            except AuditError as problem:
                # The caller knows already, or is gone. The log reports the loss when it can, without a receipt.
                reason = f"Its last record could not be written: {without_paths(problem.reason)[:200]}."
                self._issuer.log.lose(self._call.id, reason)
                if self._take_back is not None:
                    with suppress(ArtifactStoreError):  # the disk that failed may be this one: nothing more can be done
                        await self._take_back()

    async def finish(self, last: TerminalEvent) -> Receipt:
        """Write the call's last record and its receipt. Raises AuditError if neither is on the disk."""
        issuer = self._issuer
        if not any(each.kind == events.CallDecided.kind for each in (*self._held, *self._written)):
            reason = "that it was allowed could not be recorded"
            raise AuditError(f"record {last.kind}", reason, "Look at the disk, and try again.")
        last = replace(last, published=self._published or None)

        def receipt(drafts: Sequence[Draft]) -> tuple[Follower, int]:
            statement = self._statement(drafts)

            def signed(record: Record) -> Draft:
                position = {"seq": record.seq, "hash": record.hash, "time": record.time}
                statement["predicate"]["audit"] = position
                envelope = issuer.signer.sign(_encode(statement))
                key, content = issuer.signer.key_id, _encode(envelope)
                event = events.ReceiptSigned(
                    call_id=last.call_id, digest=_digest(content), key=key, envelope=envelope, **self._whose
                )
                return draft(event, envelope=content)

            # Base64 makes four bytes of three.
            most = (len(_encode(statement)) + _POSITION_BYTES) * 4 // 3 + _ENVELOPE_BYTES
            return signed, most

        *_, signed = await issuer.log.append_all([*self._held, self._named(last)], receipt)
        uri, digest = f"receipt://{last.call_id}", signed.data["digest"]
        return Receipt(uri=uri, digest=digest, head=Head(seq=signed.seq, hash=signed.hash))

    def _statement(self, drafts: Sequence[Draft]) -> dict[str, Any]:
        """Return the ``statement.Statement``, without the position of the record that ends the call, the last draft."""
        profile, kind, ended = self._profile, drafts[-1].kind, drafts[-1].data
        records: dict[str, list[Mapping[str, Any]]] = {}
        before: list[Record | Draft] = [*self._written, *drafts[:-1]]
        for each in before:
            records.setdefault(each.kind, []).append(each.data)
        refused = records.get(events.ArtifactRefused.kind, ())
        published = set(ended.get("published", ()))
        files = [each for each in records.get(events.ArtifactCollected.kind, ()) if each["uri"] in published]
        connections = records.get(events.EgressDecided.kind, ())
        decided = records[events.CallDecided.kind][0]
        most = ((files, dsse.MAX_SUBJECTS), (connections, dsse.MAX_EGRESS))
        predicate: dict[str, Any] = {
            "call": _asked(self._call, decided),
            "inputs": [
                {**_picked(each, ("name", "uri", "bytes")), "digest": f"sha256:{each['sha256']}"}
                for each in decided.get("inputs", ())
            ],
            "policy": _renamed(decided, _POLICY),
            "egress": [_picked(each, _CONNECTION) for each in connections[: dsse.MAX_EGRESS]],
            "outcome": {"kind": kind, **_picked(ended, _OUTCOME)},
            "refused_files": sum(each.get("count", 1) for each in refused),
            "unlisted": sum(max(0, len(each) - listed) for each, listed in most),
            "withheld": withheld(profile) if profile else (),
            "server": {"version": self._issuer.version, "id": self._issuer.server_id},
        }
        if profile and (started := records.get(events.SandboxStarted.kind)):
            asked_for: dict[str, Any] = {"asked": profile.isolation, "enforce": profile.limits.enforce}
            predicate["isolation"] = asked_for | _renamed(started[0], _ISOLATION)
        subject = [_subject("artifact", each, each["sha256"], uri=each["uri"]) for each in files[: dsse.MAX_SUBJECTS]]
        subject += [_subject("output", each, each["digest"]) for each in ended.get("outputs", ())]
        subject.append(_subject("arguments", {}, decided["arguments_digest"]))
        return _STATEMENT | {"subject": subject, "predicate": predicate}


def _subject(kind: str, named: Mapping[str, Any], digest: str, **more: str) -> dict[str, Any]:
    name = f"{kind}:{named['name']}" if named else kind
    return {"name": name, "digest": {"sha256": digest.removeprefix("sha256:")}, **more}


def _asked(call: ToolCall, decided: Mapping[str, Any]) -> dict[str, Any]:
    received = call.received.isoformat().replace("+00:00", "Z")
    asked = {"id": call.id, "tool": call.tool, "received": received, **_renamed(decided, _CALL)}
    code = call.arguments.get("code")
    return {**asked, "code": _digest(code.encode("utf-8", "surrogatepass"))} if isinstance(code, str) else asked


def withheld(profile: Profile) -> tuple[str, ...]:
    """Return what this profile withholds from a call, for its receipt: network, files, limits."""
    limits, network = profile.limits, profile.network
    hosts = ", ".join(dict.fromkeys(rule.host for rule in network.allow))
    files = ["Files: of the host everything but the workspace, which could be read and not changed."]
    if profile.files.workspace == "overlay":
        files = ["Files: of the host everything but the workspace, of which a copy could be changed."]
    elif profile.files.workspace == "none":
        files = ["Files: everything of the host, the workspace included."]
    if profile.tool == CHANGES:
        files = ["Files: everything of the host but the change that a person was shown, and said yes to."]
    files += [] if profile.files.inputs else ["Files: those of earlier calls."]
    files += [] if profile.files.output else ["Files: none could be given back."]
    spend = f"{words.number(limits.wall_seconds)} s of real time, {limits.cpu_seconds} s of processor time, "
    spend += f"{words.size(limits.memory)} of memory, {limits.pids} processes and threads, "
    spend += f"{words.size(limits.scratch)} of scratch space"
    if profile.files.output:
        spend += f", {limits.output.files} files and {words.size(limits.output.bytes)} given back"
    if profile.files.workspace == "overlay":
        spend += f", {limits.workspace.files} files and {words.size(limits.workspace.bytes)} of workspace"
    return (
        "Network: all of it."
        if network.mode == "none"
        else f"Network: every host but {hosts}; every address that is not public.",
        *files,
        f"Limits: more than {spend}.",
        "The host's processes, environment and secrets; every privilege and capability; anything after the call.",
    )


def _picked(data: Mapping[str, Any], wanted: Sequence[str]) -> dict[str, Any]:
    return {name: data[name] for name in wanted if name in data}


def _renamed(data: Mapping[str, Any], wanted: Mapping[str, str]) -> dict[str, Any]:
    return {name: data[key] for name, key in wanted.items() if key in data}


def _encode(value: Mapping[str, Any]) -> bytes:
    """Return JSON with sorted keys; of ASCII text alone, as an envelope is, it is canonical."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()


def _digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()
