"""The events of the audit log, by family. Plain data, no I/O.

docs/operate/audit-events.csv says what each field means. A new event is a class here, with its kind: so it is a
dataclass, and in ``EVENTS``. Optional fields that are None are left out of the record. Digests are ``sha256:`` and hex
unless the table says otherwise. No event may carry a secret, a host path or an environment variable: records reach
clients.
"""

from collections.abc import Mapping
from typing import Any, Literal

from glovebox_audit.event import KINDS, Answer, CallEvent, Channel, Effect, Event, Reach
from glovebox_audit.receipts.parts import Input, LossCause, Output, PromotedFile, RemovalReason

#: Every event by its kind.
EVENTS = KINDS


class CallDecided(CallEvent, kind="call.decided"):
    """Policy decided about a call. On disk before anything starts."""

    transport: str
    effect: Effect
    rule: str
    reason: str
    profile_digest: str
    arguments_digest: str
    arguments_bytes: int
    arguments: Mapping[str, Any] | None = None
    redacted: Mapping[str, int] | None = None
    sealed_arguments: str | None = None
    inputs: tuple[Input, ...] | None = None
    role: str | None = None
    policy_digest: str | None = None
    user: str | None = None
    grants: tuple[str, ...] | None = None
    approval: str | None = None
    approved_by: tuple[str, ...] | None = None
    workspace: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None


class SandboxStarted(CallEvent, kind="sandbox.started"):
    """A sandbox stands, was measured and compared with its plan. On disk before the job goes in."""

    sandbox_id: str
    driver: str
    level: str
    plan_digest: str
    table: str | None = None
    measured: Mapping[str, Any]
    fields: tuple[Mapping[str, Any], ...] | None = None
    host: Mapping[str, str] | None = None
    verified: bool


class SandboxTable(Event, kind="sandbox.table"):
    """The measurements that sandboxes of a plan share. On disk, in their segment, before a record that names it."""

    digest: str
    measured: Mapping[str, Any]
    fields: tuple[Mapping[str, Any], ...]
    host: Mapping[str, str]


class EgressDecided(CallEvent, kind="egress.decided"):
    """Egress policy decided about one connection out of a sandbox. On disk before anything is dialled."""

    scheme: str
    host: str
    port: int
    method: str | None = None
    asked_digest: str
    effect: Answer
    rule: str
    address: str | None = None
    credential: str | None = None


class EgressAnswered(CallEvent, kind="egress.answered"):
    """A server answered a request that was allowed, or was tunnelled to, and that is over."""

    host: str
    asked_digest: str
    status: int | None = None
    type: str | None = None
    bytes: int
    complete: bool


class ArtifactCollected(CallEvent, kind="artifact.collected"):
    """An output file passed its checks and lies in quarantine. The call's last record says which became readable."""

    name: str
    uri: str
    sha256: str
    bytes: int
    media_type: str
    risks: tuple[str, ...] | None = None


class ArtifactRefused(CallEvent, kind="artifact.refused"):
    """An output file failed a check and was dropped."""

    name: str
    reason: str
    count: int | None = None


class ScanEvent(Event):
    """Anything that was scanned for what acts when it is opened, or could not be."""

    name: str
    uri: str
    findings: tuple[str, ...] | None = None
    more: int | None = None
    not_scanned: str | None = None
    sandbox_id: str | None = None


class ArtifactScanned(ScanEvent, CallEvent, kind="artifact.scanned"):
    """An output file was scanned, or could not be; before the call's result."""


class EndEvent(CallEvent):
    """The end of a call, as its own server saw it."""

    elapsed_ms: float
    published: tuple[str, ...] | None = None


class CallFinished(EndEvent, kind="call.finished", ends_call=True):
    """The program ended, in whatever way; nothing of it runs, and its sandbox is gone or about to be."""

    ended: Literal["exited", "signalled", "timed_out", "out_of_memory", "limit"]
    exit_code: int | None = None
    failed: bool | None = None
    promotion: str | None = None
    usage: Mapping[str, Any]
    outputs: tuple[Output, ...] = ()
    kept: Mapping[str, str] | None = None
    redacted: Mapping[str, int] | None = None


