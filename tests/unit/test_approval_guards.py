"""Guards of approvals and lifts one by one: each of these tests fails without its guard alone."""

import hashlib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest
import rfc8785
from tests.fixtures.approving import ASKING, Desk, Person, a_desk, admit, again, but, proposal

from glovebox_audit.receipts.parts import Input
from glovebox_profiles.compile import ProfileSet
from glovebox_profiles.egress.targets import parse_url
from glovebox_profiles.model import CallLimits, Network, Profile, digest, effective
from glovebox_profiles.policy.model import Approval, Budget, Lift
from glovebox_sandboxes.contract.errors import Refusal, RefusedError
from glovebox_server.calls import CallResult, Decision, Grant
from glovebox_server.core.call import ApprovalRequiredError, Attempt, CallDeniedError
from glovebox_server.core.rights import Rights
from glovebox_server.guards.approvals import approvals as module
from glovebox_server.guards.approvals import rules as governing
from glovebox_server.guards.approvals import store
from glovebox_server.guards.approvals.question import Question, QuestionSubject, RequiredApproval, digest_of
from glovebox_server.guards.approvals.rules import Asking, Escalation
from glovebox_server.tools import TOOLS

QUIET = ASKING.model_copy(update={"approval": "none", "limits": CallLimits(wall_seconds=60)})
READING = QUIET.model_copy(update={"files": QUIET.files.model_copy(update={"workspace": "read"})})
SPENT = governing.Escalation(what="budget", target="calls", lift=Lift(what="budget"))
HOST = governing.Escalation(what="host", target="https://a.org:443", lift=Lift(what="host"))
ONLINE = QUIET.model_copy(
    update={"network": Network.model_validate({"mode": "egress", "allow": ({"host": "b.org", "ports": (80, 443)},)})}
)


async def _granted(desk: Desk, made: Attempt, escalation: governing.Escalation, reach: str = "run") -> Question:
    if escalation.what == "host":  # asked about once the program has run
        refused = parse_url("GET", f"{escalation.target}/")
        made = but(made, rights=replace(made.rights, lifts=(escalation.lift,)), refused_targets=[refused])
        (line,) = await desk.approvals.ask_about_hosts(made)
        standing = await desk.approvals.standing(line.split()[1])
        assert standing is not None
        question = standing.question
    else:
        question = await desk.asked(but(made, escalation=escalation))
    assert await desk.answer(question, reach=reach) == "allowed"
    return question


def _lifting(made: Attempt) -> Attempt:
    return but(made, rights=replace(made.rights, lifts=(Lift(what="host"), Lift(what="budget"))))


async def test_a_grant_is_no_yes_to_a_rule(desk: Desk) -> None:
    """What it lifts is lifted, and the rule asks all the same; the control is a call that the rule lets pass."""
    rules = (Approval(name="long", when="longer_than", seconds=5),)
    short = proposal(profile=QUIET, rules=rules, timeout_seconds=5)
    grant = await _granted(desk, short, SPENT)
    passed = await desk.decided(but(again(short), escalation=SPENT))
    assert (passed.effect, passed.rule) == ("allow", "lift.budget")
    long = but(proposal(profile=QUIET, rules=rules, timeout_seconds=6), escalation=SPENT)
    changing = await desk.asked(but(again(short), escalation=SPENT, changes="a.txt"))
    assert (changing.subject.rules, changing.subject.lifted) == (("approval.changes",), None)
    question = await desk.asked(long)
    assert (question.subject.rules, question.subject.lifted) == (("approval.long",), None)
    await desk.answer(question)
    ran = await desk.decided(again(long))
    assert (ran.approval, [each.approval for each in ran.grants]) == (question.id, [grant.id])


@pytest.mark.parametrize(
    "other",
    [
        {"principal": "local:1"},
        {"run": "r_2"},
        {"policy": "sha256:b"},
        {"profile": READING.model_copy(update={"risk": "medium"})},
        {"workspace": Path("/")},
        {"environment": "sha256:others"},
    ],
)
async def test_a_grant_for_the_run_is_bound_to_all_but_its_call(
    other: dict[str, Any], desk: Desk, tmp_path: Path
) -> None:
    """Whatever else differs, it is asked about anew; the control is another program, which the grant is good for."""
    own: dict[str, Any] = {"policy": "sha256:a", "profile": READING, "workspace": tmp_path}
    grant = await _granted(desk, proposal(**own), SPENT)
    changed = {**own, **other}
    desk.environment[0] = changed.pop("environment", "sha256:packages")
    assert isinstance(await desk.approvals.consult(but(proposal(**changed), escalation=SPENT), None), Question)
    desk.environment[0] = "sha256:packages"
    given = (Input(name="a", uri="artifact://1", sha256="1" * 64, bytes=1),)
    passed = await desk.decided(but(proposal("print(2)", inputs=given, **own), escalation=SPENT))
    assert [each.approval for each in passed.grants] == [grant.id]


