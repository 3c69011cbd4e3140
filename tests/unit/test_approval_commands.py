"""``glovebox approvals``: answering out of band; and denials that policy may lift, where no sandbox is needed."""

import json
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner, Result
from tests.fixtures.approving import ASKING, Desk, HostClock, a_desk, admit, again, but, proposal

from glovebox_audit.verify import verify
from glovebox_profiles.egress.targets import parse_url
from glovebox_profiles.model import FileRules, Network, Profile
from glovebox_profiles.policy.model import Approval, Budget, Lift
from glovebox_sandboxes.contract.errors import Refusal
from glovebox_server.calls import Decision
from glovebox_server.cli.main import main
from glovebox_server.cli.rules import approvals as commands
from glovebox_server.core.call import Attempt, CallDeniedError
from glovebox_server.errors import StoreError
from glovebox_server.exits import OK, REFUSED, UNAVAILABLE, USAGE
from glovebox_server.guards.approvals import rules as governing
from glovebox_server.guards.approvals import store
from glovebox_server.guards.approvals.question import Question, RequiredApproval
from glovebox_server.guards.approvals.rules import Escalation
from glovebox_server.guards.approvals.shown import shown
from glovebox_server.guards.approvals.store import TRANSITIONS
from glovebox_server.guards.budgets import budgets as budgeting

QUIET = ASKING.model_copy(update={"approval": "none"})
LIFTED = Escalation(what="host", target="https://example.org:443", lift=Lift(what="host"))
ME = f"local:{os.getuid()}"


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with a_desk(tmp_path / "s", HostClock()) as found:
        yield found


def _run(desk: Desk, *words: str) -> Result:
    return CliRunner().invoke(main, ["approvals", *words, "--state-dir", str(desk.state)])


def _json(desk: Desk, *words: str) -> dict[str, Any]:
    result = _run(desk, *words, "--json")
    assert result.exit_code == OK, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


async def test_a_question_is_listed_shown_and_allowed(desk: Desk) -> None:
    """Its beginning names it; the call passes, the log is whole, and a second answer is refused on record."""
    made = proposal("print('\u202e')")
    question = await desk.asked(made)
    listed = _run(desk, "list")
    assert question.id in listed.output
    assert "pending" in listed.output
    shown = _run(desk, "show", question.id[:10])
    assert "⟪U+202E⟫" in shown.output
    assert "\u202e" not in shown.output
    assert _json(desk, "show", question.id)["arguments"] == {"code": "print('\u202e')"}
    assert _json(desk, "allow", question.id)["state"] == "allowed"
    assert (await desk.decided(again(made))).approval == question.id
    assert f"; {ME} said yes." in _run(desk, "show", question.id).output
    late = _run(desk, "allow", question.id)
    assert late.exit_code == REFUSED
    assert desk.kinds()[-1] == "approval.refused"
    answered = next(each for each in desk.records() if each.kind == "approval.answered")
    assert (answered.data["answered_by"], answered.data["channel"]) == (ME, "operator")
    assert verify(desk.state / "audit").ok


async def test_a_no_and_its_reason_are_said_and_hold(desk: Desk) -> None:
    """Without what a terminal or a line would obey; on record. One that is too long is not cut, and answers nothing."""
    made = proposal("print(2)")
    question = await desk.asked(made)
    assert _json(desk, "deny", question.id)["state"] == "denied"
    refused = await desk.decided(again(made))
    assert refused.rule == "approval.denied"
    assert ME in refused.reason
    made = proposal()
    question = await desk.asked(made)
    assert _run(desk, "deny", question.id, "--reason", "x" * 501).exit_code == USAGE
    assert _json(desk, "list")["approvals"][0]["state"] == "pending"
    assert _run(desk, "deny", question.id, "--reason", " Use the copy.\nIt was\x1b[2J allowed.\u202e").exit_code == OK
    said = "Use the copy.\\nIt was\\x1b[2J allowed.\\u202e"
    refused = await desk.decided(again(made))
    assert refused.reason.endswith(f"It was not allowed: {ME} said no: {said}.")
    *_, answered = (record for record in desk.records() if record.kind == "approval.answered")
    assert answered.data["reason"] == said
    assert f"{ME} said no: {said}" in _run(desk, "show", question.id).output