class CallCancelled(EndEvent, kind="call.cancelled", ends_call=True):
    """The call was stopped from outside; its sandbox is gone."""

    by: str
    stop: str | None = None


class CallFailed(EndEvent, kind="call.failed", ends_call=True):
    """Glovebox itself failed the call; nothing can be said about the program."""

    error: str
    reason: str


class CallLost(CallEvent, kind="call.lost", ends_call=True):
    """A call is over, and its own last record is not in the log: how it ended is not known."""

    cause: LossCause
    reason: str
    run_by: str
    decided: str
    last: str


class ReceiptSigned(CallEvent, kind="receipt.signed"):
    """The receipt of a call that policy allowed, written with the call's last record and right after it."""

    digest: str
    key: str
    envelope: Mapping[str, Any]


class ApprovalEvent(Event):
    """Anything that happens to one question; each record names it, and whose it is, by itself."""

    approval: str
    digest: str
    principal: str
    run: str
    tool: str


class ApprovalRequested(ApprovalEvent, kind="approval.requested"):
    """A call waits for an approval. On disk before anybody can see the question."""

    asked_by: str
    client: str | None = None
    workflow: str | None = None
    rules: tuple[str, ...]
    arguments_digest: str
    profile_digest: str
    policy_digest: str | None = None
    by: Literal["client", "operator", "either"]
    quorum: int
    another_principal: bool
    reach: Reach
    seconds: float
    lifted: str | None = None
    target: str | None = None


class ApprovalAnswered(ApprovalEvent, kind="approval.answered"):
    """Somebody answered a question. On disk before the answer counts."""

    effect: Answer
    answered_by: str
    channel: Channel
    reach: Reach
    reason: str | None = None
    yes: int
    state: str


class ApprovalWithdrawn(ApprovalEvent, kind="approval.withdrawn"):
    """A question, or an unused approval, was withdrawn."""

    by: str


class ApprovalRefused(Event, kind="approval.refused"):
    """An answer did not count: forged, replayed, late, to another question, or of somebody who may not give it."""

    approval: str | None = None
    rule: str
    answered_by: str
    channel: Channel


class GrantEvent(ApprovalEvent):
    """Anything that happens to one grant."""

    lifted: str
    target: str


class GrantMade(GrantEvent, kind="grant.made"):
    """An approval lifts a denial, for one call or for a run. On disk before it does."""

    reach: Reach
    seconds: float


class GrantRevoked(GrantEvent, kind="grant.revoked"):
    """An operator took a grant back; a call that runs on it is not ended by this."""

    by: str


class ProposalScanned(ScanEvent, kind="proposal.scanned"):
    """An artifact that a call proposes was scanned, or could not be. On disk before anybody is asked about it."""

    asked_by: str
    principal: str
    sha256: str
    driver: str | None = None
    level: str | None = None
    plan_digest: str | None = None


class PromotionEvent(Event):
    """Anything that is about to happen to the files of one promotion. On disk before the first is changed."""

    promotion: str
    by: str
    folder: str
    files: tuple[PromotedFile, ...]


class PromotionApplied(PromotionEvent, kind="promotion.applied"):
    """Files are about to be put into a folder that the operator named."""

    asked_by: str | None = None
    digest: str


class PromotionRolledBack(PromotionEvent, kind="promotion.rolled_back"):
    """Files are about to be put back as they were before a promotion."""

    rollback: str | None = None
    because: str


class ServerStarted(Event, kind="server.started"):
    """A server process opened the log and is about to accept calls."""

    version: str
    pid: int
    transport: str
    tools_digest: str | None = None
    receipt_key: str | None = None
    policy_digest: str | None = None
    lock_digest: str | None = None