async def test_a_grant_for_one_call_is_bound_to_it_and_used_up(desk: Desk) -> None:
    """Not for another program, nor other inputs; the control is the call itself, once."""
    given = (Input(name="a", uri="artifact://1", sha256="1" * 64, bytes=1),)
    made = _lifting(proposal(profile=ONLINE))
    grant = await _granted(desk, made, HOST, "call")
    for other in (proposal("print(2)", profile=ONLINE), proposal(profile=ONLINE, inputs=given)):
        assert (await desk.decided(_lifting(other))).grants == ()
    assert [each.approval for each in (await desk.decided(again(made))).grants] == [grant.id]
    assert (await desk.decided(again(made))).grants == ()


async def test_a_program_uses_grants_of_hosts_alone_and_only_with_a_network(desk: Desk) -> None:
    made = _lifting(proposal(profile=ONLINE))
    host = await _granted(desk, made, HOST)
    await _granted(desk, made, SPENT)
    grants = (Grant(approval=host.id, what="host", target=HOST.target),)
    passed = replace(made.decision, effect="allow", grants=grants, approved_by=("local:0",))
    assert await desk.decided(again(made)) == passed
    offline = _lifting(proposal(profile=QUIET))
    await _granted(desk, offline, HOST)
    assert (await desk.decided(again(offline))).grants == ()


async def test_a_granted_host_is_added_to_the_profile_of_a_call_once(desk: Desk) -> None:
    """To what an approver is shown, and to what it runs with; not if its turn has it already.

    Hosts that are refused while it runs are named in its result.
    """
    made = _lifting(proposal(profile=ONLINE))
    grant = await _granted(desk, made, HOST)
    for number, (escalation, hosts) in enumerate(((None, ["b.org", "a.org"]), (HOST, ["b.org"]))):
        asking = _lifting(proposal(f"print({number})", profile=ONLINE, rules=(Approval(name="programs"),)))
        question = await desk.asked(but(asking, escalation=escalation))
        now = but(_lifting(proposal("print(3)", profile=ONLINE)), escalation=escalation)
        await desk.approvals.spend(None, cast("Any", call := SimpleNamespace(now=now, answer=None)))
        assert [each.approval for each in now.decision.grants] == [grant.id]
        for profile in (Profile.model_validate_json(question.profile), now.profile):
            assert [each.host for each in profile.network.allow] == hosts
    (add_questions,) = now.on_result
    ran = CallResult(structured={"notes": ["A note."]}, content=(), failed=False, meta={})
    assert await add_questions(ran) is ran
    call.now.refused_targets = [parse_url("GET", "https://c.org/")]
    note, told = (await add_questions(ran)).structured["notes"]
    standing = await desk.approvals.standing(told.split()[1])
    assert standing is not None
    asks = f"Question {standing.question.id} asks whether it may reach https://c.org:443"
    assert (note, told) == ("A note.", f"{asks}: call again once that is allowed.")
    lacks = "it wants to reach https://c.org:443, which no rule of its profile names"
    assert standing.question.why == f"A call of run_python would be refused: {lacks}."
    assert standing.question.profile == rfc8785.dumps(effective(now.profile)).decode()


async def test_a_question_is_counted_whatever_stops_its_call_and_has_its_listener(desk: Desk) -> None:
    """A cancellation that comes meanwhile waits; the control is what the call is decided once it has waited."""
    made = proposal()
    call = SimpleNamespace(now=made, request=made.request, answer=None, listener=Person())
    counted: list[object] = []
    scope = anyio.CancelScope()

    async def count(request: object) -> None:
        scope.cancel()
        await anyio.lowlevel.checkpoint()
        counted.append(request)

    with scope, pytest.raises(ApprovalRequiredError) as caught:
        await desk.approvals.spend(count, cast("Any", call))
    assert counted == [made.request]
    wait = cast("Any", caught.value.wait)
    question = await desk.asked(again(made))
    assert (wait.func, wait.args) == (desk.approvals.settle, (question, call.listener))
    call.answer = "pending"
    await desk.approvals.spend(None, cast("Any", call))
    assert made.decision.rule == "approval.pending"
    await desk.answer(question, allow=False)
    with pytest.raises(CallDeniedError):
        await desk.approvals.spend(None, cast("Any", call))
    assert made.decision.rule == "approval.denied"


