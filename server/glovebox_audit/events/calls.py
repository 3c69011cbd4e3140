"""Events of one call, in the order in which they come."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from glovebox_audit.events.base import CallEvent

Effect = Literal["allow", "deny", "ask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One artifact of an earlier call that this call was given."""

    name: str
    """Its name below ``/input``."""
    uri: str
    """Its address."""
    sha256: str
    """Hex digest of the content."""
    bytes: int
    """Size of the content."""


class CallDecided(CallEvent, kind="call.decided"):
    """Policy decided about a call. On disk before anything starts."""

    transport: str
    """How the call arrived: ``stdio``, ``http``, ``sse`` or ``cli``."""
    effect: Effect
    """``allow``, ``deny`` or ``ask``."""
    rule: str
    """Id of the rule that decided."""
    reason: str
    """One sentence, as the caller saw it; where that repeats a URL, with its host and port alone."""
    profile_digest: str
    """Digest of the profile in force; empty when there is none."""
    arguments_digest: str
    """Digest of the canonical JSON of the arguments."""
    arguments_bytes: int
    """Length of that JSON in bytes."""
    arguments: Mapping[str, Any] | None = None
    """The arguments themselves, only where the profile keeps them."""
    redacted: Mapping[str, int] | None = None
    """Secrets that were replaced in them, by kind; absent where there were none. The digest is of what was asked."""
    sealed_arguments: str | None = None
    """The arguments sealed to the operator's key, where they are not above as they were asked (HPKE, base64)."""
    inputs: tuple[Input, ...] | None = None
    """``name``, ``uri``, ``sha256`` and ``bytes`` of each artifact that goes in."""
    role: str | None = None
    """The caller's role, where there is a policy."""
    policy_digest: str | None = None
    """Digest of the policy in force, where there is one."""
    user: str | None = None
    """The person behind the caller, and the client, as the claims of its access token name them."""
    grants: tuple[str, ...] | None = None
    """What was lifted for it beyond the policy, each as ``what:target (id of the question)``; absent where nothing."""
    approval: str | None = None
    """Id of the question that was answered with yes, where one was asked."""
    approved_by: tuple[str, ...] | None = None
    """Who answered it with yes; absent in earlier logs, which have ``approval.answered``."""
    workspace: str | None = None
    """Name of the folder that it reads, where its profile lets it read one; not told to clients."""
    traceparent: str | None = None
    """Where the call stands in its caller's own tracing, if it says so (W3C Trace Context); self-reported."""
    tracestate: str | None = None
    """What came with it, at most 512 characters."""


class SandboxStarted(CallEvent, kind="sandbox.started"):
    """A sandbox stands, was measured and compared with its plan. On disk before the job goes in."""

    sandbox_id: str
    """Id of the sandbox, unique."""
    driver: str
    """Which driver made it."""
    level: str
    """Strength class reached on this host: ``namespaces``, ``container``, ``userspace-kernel``, ``microvm``."""
    plan_digest: str
    """Digest of the plan that was executed."""
    measured: Mapping[str, Any]
    """The isolation as the guest measured it from inside."""
    fields: tuple[Mapping[str, Any], ...] = ()
    """Field by field what was planned, measured ``inside``, seen from ``outside``, and the ``verdict``."""
    host: Mapping[str, str] | None = None
    """Versions and digests of what the isolation is made with; receipt-fields.csv says who observed each."""
    verified: bool
    """Whether no field differs; where one does, no job was given to it."""


class EgressDecided(CallEvent, kind="egress.decided"):
    """Egress policy decided about one connection out of a sandbox. On disk before anything is dialled."""

    scheme: str
    """``http`` or ``https``."""
    host: str
    """Host as asked for, after strict parsing; ``unreadable`` where that failed."""
    port: int
    """TCP port; 0 where it could not be read."""
    method: str | None = None
    """HTTP method, where the broker sees it."""
    asked_digest: str
    """Digest of the URL or authority, as the sandbox wrote it: what stands in it besides may be a secret."""
    effect: Literal["allow", "deny"]
    """``allow`` or ``deny``."""
    rule: str
    """Id of the rule that decided."""
    address: str | None = None
    """The checked address that was dialled; absent when denied before resolving."""
    credential: str | None = None
    """Name of the credential that was added to the request; never its value."""


class EgressAnswered(CallEvent, kind="egress.answered"):
    """A server answered a request that was allowed, or was tunnelled to, and that is over.

    On disk with the record after it.
    """

    host: str
    """Who answered."""
    asked_digest: str
    """As in the ``egress.decided`` before it."""
    status: int | None = None
    """Status code; absent of a tunnel, which nobody looks into, and which earlier logs have no such record of."""
    type: str | None = None
    """Media type, as the server says; absent where it says none."""
    bytes: int
    """Bytes of the decoded body that the sandbox got; of a tunnel all that it got."""
    complete: bool
    """Whether that is all of it: it may have broken off, or a bound or the call's end cut it."""


class ArtifactCollected(CallEvent, kind="artifact.collected"):
    """An output file passed its checks and lies in quarantine. The call's last record says which became readable."""

    name: str
    """File name inside ``/output``."""
    uri: str
    """Its address, ``artifact://…``."""
    sha256: str
    """Hex digest of the content."""
    bytes: int
    """Size in bytes."""
    media_type: str
    """Media type as found by content and name."""
    risks: tuple[str, ...] | None = None
    """Why it must not be opened or promoted unseen, one sentence each; absent where nothing was noticed."""