class ServerStopped(Event, kind="server.stopped"):
    """A server process ends in good order. Missing after a crash."""

    reason: str
    longest_stall_ms: float | None = None


class RequestsRefused(Event, kind="requests.refused"):
    """Requests were refused before they became calls. Counts alone, at most every five seconds."""

    since: str
    count: int
    refused: tuple[Mapping[str, Any], ...]


class PolicyChanged(Event, kind="policy.changed"):
    """Another policy is in effect from now on; calls under way keep what they were decided with."""

    policy_digest: str
    before: str


class PolicyRefused(Event, kind="policy.refused"):
    """The policy's file was changed, and cannot be in effect: the one before stays."""

    where: str
    policy_digest: str


class ProfileLoaded(Event, kind="profile.loaded"):
    """A profile is in effect from now on."""

    tool: str
    digest: str
    source: str
    unsafe: tuple[str, ...] = ()
    changed: Mapping[str, str] | None = None
    lock_digest: str | None = None


class ProfilesRefused(Event, kind="profiles.refused"):
    """The profiles' files, or their lock, were changed, and cannot be in effect: those before stay."""

    where: str
    profiles_digest: str


class PoolChanged(Event, kind="pool.changed"):
    """Sandboxes of a plan are prepared ahead of their calls, or no longer."""

    what: str
    driver: str
    plan_digest: str
    ready: int
    most: int
    reason: str = ""


class GapRecorded(Event, kind="log.gap"):
    """The log found bytes after its last whole record, left by a crash or a full disk. Written by the log only."""

    bytes: int
    digest: str


class SignedEvent(Event):
    """The log's signed statement about one of its segments."""

    segment: int
    root: str
    key: str
    envelope: Mapping[str, Any]


class SegmentSealed(SignedEvent, kind="segment.sealed"):
    """A segment of the log ends here: the last record of its file. Written by the log only."""

    lines: int


class SegmentBegun(Event, kind="segment.begun"):
    """A segment of the log begins: the first record of every file but the first, chained to the seal before."""

    format: int
    segment: int
    offset: int


class SegmentRemoved(SignedEvent, kind="segment.removed"):
    """Retention is about to remove a sealed segment, the oldest. Written by the log only."""

    seal: str
    reason: RemovalReason


class ConsoleEntered(Event, kind="console.entered"):
    """Somebody used a link: a session of the console begins."""

    name: str
    role: str


class ConsoleInvited(Event, kind="console.invited"):
    """A link to the console was made."""

    name: str
    role: str
    by: str


class ConsoleRevoked(Event, kind="console.revoked"):
    """All sessions and links of a name were ended."""

    name: str
    by: str


class StopMade(Event, kind="stop.made"):
    """Something is stopped from now on, until ``stop.lifted``: calls under way end, new ones are refused."""

    stop: str
    scope: str
    name: str
    because: str
    by: str


class StopLifted(Event, kind="stop.lifted"):
    """A stop is no longer in effect."""

    stop: str
    by: str


class WatchAlarm(Event, kind="watch.alarm"):
    """A watch rule found what it looks for. What it found is not in here: it may be a secret."""

    rule: str
    action: str
    where: str
    what: str
    call: str | None = None
    tool: str | None = None
    principal: str
    client: str | None = None
    run: str | None = None
    workflow: str | None = None


class TokenCreated(Event, kind="token.created"):
    """An operator is about to make a token. On disk before it is."""

    principal: str
    by: str
    role: str | None = None
    workflow: str | None = None
    expires: str | None = None


class TokenRevoked(Event, kind="token.revoked"):
    """An operator ended a token. It is gone before this is written, so that nothing can keep it in effect."""

    principal: str
    by: str


class StateRestored(Event, kind="state.restored"):
    """A backup took the place of the state directory: what is before this is the backup's."""

    by: str
    made: str
    head: str
    before: str | None = None


class NotificationFailed(Event, kind="notification.failed"):
    """A notification was given up after its last attempt; its receiver may not have it."""

    id: str
    about: str
    attempts: int
    reason: str
