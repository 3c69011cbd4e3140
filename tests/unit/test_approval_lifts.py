"""Denials that policy may lift, where no sandbox is needed to see it; hosts are in ``escape/test_lifted_hosts``."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from tests.fixtures.approving import ASKING, Desk, admit, again, but, proposal

from glovebox_profiles.egress.targets import parse_url
from glovebox_profiles.model import Network, Profile
from glovebox_profiles.policy.model import Approval, Budget, Lift
from glovebox_sandboxes.contract.errors import Refusal
from glovebox_server.calls import Decision
from glovebox_server.core.call import Attempt, CallDeniedError
from glovebox_server.guards.approvals import rules as governing
from glovebox_server.guards.approvals.question import Question, RequiredApproval
from glovebox_server.guards.approvals.store import TRANSITIONS
from glovebox_server.guards.budgets import budgets as budgeting

QUIET = ASKING.model_copy(update={"approval": "none"})
SPENT = Budget(name="calls", per="principal", every="hour", calls=1)


class Budgets(budgeting.Budgets):
    """One budget is spent; without it there is room."""

    def __init__(self) -> None:
        self.ran: list[bool] = []

    @asynccontextmanager
    async def reserved(self, now: Attempt, _worst: object = None) -> AsyncIterator[Any]:
        if any(each.name == SPENT.name for each in now.rights.budgets):
            raise CallDeniedError(Refusal(rule="budget.calls", reason="Nothing is left.", hint="Wait."))
        self.ran.append(False)
        yield Mock(granted=())
        self.ran[-1] = True


def _spent(made: Attempt, *, lifts: tuple[Lift, ...] = (Lift(what="budget"),)) -> Attempt:
    return but(made, rights=replace(made.rights, budgets=(SPENT,), lifts=lifts))


async def _admitted(desk: Desk, budgets: Any, made: Attempt) -> Decision | Question:
    return await admit(made, approvals=desk.approvals, budgets=budgets)


async def test_a_spent_budget_becomes_a_question_and_the_yes_lets_one_call_pass(desk: Desk) -> None:
    """The grant is named; without the policy's leave the refusal stays, and nobody is asked."""
    budgets, made = Budgets(), _spent(proposal(profile=QUIET))
    refused = await _admitted(desk, budgets, _spent(made, lifts=()))
    assert isinstance(refused, Decision)
    assert refused.rule == "budget.calls"
    question = await _admitted(desk, budgets, made)
    assert isinstance(question, Question)
    assert (question.subject.lifted, question.subject.target) == ("budget", "calls")
    assert budgets.ran == [False]
    await desk.answer(question)
    passed = await _admitted(desk, budgets, again(made))
    assert isinstance(passed, Decision)
    assert [(each.what, each.target, each.approval) for each in passed.grants] == [("budget", "calls", question.id)]
    assert budgets.ran == [False, True]
    assert isinstance(await _admitted(desk, budgets, again(made)), Question)


async def test_a_grant_that_only_lifts_names_who_made_it(desk: Desk) -> None:
    """Also to another call of the run, which asked nothing; the record of its decision has the name."""
    question = await _admitted(desk, Budgets(), _spent(proposal(profile=QUIET)))
    assert isinstance(question, Question)
    await desk.answer(question, by="local:7", reach="run")
    other = await _admitted(desk, Budgets(), _spent(proposal("print(2)", profile=QUIET)))
    assert isinstance(other, Decision)
    assert (other.rule, other.approval, other.approved_by) == ("lift.budget", None, ("local:7",))


async def test_a_call_that_nothing_is_left_for_uses_no_yes_up(desk: Desk) -> None:
    """Budgets are asked first; the control is the same call once there is room."""
    made = proposal()
    question = await desk.asked(made)
    await desk.answer(question)
    refused = await _admitted(desk, Budgets(), _spent(again(made), lifts=()))
    assert isinstance(refused, Decision)
    assert refused.rule == "budget.calls"
    passed = await _admitted(desk, Budgets(), again(made))
    assert isinstance(passed, Decision)
    assert passed.approval == question.id


