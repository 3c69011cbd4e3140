"""A stop, a client or a rule that comes between two guards: nothing runs, nothing changes, nothing is counted twice."""

import gc
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from tests.fixtures.approving import a_desk
from tests.fixtures.artifact_stores import keep
from tests.fixtures.brokered import Heard
from tests.fixtures.channels import Guest, an_outcome
from tests.unit.test_broker import ARGUMENTS, Scene, scene
from tests.unit.test_budgets import budget
from tests.unit.test_scanning import PROPOSES
from tests.unit.test_stops import _Asks, a_call, a_stop, obeying, put
from tests.unit.test_watch import decision, watching

from glovebox_profiles.load.loader import SHIPPED, load
from glovebox_profiles.policy.model import Lift
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_sandboxes.contract.outcome import Outcome
from glovebox_server.app import check_example
from glovebox_server.calls import Principal
from glovebox_server.core.call import Attempt, Call
from glovebox_server.core.rights import Rights
from glovebox_server.guards.admission.admission import Admission
from glovebox_server.guards.approvals.approvals import Approvals
from glovebox_server.guards.budgets import budgets as budgeting
from glovebox_server.guards.watch import watch
from glovebox_server.promotion.proposing import Proposed

__all__ = ["scene"]

ME = Principal(id="local:1", transport="cli")


class Proposals:
    def __init__(self) -> None:
        self.scans = self.puts = 0

    async def proposed(self, *_: object) -> Proposed:
        return Proposed(planned=cast("Any", SimpleNamespace()), shown="changes", folder="/x")

    async def scanned(self, proposed: Proposed, *_: object) -> Proposed:
        self.scans += 1
        return proposed

    async def put(self, *_: object) -> Outcome:
        self.puts += 1
        value = {"promotion": "p_1", "digest": "d", "files": []}
        return an_outcome(value=value)


class Yes(Approvals):
    """Approvals that say yes, in a transaction that nobody interrupts."""

    def __init__(self, meanwhile: Callable[[], Awaitable[object]] = anyio.lowlevel.checkpoint) -> None:
        nothing: Any = None
        super().__init__(nothing, nothing, nothing, nothing, nothing)
        self._meanwhile = meanwhile

    async def consult(self, now: Attempt, _settled: object) -> Any:
        with anyio.CancelScope(shield=True):
            await self._meanwhile()
        return replace(now.decision, effect="allow", rule="approval.ask", approval="a_1", approved_by=("local:0",))