class ArtifactRefused(CallEvent, kind="artifact.refused"):
    """An output file failed a check and was dropped."""

    name: str
    """File name inside ``/output``; bytes that are no UTF-8 appear as backslash escapes."""
    reason: str
    """Which check, in one sentence."""
    count: int | None = None
    """How many files, where this stands for those beyond the ones that are named."""


class ArtifactScanned(CallEvent, kind="artifact.scanned"):
    """An output file was looked into for what acts when it is opened, or could not be; before the call's result."""

    name: str
    """File name inside ``/output``."""
    uri: str
    """Its address, as in ``artifact.collected``."""
    findings: tuple[str, ...] | None = None
    """What was found, as the scanner says, which a file may have taken over; absent where that is nothing."""
    more: int | None = None
    """How many more were found, which are not listed; absent where there are none."""
    not_scanned: str | None = None
    """Why it was not looked into; absent where it was."""
    sandbox_id: str | None = None
    """Where that was done, as in its ``sandbox.started``; absent where there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One thing a call gave back, by digest and size."""

    name: str
    """``stdout``, ``stderr``, ``value`` or ``image:0``, ``image:1`` and so on; ``shown:`` and one of these, or a file's
    name, for the smaller copy that clients are shown."""
    digest: str
    """Digest of the bytes that were kept."""
    bytes: int
    """How many bytes the program produced, dropped ones included."""


class CallFinished(CallEvent, kind="call.finished", ends_call=True):
    """The program ended, in whatever way; nothing of it runs, and its sandbox is gone or about to be."""

    ended: Literal["exited", "signalled", "timed_out", "out_of_memory", "limit"]
    """``exited``, ``signalled``, ``timed_out``, ``out_of_memory`` or ``limit``."""
    exit_code: int | None = None
    """Exit code, where it exited."""
    failed: bool | None = None
    """Whether the result is an error, as of a tool that exited and could not do what was asked; absent in earlier logs,
    where a call failed whose exit code is not 0."""
    promotion: str | None = None
    """Id of the promotion that it made; absent where it changed nothing in a folder."""
    elapsed_ms: float
    """Milliseconds from receiving the call to its outcome."""
    usage: Mapping[str, Any]
    """Resources used, as the driver measured them; for a call with a network also ``egress_…``, sums over its
    connections, and ``scan_ms`` where its files were looked into. Keys carry their unit; ``cpu_from`` and
    ``memory_from`` say who counted."""
    outputs: tuple[Output, ...] = ()
    """``name``, ``digest`` and ``bytes`` of each output."""
    kept: Mapping[str, str] | None = None
    """Outputs by name, only where the profile keeps them; up to 128 Ki characters of each."""
    redacted: Mapping[str, int] | None = None
    """Secrets that were replaced in outputs, by kind; absent where there were none. Digests are of what is left."""
    published: tuple[str, ...] | None = None
    """Addresses of the files that the caller can read from now on; absent where there are none."""


class CallCancelled(CallEvent, kind="call.cancelled", ends_call=True):
    """The call was stopped from outside; its sandbox is gone."""

    by: str
    """Who: ``client``, ``stream closed``, ``token removed``, ``server stopping``, or ``stop``: an operator's or a watch
    rule's."""
    stop: str | None = None
    """Id of the stop, where one ended it."""
    elapsed_ms: float
    """Milliseconds from receiving the call to the sandbox's end."""
    published: tuple[str, ...] | None = None
    """Addresses of the files that the caller can read from now on; absent where there are none."""


class CallFailed(CallEvent, kind="call.failed", ends_call=True):
    """Glovebox itself failed the call; nothing can be said about the program."""

    error: str
    """Class of the failure, e.g. ``SandboxError`` or ``UnsupportedSpecError``."""
    reason: str
    """What was attempted and why it failed, without host paths."""
    elapsed_ms: float
    """Milliseconds from receiving the call to the failure."""
    published: tuple[str, ...] | None = None
    """Addresses of the files that the caller can read from now on; absent where there are none."""


LossCause = Literal["log", "server"]


class CallLost(CallEvent, kind="call.lost", ends_call=True):
    """A call is over, and its own last record is not in the log: how it ended is not known.

    Its caller got an error or nothing, never a result. It has no receipt.
    """

    cause: LossCause
    """``log``: its last record could not be written, and this one comes with the next that could; ``server``: its
    server process was gone, as found by the next one that started."""
    reason: str
    """The same in a sentence."""
    run_by: str
    """Id of the server process that ran it."""
    decided: str
    """When policy allowed it: the time of its ``call.decided``."""
    last: str
    """Kind of its last record before this one: so far it had come for certain."""


class ReceiptSigned(CallEvent, kind="receipt.signed"):
    """The receipt of a call that policy allowed, written with the call's last record and right after it.

    Clients do not hear it as an event: results name it, and ``receipt://…`` gives it.
    """

    digest: str
    """Digest of the receipt: of the canonical JSON of ``envelope``."""
    key: str
    """Id of the key that signed it."""
    envelope: Mapping[str, Any]
    """The receipt itself, see docs/operate/audit.md."""
