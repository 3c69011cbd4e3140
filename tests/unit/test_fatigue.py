"""How often the example policy asks: about everything dangerous, and about little else."""

from collections import Counter
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from tests.fixtures import fatigue
from tests.fixtures.approving import Desk
from tests.fixtures.fatigue import Seeded

from glovebox_audit.chain import new_call_id
from glovebox_profiles.load.loader import SHIPPED
from glovebox_profiles.load.loader import load as load_profiles
from glovebox_server.app import check_example
from glovebox_server.calls import Decision, Principal, ToolCall
from glovebox_server.core.call import Attempt, decide, validate_arguments
from glovebox_server.core.rights import Rights, Roles
from glovebox_server.guards.approvals.question import Question
from glovebox_server.guards.approvals.rules import lift_denial
from glovebox_server.startup import load
from glovebox_server.tools import TOOLS

POLICY = Path(__file__).parents[2] / "examples" / "policy.toml"
ORDINARY, DANGEROUS = 400, 40
RELEASED = 40
"""Ordinary programs of the release, each of which its rule wants read."""


async def test_the_example_policy_asks_about_all_that_is_dangerous_and_little_else(desk: Desk, tmp_path: Path) -> None:
    """A person who says yes to ordinary calls and no to the others; each question is counted, whoever it is about."""
    profiles = load_profiles([SHIPPED], check_example=check_example, tools=TOOLS)
    roles = Roles(load(POLICY, profiles), profiles, tmp_path, {})
    asked = Counter[str]()
    for call in fatigue.calls():
        if await _asks(desk, roles, call):
            asked["dangerous" if call.dangerous else call.workflow or "ordinary"] += 1
    assert asked == {"dangerous": DANGEROUS, "release": RELEASED}
    found = [each.dangerous for each in fatigue.calls()]
    assert (found.count(False), found.count(True)) == (ORDINARY, DANGEROUS)


async def _asks(desk: Desk, roles: Roles, seeded: Seeded) -> bool:
    """Whether a call asks, which is then answered; an ordinary one is let through by its yes."""
    tool = TOOLS[seeded.tool]
    principal = Principal(id="token:analyst", transport="http", workflow=seeded.workflow)
    arguments = validate_arguments(tool, seeded.arguments)
    call = ToolCall(
        id=new_call_id(), principal=principal, session=None, tool=tool.name, arguments=arguments,
        received=datetime.now(UTC), run=seeded.run,
    )  # fmt: skip
    rights = roles(principal)
    proposal = Attempt(request=call, rights=rights, decision=_decided(call, rights))
    lift_denial(proposal, tool, partial(_decided, call))
    assert proposal.decision.effect != "deny", proposal.decision
    proposal.profile = proposal.rights.profiles[tool.name]
    found = await desk.approvals.consult(proposal, None)
    if not isinstance(found, Question):
        assert found.effect == "allow"
        return False
    assert await desk.answer(found, allow=not seeded.dangerous) == ("denied" if seeded.dangerous else "allowed")
    assert (await desk.decided(proposal)).effect == ("deny" if seeded.dangerous else "allow")
    return True


def _decided(call: ToolCall, rights: Rights) -> Decision:
    objection = rights.refusal(call.tool)
    return decide(TOOLS[call.tool], call.arguments, rights.profiles.get(call.tool), objection=objection)