async def test_a_grant_of_one_thing_lifts_no_other(desk: Desk) -> None:
    """Another budget is another question; the control is the one that was granted."""
    made = proposal(profile=QUIET)
    grant = await _granted(desk, made, SPENT)
    seconds = replace(SPENT, target="seconds")
    other = await desk.asked(but(again(made), escalation=seconds))
    await desk.answer(other)
    passed = await desk.decided(but(again(made), escalation=SPENT))
    assert [each.approval for each in passed.grants] == [grant.id]
    assert (await desk.decided(but(again(made), escalation=seconds))).approval == other.id


async def test_a_program_is_lifted_by_the_grant_for_what_it_lacks_alone(desk: Desk) -> None:
    """Its run may spend more of two budgets; each call names the one that was spent."""
    made, seconds = proposal(profile=QUIET), replace(SPENT, target="seconds")
    grants = {each.target: await _granted(desk, made, each) for each in (SPENT, seconds)}
    for wanted in (SPENT, seconds):
        passed = await desk.decided(but(proposal("print(2)", profile=QUIET), escalation=wanted))
        assert [(each.target, each.approval) for each in passed.grants] == [(wanted.target, grants[wanted.target].id)]


async def test_a_call_that_nobody_can_look_up_is_refused_with_the_fix(desk: Desk, tmp_path: Path) -> None:
    """The store of approvals is damaged while a server runs; the control is the same call before."""
    made = proposal()
    assert isinstance(await admit(made, approvals=desk.approvals), Question)
    kept = next((tmp_path / "s").rglob("approvals.sqlite"))
    kept.unlink()
    verdict = await admit(again(made), approvals=desk.approvals)
    assert isinstance(verdict, Decision)
    assert (verdict.effect, verdict.rule) == ("deny", "store")
    assert "operator" in verdict.hint


async def test_answers_that_were_refused_long_ago_make_room_for_others_on_record(desk: Desk) -> None:
    """The bound is for an hour. Ids are compared whole, and a forged one is not recorded."""
    question = await desk.asked(proposal())
    forged = (question.id[:-1], question.id + "0", question.id.upper(), f"{question.id}\x00", "a_forged\x1b[2J")
    for passed, more in ((0, module.MAX_REFUSED), (3599, 0), (1, 1)):
        desk.clock.pass_(passed)
        before = desk.kinds().count("approval.refused")
        for number in range(max(1, more)):
            with pytest.raises(RefusedError) as caught:
                await desk.answer(replace(question, id=forged[number % 5]))
            assert caught.value.rule == "approval.unknown"
        assert desk.kinds().count("approval.refused") - before == more
    assert "forged" not in str(desk.records())


async def test_a_question_that_is_over_is_taken_back_by_nobody(desk: Desk) -> None:
    """Though nothing has looked at the store since; the control is one second earlier."""
    first, second = await desk.asked(proposal("1")), await desk.asked(proposal("2"))
    desk.clock.pass_(599)
    await desk.approvals.withdraw(first.id, "local:0")
    desk.clock.pass_(2)
    with pytest.raises(RefusedError) as caught:
        await desk.approvals.withdraw(second.id, "local:0")
    assert caught.value.rule == "approval.over"


async def test_a_yes_of_several_goes_as_far_as_the_least_of_them(desk: Desk) -> None:
    """One who said yes to the call alone said none to the run; the control is that both said so."""
    rules = (Approval(name="two", quorum=2, reach="run"),)
    for code, reaches, second in (("1", ("run", "call"), "ask"), ("2", ("run", "run"), "allow")):
        made = proposal(code, profile=QUIET, rules=rules)
        question = await desk.asked(made)
        for number, reach in enumerate(reaches):
            await desk.answer(question, by=f"local:{number}", reach=reach)
        assert (await desk.decided(again(made))).effect == "allow"
        found = await desk.approvals.consult(again(made), None)
        assert (found.effect if isinstance(found, Decision) else "ask") == second