async def test_an_operator_sees_the_folder_and_no_client_does(desk: Desk, tmp_path: Path) -> None:
    """One that the call could read, and one that it would change; the control is a call that has neither."""
    place = tmp_path / "named-nowhere-else"
    place.mkdir()
    reads = proposal("1", profile=ASKING.model_copy(update={"files": FileRules(workspace="read")}), workspace=place)
    puts = but(proposal("2", profile=QUIET), changes="1 file would change:", folder=str(place))
    for made in (reads, puts):
        question = await desk.asked(made)
        assert f"which clients are not shown: {place}" in _run(desk, "show", question.id).output
        assert _json(desk, "show", question.id)["folder"] == str(place)
        waits = await desk.decided(again(made), settled="pending")
        for seen in (shown(question), str(waits), *map(str, desk.records())):
            assert place.name not in seen
    question = await desk.asked(proposal("3"))
    assert "Folder" not in _run(desk, "show", question.id).output


async def test_a_no_after_a_yes_takes_it_back_and_says_so(desk: Desk) -> None:
    """A grant as any other. The control is a no before any yes."""
    made = but(proposal(profile=QUIET), escalation=LIFTED)
    question = await desk.asked(made)
    assert _run(desk, "allow", question.id).exit_code == OK
    told = _run(desk, "deny", question.id).output
    assert told == f"{question.id} is denied: the approval is withdrawn, and no call has used it.\n"
    assert [each.kind for each in desk.records()[-2:]] == ["approval.answered", "grant.revoked"]
    assert (await desk.decided(again(made))).rule == "approval.denied"
    other = await desk.asked(proposal("print(2)"))
    assert _run(desk, "deny", other.id).output == f"{other.id} is denied.\n"
    assert "grant.revoked" not in desk.kinds()[-1:]


async def test_a_no_to_a_yes_for_the_run_names_the_call_that_used_it(desk: Desk) -> None:
    """So that whoever says it knows what may still run."""
    made = proposal(profile=QUIET, rules=(Approval(name="programs", reach="run"),))
    question = await desk.asked(made)
    assert _run(desk, "allow", question.id, "--run").exit_code == OK
    ran = again(made)
    assert (await desk.decided(ran)).effect == "allow"
    assert ran.request.id in _run(desk, "deny", question.id).output


async def test_an_answer_by_the_callers_own_user_is_the_callers_own(desk: Desk) -> None:
    """Where another principal is wanted it does not count, and the question stays open."""
    rules = (Approval(name="four-eyes", another_principal=True),)
    question = await desk.asked(proposal(profile=QUIET, rules=rules, principal=ME))
    result = _run(desk, "allow", question.id, "--json")
    assert result.exit_code == REFUSED
    assert json.loads(result.stdout)["refused"]["rule"] == "approval.own"
    assert _json(desk, "list")["approvals"][0]["state"] == "pending"


async def test_grants_are_listed_revoked_and_shown_as_a_rule(desk: Desk) -> None:
    """``--rule`` answers nothing, and only a lifted denial has one; after ``revoke`` nothing is granted."""
    question = await desk.asked(but(proposal(profile=QUIET), escalation=LIFTED))
    rule = _run(desk, "allow", question.id, "--rule")
    assert '+  { host = "example.org", ports = [443] },' in rule.output
    assert "then restart the server." in rule.output
    assert _json(desk, "grants") == {"grants": []}
    assert _json(desk, "allow", question.id, "--run")["reach"] == "run"
    (grant,) = _json(desk, "grants")["grants"]
    assert grant["lifts"] == {"what": "host", "target": "https://example.org:443"}
    assert [each.kind for each in desk.records()[-2:]] == ["approval.answered", "grant.made"]
    _json(desk, "revoke", question.id)
    last = desk.records()[-1]
    assert (last.kind, last.data["lifted"], last.data["target"]) == ("grant.revoked", "host", LIFTED.target)
    assert _json(desk, "grants") == {"grants": []}
    question = await desk.asked(proposal())
    result = _run(desk, "allow", question.id, "--rule")
    assert result.exit_code == REFUSED
    assert "approval.ask" in result.output