@pytest.fixture(autouse=True)
def state(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


@pytest.fixture
async def proposing(scene: Scene, tmp_path: Path) -> Scene:
    """A scene with a profile that proposes, and a guest that only ends."""
    (tmp_path / "propose_changes.toml").write_text(PROPOSES)
    rights = Rights(profiles=load([SHIPPED, tmp_path], check_example=check_example), workspace=None)

    async def end(guest: Guest) -> None:
        await guest.done()

    scene.driver.script = end
    return scene.guarded(rights_of=lambda _: rights)


async def propose(scene: Scene) -> Any:
    uri = (await keep(scene.broker.artifacts, "a.txt", b"a", principal=ME)).uri
    arguments = {"inputs": [uri], "into": "x", "apply": False}
    return await scene.broker.submit(ME, "propose_changes", arguments, Heard())


@pytest.mark.parametrize("comes", ["nothing", "stop", "client"])
async def test_nothing_changes_once_stop_or_client_ended_a_call(proposing: Scene, tmp_path: Path, comes: str) -> None:
    """While the yes is used up, which nobody interrupts; the control is that nothing comes."""
    proposals = Proposals()
    async with obeying(tmp_path / "state") as stops, anyio.create_task_group() as tasks:

        async def meanwhile() -> None:
            if comes == "stop":
                put(tmp_path / "state", a_stop())
            elif comes == "client":
                tasks.cancel_scope.cancel()

        approvals = cast("Any", Yes(meanwhile))
        tasks.start_soon(propose, proposing.guarded(stops=stops, approvals=approvals, proposals=lambda: proposals))
    assert proposals.puts == (comes == "nothing")
    assert len(proposing.audit.last_words()) == 1


async def test_a_stop_that_comes_while_a_yes_is_used_up_starts_nothing(scene: Scene, tmp_path: Path) -> None:
    """Before the next regular look; the decision has its end on record."""
    rights = replace(scene.guards.rights_of(ME), approvals=cast("Any", (1,)))
    async with obeying(tmp_path / "state") as stops:

        async def stop() -> None:
            put(tmp_path / "state", a_stop())

        stopped = scene.guarded(stops=stops, approvals=cast("Any", Yes(stop)), rights_of=lambda _: rights)
        result = await stopped.call()
    assert result.structured["refused"]["rule"] == "stop"
    assert (scene.driver.opened, scene.audit.kinds()) == (0, ["call.decided", "call.cancelled"])


async def test_a_stop_while_a_person_is_asked_is_recorded_by_itself(scene: Scene, tmp_path: Path) -> None:
    """Not with what was decided in the turn before: the record lists no inputs."""
    uri = (await keep(scene.broker.artifacts, "a.txt", b"a", principal=ME)).uri
    asks, rights = _Asks(), replace(scene.guards.rights_of(ME), approvals=cast("Any", (1,)))
    async with obeying(tmp_path / "state") as stops, anyio.create_task_group() as tasks:
        waiting = scene.guarded(stops=stops, approvals=cast("Any", asks), rights_of=lambda _: rights)
        tasks.start_soon(lambda: waiting.call(inputs=(uri,)))
        await asks.waiting.wait()
        put(tmp_path / "state", a_stop())
    (event,) = scene.audit.events
    assert (event.effect, event.rule, event.inputs) == ("deny", "stop", None)


async def test_a_stopped_caller_gets_no_more_turns_than_others(scene: Scene, tmp_path: Path) -> None:
    """Its denials are written within the bound of its calls; the rest are refused as too many."""
    busy = 0
    async with obeying(tmp_path / "state") as stops:
        put(tmp_path / "state", a_stop())
        bounded = scene.guarded(stops=stops, admission=Admission(per_principal=20))

        async def call(number: int) -> None:
            nonlocal busy
            try:
                await bounded.call(code=str(number))
            except RefusedError:
                busy += 1

        async with anyio.create_task_group() as tasks:
            for number in range(100):
                tasks.start_soon(call, number)
    assert (len(scene.audit.events), busy) == (20, 80)


async def test_a_question_of_a_watch_rule_is_counted_once(scene: Scene, tmp_path: Path) -> None:
    """One turn, one question, for a run that its policy asks nothing about."""
    turns = 0
    async with watching(tmp_path / "state", denials="ask") as seen, anyio.create_task_group() as tasks:
        questioned, enter = list[object](), Admission.enter

        class Counted(Admission):
            def enter(self, *arguments: Any, **options: Any) -> Any:
                nonlocal turns
                turns += 1
                return enter(self, *arguments, **options)

        async def question(call: object) -> None:
            questioned.append(call)

        seen.watch.questioned = question  # type: ignore[method-assign]
        for _ in range(watch.DENIALS_IN_A_ROW):
            await seen.watch.decided(a_call(), decision("deny"), None)
        asks = _Asks()
        asked = scene.guarded(watch=seen.watch, approvals=cast("Any", asks), admission=Counted())
        tasks.start_soon(lambda: asked.broker.submit(ME, "run_python", ARGUMENTS, Heard(), run=a_call().run))
        await asks.waiting.wait()
        tasks.cancel_scope.cancel()
    assert (turns, len(questioned)) == (1, 1)


async def test_a_rule_that_stops_askers_leaves_no_question_and_spends_nothing(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question that was one too many is withdrawn with its call."""
    monkeypatch.setattr(watch, "QUESTIONS", 1)
    rights = scene.guards.rights_of(ME)
    asking = rights.profiles["run_python"].model_copy(update={"approval": "ask"})
    profiles = rights.profiles.with_narrower({**rights.profiles, "run_python": asking})
    rights = replace(rights, budgets=(budget(calls=10),), profiles=profiles)
    (tmp_path / "desk").mkdir()
    async with (
        watching(tmp_path / "state", questions="stop") as seen,
        a_desk(tmp_path / "desk") as desk,
        budgeting.opened(tmp_path / "desk") as budgets,
    ):
        stopped = scene.guarded(
            stops=seen.stops, watch=seen.watch, approvals=desk.approvals, budgets=budgets, rights_of=lambda _: rights
        )
        with suppress(RefusedError):
            await stopped.broker.submit(ME, "run_python", ARGUMENTS, Heard(), run=a_call().run)
        assert "approval.withdrawn" in desk.kinds()
        assert [left.left for left in await budgets.left(ME, None, rights)] == [10]


async def test_a_budget_that_is_lifted_has_files_scanned_once(proposing: Scene, tmp_path: Path) -> None:
    """Within one turn: the second change is made although its budget is spent."""
    lift = Lift.model_validate({"what": "budget", "by": "operator"})
    rights = replace(proposing.guards.rights_of(ME), budgets=(budget(calls=1),), lifts=(lift,))
    proposals = Proposals()
    async with budgeting.opened(tmp_path) as budgets:
        lifted = proposing.guarded(
            approvals=cast("Any", Yes()), budgets=budgets, proposals=lambda: proposals, rights_of=lambda _: rights
        )
        for _ in range(2):
            await propose(lifted)
    assert (proposals.puts, proposals.scans) == (2, 2)


async def test_a_call_is_freed_with_its_result(scene: Scene) -> None:
    """Not by the garbage collector, which would keep its output and stop other calls for it later."""
    gc.collect()
    gc.disable()
    try:
        await scene.call()
        assert not [item for item in gc.get_objects() if isinstance(item, Call)]
    finally:
        gc.enable()