async def test_whoever_may_not_say_yes_may_say_no(desk: Desk) -> None:
    """The caller's own no counts where another principal is wanted."""
    rules = (Approval(name="four-eyes", another_principal=True),)
    question = await desk.asked(proposal(profile=QUIET, rules=rules))
    assert await desk.answer(question, by="local:1000", allow=False) == "denied"


@pytest.mark.parametrize("how", ["answered", "by another call"])
async def test_a_question_is_abandoned_by_its_own_call_alone(how: str, desk: Desk) -> None:
    """And not once somebody has answered; the control is the same without either."""
    rules = (Approval(name="two", quorum=2),)
    question = await desk.asked(proposal(profile=QUIET, rules=rules))
    if how == "answered":
        await desk.answer(question)
    with store.opened(desk.state) as database:
        gone = replace(question, asked_by="c_other") if how == "by another call" else question
        database.transact_now(lambda db: store.Questions(db, desk.clock(), print).abandon(gone))
    control = await desk.asked(proposal("2", profile=QUIET, rules=rules))
    with store.opened(desk.state) as database:
        database.transact_now(lambda db: store.Questions(db, desk.clock(), print).abandon(control))
        left = database.query_now(lambda db: store.Questions(db, desk.clock()).standings())
    assert {each.question.id: each.state for each in left} == {question.id: "pending", control.id: "withdrawn"}


def _why(rule: Approval, profile: Profile = QUIET, **arguments: Any) -> str | None:
    made = proposal(profile=profile, rules=(rule,))
    found = governing.asked_about(but(made, request=replace(made.request, arguments=arguments)))
    return found.why if found else None


def test_rules_are_about_what_may_leave_and_may_be_taken_and_their_tool() -> None:
    """Artifacts leave only over a network; a call without a time takes its profile's; a quorum goes to operators."""
    leaves = Approval(name="a", when="leaves")
    assert _why(leaves, inputs=["artifact://1"]) is None
    assert "send 1 artifact of" in str(_why(leaves, ONLINE, inputs=["artifact://1"]))
    assert _why(leaves, ONLINE) is None
    assert _why(Approval(name="a", when="longer_than", seconds=60)) is None
    assert "60 seconds, which is more than 59" in str(_why(Approval(name="a", when="longer_than", seconds=59)))
    assert _why(Approval(name="a", tool="fetch_url")) is None
    assert _why(Approval(name="a")) is not None
    long = Approval(name="a", when="longer_than", seconds=5)
    assert _why(long, timeout_seconds=5) is None
    assert _why(long, timeout_seconds=5.1) is not None
    assert governing.together([RequiredApproval(by="client"), RequiredApproval(quorum=2)]).by == "operator"
    assert governing.together([RequiredApproval(quorum=2)]).by == "either"


def test_all_that_asks_about_a_call_is_one_question() -> None:
    """A profile, a watch rule, the policy and a lift: their ids, their reasons, and the strictest of their demands."""
    made = proposal(rules=(Approval(name="long", when="longer_than", seconds=5, by="client"),), timeout_seconds=6)
    made.decision = replace(made.decision, rule="watch.denials")
    asks = Asking(
        rules=("approval.ask", "approval.watch", "approval.long"),
        why="A call of run_python is asked about: every one is; it may take 6 seconds, which is more than 5.",
        asked=RequiredApproval(by="operator"),
    )
    assert governing.asked_about(made) == asks
    why = "A call of run_python would be refused: the budget calls is spent."
    alone = RequiredApproval(by="operator", reach="run", minutes=60)
    lifts = Asking(rules=("lift.budget",), why=why, lifted=SPENT, asked=alone)
    assert governing.with_lift(SPENT, "run_python") == lifts
    assert governing.with_lift(SPENT, "run_python", asks) == Asking(
        rules=("lift.budget", *asks.rules), why=f"{why} {asks.why}", lifted=SPENT, asked=RequiredApproval(by="operator")
    )


def _rights(profile: Profile, *lifts: Lift) -> Rights:
    return Rights(profiles=ProfileSet({"run_python": profile}, {}), workspace=None, lifts=lifts, role="a")


def _denial(rule: str, profile_digest: str = "sha256:disk") -> Decision:
    return Decision(effect="deny", rule=rule, reason="", hint="", profile_digest=profile_digest)