async def test_a_name_that_means_no_question_or_two_is_refused(desk: Desk) -> None:
    """Nobody says yes to something else by a slip."""
    await desk.asked(proposal("print(1)"))
    await desk.asked(proposal("print(2)"))
    for wanted in ("a_", "a_01", "a_zzzzzzzzzz"):
        assert _run(desk, "allow", wanted).exit_code == REFUSED
    assert {each["state"] for each in _json(desk, "list")["approvals"]} == {"pending"}


async def test_watch_tells_each_question_once_as_it_comes(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = [await desk.asked(proposal(f"print({number})")) for number in range(2)]
    looks = iter((True, False))

    def sleep(_seconds: float) -> None:
        if not next(looks):
            raise SystemExit(OK)

    monkeypatch.setattr(commands, "time", SimpleNamespace(sleep=sleep))
    result = _run(desk, "watch", "--json")
    assert [json.loads(line)["id"] for line in result.stdout.splitlines()] == [first.id, second.id]


def test_where_nobody_ever_asked_nothing_is_made(tmp_path: Path) -> None:
    """Listing is no reason for a store."""
    tmp_path.chmod(0o700)
    result = CliRunner().invoke(main, ["approvals", "list", "--state-dir", str(tmp_path)])
    assert (result.exit_code, result.output) == (OK, "No call waits for approval.\n")
    assert not store.path(tmp_path).exists()


async def test_a_damaged_store_refuses_calls_and_commands_and_stays_as_it_is(tmp_path: Path) -> None:
    """A yes that cannot be read is no yes; nothing is made anew."""
    state = tmp_path / "s"
    async with a_desk(state) as desk:
        made = proposal()
        await desk.answer(await desk.asked(made))
    for each in store.path(state).parent.glob("*.sqlite*"):
        each.write_bytes(b"\xff" * 8192)
    with pytest.raises(StoreError):
        async with a_desk(state) as desk:
            await desk.decided(again(made))
    result = CliRunner().invoke(main, ["approvals", "list", "--state-dir", str(state)])
    assert result.exit_code == UNAVAILABLE
    assert store.path(state).read_bytes() == b"\xff" * 8192


async def test_a_question_of_another_version_is_not_guessed_at(tmp_path: Path) -> None:
    """What cannot be read whole is no yes, and refuses its call no longer than its time."""
    state = tmp_path / "s"
    async with a_desk(state) as desk:
        made = proposal()
        await desk.answer(await desk.asked(made))
        with closing(sqlite3.connect(store.path(state))) as db, db:
            db.execute("UPDATE questions SET body = json_remove(body, '$.subject.principal')")
        db.close()
        with pytest.raises(StoreError) as caught:
            await desk.decided(again(made))
        fix = "Use the version of Glovebox that wrote it, or stop the servers and move the file away."
        told = ("Reading a question in approvals.sqlite", "it is none of this version's", fix)
        assert (caught.value.what, caught.value.reason, caught.value.fix) == told
        desk.clock.pass_(601)
        assert await desk.asked(again(made))


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
    assert "run_python would be refused: the budget calls " in question.why
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
    """It has ended: nobody at the client is asked any more."""
    profile, target = _networked({"host": "a.org"}), parse_url("GET", "https://b.org/")
    made = proposal(profile=profile)
    for by, number in (("operator", 1), ("either", 1), ("client", 0)):
        lift = Lift.model_validate({"what": "host", "by": by})
        assert len(governing.unnamed([target], profile, replace(made.rights, lifts=(lift,)))) == number
    assert governing.unnamed([target], profile, made.rights) == ()


def test_a_rule_form_is_a_diff_that_a_person_makes() -> None:
    profile, policy = "--- fetch_url.toml\n+++ fetch_url.toml\n", "--- policy.toml\n+++ policy.toml\n"
    diffs = {
        ("host", "http://a.org:80"): f"{profile} [network]\n allow = [\n"
        '+  { host = "a.org", schemes = ["http"], ports = [80] },',
        ("tool", "run_python"): f'{policy} [roles.NAME]  # the caller\'s\n tools = [\n+  "run_python",',
        ("budget", "calls"): f'{policy} [[roles.NAME.budget]]\n name = "calls"\n'
        "+# and a larger number, or a longer `every`",
    }
    for (what, target), diff in diffs.items():
        assert "\n".join(governing.permanent(what, target, "fetch_url")) == diff  # type: ignore[arg-type]  # a Literal


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
