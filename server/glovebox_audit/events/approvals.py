"""Events of questions to people. None of them is a record of a call: a question may outlive the call that asked it."""

from typing import Literal

from glovebox_audit.events.base import Event


class ApprovalEvent(Event):
    """Anything that happens to one question; each record names it, and whose it is, by itself."""

    approval: str
    """Id of the question: ``approval`` of the ``call.decided`` that a yes let through."""
    digest: str
    """Digest of everything that an answer is bound to."""
    principal: str
    """Id of the caller."""
    run: str
    """Id of the caller's run; empty where the call belongs to none."""
    tool: str
    """Name of the tool."""


class ApprovalRequested(ApprovalEvent, kind="approval.requested"):
    """A call waits for a yes. On disk before anybody can see the question."""

    asked_by: str
    """Id of the call that asked first."""
    client: str | None = None
    """What the client calls itself; self-reported."""
    workflow: str | None = None
    """Name that the operator bound to the caller's token or to the server."""
    rules: tuple[str, ...]
    """Ids of the rules that ask."""
    arguments_digest: str
    """Digest of the canonical JSON of the arguments."""
    profile_digest: str
    """Digest of the profile in force."""
    policy_digest: str | None = None
    """Digest of the policy in force, where there is one."""
    by: Literal["client", "operator", "either"]
    """Whose answer counts: ``client``, ``operator`` or ``either``."""
    quorum: int
    """How many different principals have to say yes."""
    another_principal: bool
    """Whether the caller's own yes does not count."""
    reach: Literal["call", "run", "caller"]
    """How far a yes goes at most: ``call``, ``run`` or ``caller``."""
    seconds: float
    """How long the question stands, and then a yes to it; by the clock since boot."""
    lifted: str | None = None
    """What kind of denial a yes would lift: ``host``, ``tool`` or ``budget``; absent where nothing is denied."""
    target: str | None = None
    """What exactly: host and port, the tool, or the budget."""


class ApprovalAnswered(ApprovalEvent, kind="approval.answered"):
    """Somebody answered a question. On disk before the answer counts."""

    effect: Literal["allow", "deny"]
    """``allow`` or ``deny``."""
    answered_by: str
    """Principal of who answered; an answer at the client is the caller's own."""
    channel: Literal["client", "operator"]
    """``client``: by elicitation; ``operator``: out of band."""
    reach: Literal["call", "run", "caller"]
    """How far a yes goes: ``call``, ``run`` or ``caller``."""
    reason: str | None = None
    """Why not, as the model reads it; absent where nothing was said."""
    yes: int
    """How many have said yes, this one included."""
    state: str
    """Where the question stands now: ``pending``, ``allowed`` or ``denied``."""


class ApprovalWithdrawn(ApprovalEvent, kind="approval.withdrawn"):
    """A question, or a yes that was not used, was taken back."""

    by: str
    """Principal of who took it back: the caller, whose call ended before an answer, or an operator."""


class ApprovalRefused(Event, kind="approval.refused"):
    """An answer did not count: forged, replayed, late, to another question, or of somebody who may not give it.

    The question stays as it was.
    """

    approval: str | None = None
    """Id of the question, where there is one of that id."""
    rule: str
    """Why, e.g. ``approval.mismatch``."""
    answered_by: str
    """Principal of who sent it."""
    channel: Literal["client", "operator"]
    """How it came."""


class GrantMade(ApprovalEvent, kind="grant.made"):
    """A yes lifts a denial, for one call or for a run. On disk before it does."""

    lifted: str
    """What kind of denial: ``host``, ``tool`` or ``budget``."""
    target: str
    """What exactly: host and port, the tool, or the budget."""
    reach: Literal["call", "run", "caller"]
    """``call`` or ``run``."""
    seconds: float
    """How long it lasts; by the clock since boot."""


class GrantRevoked(ApprovalEvent, kind="grant.revoked"):
    """An operator took a grant back; a call that runs on it is not ended by this."""

    lifted: str
    """What kind of denial."""
    target: str
    """What exactly."""
    by: str
    """Principal of who took it back."""