@pytest.mark.parametrize("disk", ["sha256:disk", ""])
@pytest.mark.parametrize(("then", "lifted"), [("allow", True), ("ask", True), ("deny", False)])
def test_what_would_be_refused_all_the_same_is_no_question(then: Any, disk: str, *, lifted: bool) -> None:
    """A person is asked about what their yes would let run; the record names the profile that is on disk."""
    given: dict[str, Any] = {"lifts": (Lift(what="tool"),), "beyond": {"run_python": QUIET}}
    outside = Rights(profiles=ProfileSet({}, {}), workspace=None, role="a", **given)

    def decide(rights: Rights) -> Decision:
        if "run_python" not in rights.profiles:
            return _denial("role.tools", disk)
        return replace(_denial("limits.wall_seconds", digest(QUIET)), effect=then)

    now = Attempt(request=proposal().request, rights=outside, decision=decide(outside))
    governing.lift_denial(now, TOOLS["run_python"], decide)
    assert (now.escalation is not None) == lifted
    assert ("run_python" in now.rights.profiles) == lifted
    asks = replace(_denial("limits.wall_seconds", disk or digest(QUIET)), effect="ask")
    assert now.decision == (asks if lifted else decide(outside))
    now.rights, now.escalation, now.decision = outside, None, replace(decide(outside), effect="allow")
    governing.lift_denial(now, TOOLS["run_python"], decide)
    assert now.escalation is None


@pytest.mark.parametrize("rule", ["stop.run", "policy.role", "limits.wall_seconds", "repeats", "network.mode"])
def test_no_other_denial_is_lifted(rule: str) -> None:
    """Whatever the policy lifts; the controls are those three."""
    every = (Lift(what="tool"), Lift(what="host"), Lift(what="budget"))
    url = {"url": "https://a.org/", "method": "GET"}
    fetch = replace(proposal().request, tool="fetch_url", arguments=url)
    rights = replace(
        _rights(ONLINE, *every),
        beyond={"run_python": QUIET, "fetch_url": QUIET},
        profiles=ProfileSet({"fetch_url": ONLINE}, {}),
    )
    run, get = TOOLS["run_python"], TOOLS["fetch_url"]
    assert governing.escalation(proposal().request, run, rights, rule) is None
    assert governing.escalation(fetch, get, rights, rule) is None
    found = (
        governing.escalation(proposal().request, run, rights, "role.tools"),
        governing.escalation(fetch, get, rights, "network.allow"),
        governing.escalation(fetch, get, rights, "budget.calls"),
    )
    targets = ("run_python", "https://a.org:443", "calls")
    lifted = zip(every, targets, strict=True)
    assert found == tuple(Escalation(what=lift.what, target=target, lift=lift) for lift, target in lifted)
    closed = replace(fetch, arguments={**url, "url": "https://10.0.0.1/"})
    assert governing.escalation(closed, get, rights, "network.allow") is None
    now = Attempt(request=fetch, rights=rights, decision=_denial("network.allow"))
    governing.lift_denial(now, get, lambda wider: replace(_denial(wider.profiles["fetch_url"].tool), effect="allow"))
    assert now.escalation == found[1]
    assert [each.host for each in now.rights.profiles["fetch_url"].network.allow] == ["b.org", "a.org"]
    without = replace(rights, lifts=())
    rules = ("role.tools", "network.allow", "budget.calls")
    assert not any(governing.escalation(fetch, get, without, each) for each in rules)


def test_a_call_is_lifted_for_one_reason_at_a_time() -> None:
    """One that needs two lifts is refused; the control is the same budget where nothing was lifted yet."""
    refusal = Refusal(rule="budget.calls", reason="", hint="")
    for before, lifted in ((None, True), (HOST, False)):
        made = but(proposal(), escalation=before, rights=_rights(QUIET, Lift(what="budget")))
        call = cast("Any", SimpleNamespace(now=made, request=made.request, tool=TOOLS["run_python"]))
        assert governing.lift_budget(call, refusal) is lifted
        assert made.escalation == (SPENT if lifted else HOST)