async def test_a_lift_and_a_rule_ask_one_question(desk: Desk) -> None:
    """With the strictest demands of both; a yes to the lift alone would not be one to the rule."""
    rules = (Approval(name="programs", by="operator", quorum=2, expires_minutes=5),)
    made = _spent(proposal(profile=QUIET, rules=rules))
    question = await _admitted(desk, Budgets(), made)
    assert isinstance(question, Question)
    assert question.subject.rules == ("lift.budget", "approval.programs")
    asked = question.asked
    assert (asked.by, asked.quorum, asked.reach, asked.minutes) == ("operator", 2, "call", 5)
    await desk.answer(question, by="local:1")
    assert await desk.answer(question, by="local:2") == "allowed"
    passed = await _admitted(desk, Budgets(), again(made))
    assert isinstance(passed, Decision)
    assert (passed.effect, passed.approval) == ("allow", question.id)


@pytest.mark.parametrize(
    ("method", "url", "lifted"),
    [
        ("GET", "https://example.org/a", True),
        ("HEAD", "http://example.org/a", True),
        ("GET", "https://93.184.216.34/", True),
        ("POST", "https://example.org/a", False),
        ("GET", "https://docs.example.com/closed", False),
        ("GET", "https://docs.example.com:444/open/a", False),
        ("GET", "http://127.0.0.1/", False),
        ("GET", "http://10.0.0.1/", False),
        ("GET", "http://169.254.169.254/latest/meta-data", False),
        ("GET", "http://[::1]/", False),
    ],
)
def test_only_a_public_host_that_no_rule_names_may_be_lifted(method: str, url: str, *, lifted: bool) -> None:
    """Not a method, a path or a port of a host that is named, and no address that is not public."""
    profile = _networked({"host": "docs.example.com", "paths": ["/open/*"]})
    assert (governing.liftable_host(method, url, profile) is not None) is lifted


def test_a_grant_of_a_host_adds_one_rule_for_it() -> None:
    """That scheme, host and port, to read; an address of six groups too."""
    target = governing.host_of(parse_url("GET", "https://[2a00:1450:4001::1]:8443/a"))
    rule = governing.rule_for(target)
    assert rule.host == "2a00:1450:4001::1"
    assert rule.ports == {8443}
    assert rule.schemes == {"https"}
    assert rule.methods == {"GET", "HEAD"}
    wider = governing.with_host(_networked({"host": "a.org"}), target)
    assert [each.host for each in wider.network.allow] == ["a.org", "2a00:1450:4001::1"]


def test_hosts_of_a_program_are_asked_about_by_operators_alone() -> None:
    profile, target = _networked({"host": "a.org"}), parse_url("GET", "https://b.org/")
    made = proposal(profile=profile)
    for by, number in (("operator", 1), ("either", 1), ("client", 0)):
        lift = Lift.model_validate({"what": "host", "by": by})
        assert len(governing.unnamed([target], profile, replace(made.rights, lifts=(lift,)))) == number
    assert governing.unnamed([target], profile, made.rights) == ()


def test_a_rule_form_is_a_diff_that_a_person_makes() -> None:
    assert governing.permanent("host", "http://a.org:80", "fetch_url")[-1] == (
        '+  { host = "a.org", schemes = ["http"], ports = [80] },'
    )
    assert governing.permanent("tool", "run_python", "run_python")[0] == "--- policy.toml"
    assert any('name = "calls"' in line for line in governing.permanent("budget", "calls", "run_python"))


def test_what_is_over_stays_over() -> None:
    for state, _ in TRANSITIONS:
        assert state not in ("used", "expired", "withdrawn")
    assert ("denied", "allow") not in TRANSITIONS


def test_demands_together_are_no_weaker_than_each() -> None:
    """Who must answer, how many, how far, how long; at the client nobody can give another principal's yes."""
    both = governing.together(
        [
            RequiredApproval(by="client", minutes=5, reach="run"),
            RequiredApproval(another_principal=True, quorum=2, minutes=10),
        ]
    )
    assert both == RequiredApproval(by="operator", quorum=2, another_principal=True, reach="call", minutes=5)
    assert governing.together([RequiredApproval(by="client"), RequiredApproval()]).by == "client"


def _networked(rule: dict[str, Any]) -> Profile:
    network = Network.model_validate({"mode": "egress", "allow": (rule,)})
    return QUIET.model_copy(update={"network": network})
