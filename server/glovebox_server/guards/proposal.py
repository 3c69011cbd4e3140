"""A call that may run if nobody objects, as approvals and budgets look at it."""

from dataclasses import dataclass

from glovebox_profiles.model import Profile
from glovebox_server.calls import Decision, ToolCall
from glovebox_server.core.call import Call
from glovebox_server.core.inputs import Inputs
from glovebox_server.core.rights import Rights
from glovebox_server.guards.approvals.lifting import Escalation


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """One call that may run if nobody objects, and all that is known of it before it starts."""

    call: ToolCall
    rights: Rights
    profile: Profile
    decision: Decision
    inputs: Inputs
    escalation: Escalation | None = None
    """What somebody would have to lift, where the call is denied otherwise; rights and profile are those with it."""
    changes: str = ""
    """What it would change on the host, as a person is to be shown it: nobody but they can let it run."""
    folder: str = ""
    """Path of the folder that it would change; for the operator alone."""


def propose(call: Call, escalation: Escalation | None = None) -> Proposal:
    """Return a call as it stands in its turn, and what would have to be lifted for it."""
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