def test_one_budget_is_lifted_and_no_other_and_no_host_that_a_rule_names() -> None:
    """A path that its own rule refuses is no question for a program either."""
    budgets = tuple(Budget(name=name, per="principal", every="hour", calls=1) for name in ("calls", "others"))
    wider = governing.widened(replace(_rights(QUIET), budgets=budgets), "run_python", [SPENT, HOST])
    assert [each.name for each in wider.budgets] == ["others"]
    assert [each.host for each in wider.profiles["run_python"].network.allow] == ["a.org"]
    rights = _rights(ONLINE, Lift(what="budget"), Lift(what="host"))
    reads = ("http://b.org:81/", "https://d.org/", "http://a.org/")
    targets = [parse_url("POST", "https://c.org/"), *(parse_url("GET", url) for url in reads)]
    lift = Lift(what="host")
    hosts = [Escalation(what="host", target=each, lift=lift) for each in ("http://a.org:80", "https://d.org:443")]
    assert list(governing.unnamed(targets, ONLINE, rights)) == hosts


def test_a_caller_is_offered_the_tools_of_its_role_alone() -> None:
    offered: Callable[[Rights], tuple[str, ...]] = lambda rights: rights.offered(["fetch_url", "run_python"])  # noqa: E731
    assert offered(_rights(QUIET)) == ("run_python",)
    assert offered(replace(_rights(QUIET), role=None)) == ("fetch_url", "run_python")
    denied = Refusal(rule="x", reason="", hint="")
    assert offered(replace(_rights(QUIET), profiles=ProfileSet({}, {}), denial=denied)) == ()


async def test_changes_of_files_need_a_yes_whatever_profile_and_policy_say(tmp_path: Path) -> None:
    """Where nobody can be asked they are refused; the control changes nothing, and runs."""
    made = proposal(profile=QUIET)
    for changes, effect, rule in (("", "allow", "approval.ask"), ("a.txt", "deny", "approval.nobody")):
        verdict = await admit(but(made, changes=changes))
        assert isinstance(verdict, Decision)
        assert (verdict.effect, verdict.rule) == (effect, rule)
    async with a_desk(tmp_path) as desk:
        assert isinstance(await desk.approvals.consult(made, None), Decision)
        question = await desk.asked(but(made, changes="a.txt"))
        assert await desk.answer(question) == "allowed"
        other = await desk.approvals.consult(but(again(made), changes="b.txt"), None)
        assert isinstance(other, Question)  # the yes was to other changes
        ran = await desk.approvals.consult(but(again(made), changes="a.txt"), None)
        assert isinstance(ran, Decision)
        assert ran.approval == question.id
        assert isinstance(await desk.approvals.consult(but(again(made), changes="a.txt"), None), Question)


def test_a_yes_to_changes_is_for_one_call() -> None:
    """Whatever else asks about the call. Over HTTP it is an operator's: what is shown holds lines of their files."""
    wide = Approval(name="programs", reach="run")
    made = proposal(profile=QUIET, rules=(wide,))
    control = governing.asked_about(made)
    assert control is not None
    assert control.asked.reach == "run"
    changing = but(made, changes="a.txt")
    for transport, by in (("stdio", "either"), ("cli", "either"), ("http", "operator"), ("sse", "operator")):
        caller = replace(made.request.principal, transport=transport)  # type: ignore[arg-type]  # one of four
        asks = governing.asked_about(but(changing, request=replace(made.request, principal=caller)))
        assert asks is not None
        assert asks.rules == ("approval.changes", "approval.programs")
        assert (asks.asked.reach, asks.asked.by) == ("call", by)


def test_a_digest_is_over_all_that_binds_and_only_a_caller_is_free_of_the_run() -> None:
    """A question about changes has another; the control of the run is the question that is bound to it."""
    made = proposal(profile=QUIET, workspace=Path("/"))
    made = but(made, request=replace(made.request, run=None), inputs=None)
    about = governing.subject(made, None, lambda tool: f"sha256:{tool}")
    assert about == QuestionSubject(
        principal="local:1000", run="", tool="run_python", arguments='{"code":"print(1)"}',
        profile_digest=digest(QUIET), policy_digest="", workspace="", environment="sha256:run_python", rules=(),
    )  # fmt: skip
    gone = governing.subject(proposal(profile=READING, workspace=Path("/gone\udce9")), None, lambda _: "")
    assert gone.workspace == f"unreadable:sha256:{hashlib.sha256(b'/gone' + bytes([0xE9])).hexdigest()}"
    assert about.digest == digest_of(rfc8785.dumps(asdict(about)).decode())
    assert replace(about, changes="a.txt").digest != about.digest
    assert replace(about, run="r_other").digest != about.digest
    free = replace(about, any_run=True)
    assert free.digest == replace(free, run="r_other").digest != about.digest
