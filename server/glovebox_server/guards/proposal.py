"""A call that may run unless refused, as approvals and budgets see it."""

from dataclasses import dataclass

from glovebox_profiles.model import Profile
from glovebox_server.calls import Decision, ToolCall
from glovebox_server.core.call import Call, Inputs
from glovebox_server.core.rights import Rights
from glovebox_server.guards.approvals.lifting import Escalation


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """One call that may run unless refused, and all that is known before it starts."""

    call: ToolCall
    rights: Rights
    profile: Profile
    decision: Decision
    inputs: Inputs
    escalation: Escalation | None = None
    """The lift that a denied call needs; rights and profile include it."""
    changes: str = ""
    """Its changes on the host, as a person reads them: only an approval lets it run."""
    folder: str = ""
    """Host path that it would change; only for the operator."""


def propose(call: Call, escalation: Escalation | None = None) -> Proposal:
    """Return a call as it stands in its turn, and the lift it needs."""
    now = call.now
    return Proposal(
        call=call.request,
        rights=now.rights,
        profile=now.profile,
        decision=now.decision,
        inputs=now.inputs or Inputs(),
        escalation=escalation,
        changes=now.changes,
        folder=now.folder,
    )
