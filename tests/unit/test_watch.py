"""Every watch rule fires on what it looks for and not on its control; each action does what it says."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import anyio
import pytest
from tests.fixtures.audit_logs import log_lines
from tests.fixtures.brokered import Heard
from tests.fixtures.channels import Guest, an_outcome
from tests.unit.test_broker import ARGUMENTS, Scene, scene
from tests.unit.test_stops import NAMES, a_call
from tests.unit.test_watch_markers import MARKER

from glovebox_audit.chain import Record
from glovebox_audit.event import Event
from glovebox_audit.log import AuditLog
from glovebox_audit.place import AuditError
from glovebox_profiles.egress.rules import EgressDecision
from glovebox_profiles.egress.targets import parse_url
from glovebox_profiles.policy.model import WatchAction
from glovebox_server.calls import Decision, Principal, ToolCall
from glovebox_server.core.call import Attempt, Call, CallDeniedError
from glovebox_server.egress.events import EgressAttempt
from glovebox_server.guards.stops.stops import Stops, made
from glovebox_server.guards.watch import watch
from glovebox_server.guards.watch.canaries import Canary, plant
from glovebox_server.guards.watch.watch import Watch, of_value

__all__ = ["scene"]


def decision(effect: Any, rule: str = "network.allow") -> Decision:
    """What policy said."""
    return Decision(effect=effect, rule=rule, reason="", hint="", profile_digest="")


@dataclass
class Watched:
    """Watch rules at work, and where they write."""

    watch: Watch
    stops: Stops
    place: Path

    def records(self) -> list[Mapping[str, Any]]:
        """Each alarm on record."""
        records = [json.loads(line) for line in log_lines(self.place / "audit")]
        return [each["data"] for each in records if each["kind"] == "watch.alarm"]

    def alarms(self) -> list[tuple[str, str, str, str]]:
        """Rule, action, place and words of each."""
        return [(each["rule"], each["action"], each["where"], each["what"]) for each in self.records()]


@asynccontextmanager
async def watching(place: Path, **actions: WatchAction) -> AsyncIterator[Watched]:
    """The rules of a server whose state is in ``place``."""
    place.chmod(0o700)
    async with AuditLog.open(place / "audit", "s_watch") as audit, Stops.opened(place, audit) as stops:
        given: Mapping[str, WatchAction] = {name.replace("_", "-"): action for name, action in actions.items()}
        yield Watched(await Watch.opened(place, audit, stops, given), stops, place)


def attempted(request: ToolCall, given: Decision, workspace: Path | None = None) -> Call:
    """A call once policy has said so."""
    nothing: Any = None
    call = Call(request=request, tool=nothing, listener=nothing, rights=nothing, ended_by=nothing)
    rights: Any = SimpleNamespace(workspace=workspace)
    call.now = Attempt(request=request, rights=rights, decision=given)
    return call


async def weighed(seen: Watched, request: ToolCall, given: Decision) -> tuple[bool, Decision]:
    """Whether a call is slowed, and what becomes of its decision."""
    call = attempted(request, given)
    await seen.watch.slow(call)
    seen.watch.ask(call)
    return call.delay > 0, call.now.decision


def planted(place: Path) -> Canary:
    """A canary in a workspace beside the state."""
    workspace = place / "workspace"
    workspace.mkdir(exist_ok=True)
    return plant(place, workspace, "deploy.env")


async def test_denials_in_a_row_are_told_and_others_are_not(tmp_path: Path) -> None:
    """The control: one that is allowed between them, another run's, and those of a stop."""
    async with watching(tmp_path) as seen:
        for _ in range(watch.DENIALS_IN_A_ROW - 1):
            await seen.watch.decided(a_call(), decision("deny"), None)
        await seen.watch.decided(a_call(), decision("allow"), None)
        for number in range(watch.DENIALS_IN_A_ROW - 1):
            await seen.watch.decided(a_call(), decision("deny"), None)
            await seen.watch.decided(a_call(run=f"r_{number + 1:026}"), decision("deny"), None)
            await seen.watch.decided(a_call(), decision("deny", "stop"), None)
        assert seen.alarms() == []
        await seen.watch.decided(a_call(), decision("deny"), None)
        assert seen.alarms() == [("denials", "record", "calls", "10 in a row")]


async def test_a_rule_that_is_switched_off_looks_for_nothing_any_more(tmp_path: Path) -> None:
    """As in a server that starts so; switched on again it does."""
    async with watching(tmp_path) as seen:
        canary = planted(tmp_path)
        for actions, looks in (({}, True), ({"canary": "off"}, False), ({}, True)):
            seen.watch.act(actions)  # type: ignore[arg-type]  # a Literal
            await seen.watch.decided(a_call(), decision("allow"), Path(canary.workspace))
            assert (seen.watch.look().file() is not None) is looks
            assert bool(await seen.watch.planted(Path(canary.workspace))) is looks


async def test_a_rule_that_is_off_does_nothing(tmp_path: Path) -> None:
    """Nor does it count: once it is on it begins anew. The controls are the tests of each."""
    off: dict[str, WatchAction] = dict.fromkeys((name.replace("-", "_") for name in watch.RULES), "off")
    async with watching(tmp_path, **off) as seen:
        call = a_call(arguments={"code": planted(tmp_path).marker})
        for action, times in (("off", 6 * watch.DENIALS_IN_A_ROW - 1), ("record", 1)):
            if action != "off":
                seen.watch.act({**dict.fromkeys(watch.RULES, action), "canary": "off"})  # type: ignore[arg-type]  # a Literal
            for number in range(times):
                await seen.watch.decided(call, decision("deny"), None)
                await seen.watch.questioned(call)
                await seen.watch.connecting(call, attempt(f"https://{action}{number}.example/"))
            assert seen.watch.look().file() is None
            assert seen.alarms() == []


@pytest.mark.parametrize("action", ["record", "slow", "ask", "stop"])
async def test_each_action_does_what_it_says_to_that_run_alone(
    action: WatchAction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no longer than it says, but for a stop; the control is another run of the same caller."""
    now = 1000.0
    monkeypatch.setattr(anyio, "current_time", lambda: now)
    async with watching(tmp_path, denials=action) as seen:
        call = a_call(principal=replace(a_call().principal, client="An editor"))
        for _ in range(watch.DENIALS_IN_A_ROW):
            await seen.watch.decided(call, decision("deny"), None)
        assert seen.records() == [
            {
                "rule": "denials", "action": action, "where": "calls", "what": "10 in a row", "call": call.id,
                "tool": call.tool, "principal": call.principal.id, "client": "An editor", "run": call.run,
                "workflow": call.principal.workflow,
            }
        ]  # fmt: skip
        other = a_call(run="r_" + "1" * 26)
        given = decision("allow")
        (slowed, asked), stopped = await weighed(seen, call, given), seen.stops.refusal(call)
        assert slowed is (action == "slow")
        assert ((asked.effect, asked.rule) == ("ask", "watch.denials")) is (action == "ask")
        assert ("denials" in asked.reason and "operator" in asked.hint) is (action == "ask")
        assert (asked is given) is (action != "ask")
        assert (stopped is not None and stopped.rule == "stop") is (action == "stop")
        assert [each.by for each in seen.stops._found.items] == ["watch:denials"] * (action == "stop")
        assert (*await weighed(seen, other, given), seen.stops.refusal(other)) == (False, given, None)
        now += watch.FLAGGED_SECONDS
        assert await weighed(seen, call, given) == (False, given)
        assert (seen.stops.refusal(call) is not None) is (action == "stop")


async def test_an_alarm_that_cannot_be_recorded_has_its_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And the operator is told which, and why."""

    async def fail(_event: Event) -> Record:
        raise AuditError("record", "the disk is full", "Make room.")

    async with watching(tmp_path, denials="ask") as seen:
        monkeypatch.setattr(seen.stops._audit, "append", fail)
        for _ in range(watch.DENIALS_IN_A_ROW):
            await seen.watch.decided(a_call(), decision("deny"), None)
        assert (await weighed(seen, a_call(), decision("allow")))[1].effect == "ask"
    (line,) = [each.message for each in caplog.records if each.levelname == "ERROR"]
    assert "rule denials " in line
    assert "the disk is full" in line


async def test_a_stopped_call_without_a_run_is_stopped_by_its_id(tmp_path: Path) -> None:
    """Nobody else's is; the control is a call of the same caller."""
    async with watching(tmp_path, denials="stop") as seen:
        for _ in range(watch.DENIALS_IN_A_ROW):
            await seen.watch.decided(a_call(run=None), decision("deny"), None)
        assert seen.stops.refusal(a_call(run=None)) is not None
        assert seen.stops.refusal(a_call(run=None, id="c_" + "1" * 26)) is None


def attempt(url: str, effect: Any = "allow") -> EgressAttempt:
    """One attempt to connect."""
    said = EgressDecision(effect=effect, rule="x", reason="", hint="")
    return EgressAttempt(kind="request", decision=said, target=parse_url("GET", url), asked=url)


@pytest.mark.parametrize(("most", "told"), [(watch.MAX_HOSTS, True), (6, True), (5, False)])
async def test_a_host_that_is_new_after_many_connections_is_told(
    most: int, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, unless too many are known; the control is a known, a refused, another caller's, one learnt, and none."""
    monkeypatch.setattr(watch, "MAX_HOSTS", most)
    async with watching(tmp_path) as seen:
        for number in range(watch.CONNECTIONS_KNOWN):  # the last of five is new
            await seen.watch.connecting(a_call(), attempt(f"https://h{max(0, number - 45)}.example/"))
        await seen.watch.connecting(a_call(), attempt("https://h1.example/"))
        await seen.watch.connecting(a_call(), attempt("https://new.example/", "deny"))
        await seen.watch.connecting(a_call(), replace(attempt("https://new.example/"), target=None))
        other = a_call(principal=Principal(id="token:other", transport="http"))
        await seen.watch.connecting(other, attempt("https://new.example/"))
        assert seen.alarms() == []
        for _ in range(3):
            await seen.watch.connecting(a_call(), attempt("https://new.example/"))
        assert seen.alarms() == [("new-reach", "record", "url", "new.example")] * told


@pytest.mark.parametrize("action", ["record", "off"])
async def test_a_placeholder_that_strays_is_told_by_its_name(action: WatchAction, tmp_path: Path) -> None:
    """In output beside a canary, and in a request; the control is the rule switched off."""
    async with watching(tmp_path, placeholder=action, canary="record") as seen:
        canary = planted(tmp_path)
        await seen.watch.decided(a_call(), decision("allow"), None)
        call = attempted(a_call(), decision("allow"))
        call.now.placeholders = {"tracker": MARKER}
        await seen.watch.observe(call)
        look: Any = call.now.observers[0]
        assert call.now.inspect_file() is not None
        await look.ended(an_outcome(value=MARKER, problems=("x" * 10_000, canary.marker)))
        await seen.watch.connecting(a_call(), replace(attempt("https://e.example/"), strayed="tracker"))
        assert ("placeholder" in {each.rule for each in look.findings}) is (action == "record")
        told = [("placeholder", "record", where, "tracker") for where in ("value", "request") if action == "record"]
        assert seen.alarms() == [*told[:1], ("canary", "record", "value", canary.id), *told[1:]]


@pytest.mark.parametrize(("seconds", "told"), [(0, True), (watch.QUESTIONS_SECONDS, True), (601, False)])
async def test_a_flood_of_questions_is_told(
    seconds: float, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control is as many over a longer time, and as many of two callers."""
    now = 1000.0
    monkeypatch.setattr(anyio, "current_time", lambda: now)
    async with watching(tmp_path) as seen:
        other = a_call(principal=Principal(id="token:other", transport="http"))
        await seen.watch.questioned(a_call())
        now += seconds
        for _ in range(watch.QUESTIONS - 2):
            await seen.watch.questioned(a_call())
            await seen.watch.questioned(other)
        assert seen.alarms() == []
        await seen.watch.questioned(a_call())
        assert seen.alarms() == [("questions", "record", "calls", "20 questions")] * told


async def test_of_callers_the_longest_idle_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes back is not; the control is that its questions still count."""
    monkeypatch.setattr(watch, "MAX_KEPT", 2)
    async with watching(tmp_path) as seen:
        for name, times, told in (("a", 10, 0), ("b", 10, 0), ("a", 9, 0), ("c", 1, 0), ("a", 1, 1), ("b", 10, 1)):
            for _ in range(times):
                await seen.watch.questioned(a_call(principal=Principal(id=name, transport="http")))
            assert len(seen.alarms()) == told


@pytest.mark.parametrize(
    "path", ["deploy.env", "./deploy.env", "/workspace/deploy.env", "a/../deploy.env", "//workspace//deploy.env"]
)
async def test_reading_a_canary_by_its_name_stops_the_run(path: str, tmp_path: Path) -> None:
    """Whatever of it is read. Control: a file beside it, a denied call, another tool, another's file of that name."""
    async with watching(tmp_path) as seen:
        canary = planted(tmp_path)
        beside, reads = (
            a_call(tool="read_workspace_file", arguments={"path": each}) for each in ("deploy.env.md", path)
        )
        workspace = Path(canary.workspace)
        await seen.watch.decided(beside, decision("allow"), workspace)
        await seen.watch.decided(reads, decision("deny"), workspace)
        await seen.watch.decided(replace(reads, tool="search_workspace"), decision("allow"), workspace)
        await seen.watch.decided(reads, decision("allow"), tmp_path / "other")
        await seen.watch.decided(reads, decision("allow"), None)
        assert seen.alarms() == []
        await seen.watch.decided(reads, decision("allow"), workspace)
        assert seen.alarms() == [("canary", "stop", "arguments", canary.id)]
        assert seen.stops.refusal(a_call()) is not None


async def test_a_canary_is_known_in_a_workspace_around_its_own(tmp_path: Path) -> None:
    """A role may have the folder above; the control is its path as the host has it, which tools do not know."""
    async with watching(tmp_path) as seen:
        canary = planted(tmp_path)
        for path in (str(canary.file), "../workspace/deploy.env"):
            reads = a_call(tool="read_workspace_file", arguments={"path": path})
            await seen.watch.decided(reads, decision("allow"), tmp_path)
        assert seen.alarms() == []
        reads = a_call(tool="read_workspace_file", arguments={"path": "workspace/deploy.env"})
        await seen.watch.decided(reads, decision("allow"), tmp_path)
        assert [each[:2] for each in seen.alarms()] == [("canary", "stop")]


async def test_a_canary_written_over_lines_in_arguments_stops_the_run(tmp_path: Path) -> None:
    """The control is another text of that form."""
    async with watching(tmp_path) as seen:
        marker = planted(tmp_path).marker
        for text, told in (("x" * 40, []), (marker, ["canary"])):
            await seen.watch.decided(a_call(arguments={"code": "\n".join(text)}), decision("deny"), None)
            assert [each[0] for each in seen.alarms()] == told


async def test_a_caller_that_trips_in_run_after_run_is_stopped_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once half of the places are taken, by one stop; the control is its first run, and another caller."""
    monkeypatch.setattr("glovebox_server.guards.stops.stops.MAX_STOPS", 4)
    monkeypatch.setattr("glovebox_server.guards.stops.stops.SPARE_STOPS", 0)
    async with watching(tmp_path, denials="stop") as seen:
        for number in range(5):
            for _ in range(watch.DENIALS_IN_A_ROW):
                await seen.watch.decided(a_call(run=f"r_{number:026}"), decision("deny"), None)
        names = [(each.scope, each.name) for each in seen.stops._found.items]
        assert sorted(names) == [("principal", NAMES["principal"]), ("run", f"r_{0:026}"), ("run", f"r_{1:026}")]
        other = a_call(run="r_" + "9" * 26, principal=Principal(id="token:other", transport="http"))
        assert seen.stops.refusal(other) is None


async def test_a_log_that_does_not_answer_holds_no_alarm_that_stops_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Alarm and stop together wait for it once, and get there in the end, the alarm first; others do not wait."""
    monkeypatch.setattr("glovebox_server.guards.stops.stops.RECORD_SECONDS", 0.2)
    async with watching(tmp_path) as seen:
        marker, append = planted(tmp_path).marker, seen.stops._audit.append
        answers, there = anyio.Event(), anyio.Event()

        async def hangs(event: Event) -> Record:
            await answers.wait()
            record = await append(event)
            if event.kind == "stop.made":
                there.set()
            return record

        monkeypatch.setattr(seen.stops._audit, "append", hangs)
        began = anyio.current_time()
        with anyio.fail_after(10):
            await seen.watch.decided(a_call(arguments={"code": marker}), decision("allow"), None)
        assert 0.2 <= anyio.current_time() - began < 5
        assert seen.stops.refusal(a_call()) is not None
        assert log_lines(tmp_path / "audit") == []
        words = "the log does not answer: {} is not waited for"
        assert caplog.messages[-2:] == [words.format("watch.alarm"), words.format("stop.made")]
        (stop,), overdue = seen.stops._found.items, [*seen.stops._overdue]
        monkeypatch.setattr("glovebox_server.guards.stops.stops.RECORD_SECONDS", 3600)
        with anyio.fail_after(10):
            await seen.stops.record(made(stop))
        answers.set()
        with anyio.fail_after(10):
            await there.wait()
            for done in overdue:
                await done.wait()
            with anyio.CancelScope() as cancelled:
                cancelled.cancel()
                await seen.stops.record(made(stop))
        kinds = [json.loads(line)["kind"] for line in log_lines(tmp_path / "audit")]
        assert kinds == ["watch.alarm", *["stop.made"] * 3]
        assert not seen.stops._overdue


async def test_a_secret_in_output_is_told_and_live_output_waits_where_it_stops_the_run(tmp_path: Path) -> None:
    """The controls are a rule that only records, and one that is off."""
    cases: tuple[tuple[WatchAction, list[str]], ...] = (("stop", []), ("record", ["one"]), ("off", ["one"]))
    for action, shown in cases:
        place, heard = tmp_path / action, list[str]()
        place.mkdir()
        async with watching(place, secrets=action) as seen:
            seen.watch.look().printed(heard.append)(b"one")
            outcome = an_outcome(value=["np" + "m_" + "Ab3" * 12] * 2)
            assert (seen.watch.look().pieces(outcome) == []) is (action == "off")
            await seen.watch.look_for_secrets(a_call(), outcome)
            assert seen.alarms() == [("secrets", action, "value", "npm token")] * (action != "off")
        assert heard == shown


@pytest.mark.parametrize("where", ["code", "url"])
async def test_a_canary_in_arguments_stops_the_run_and_is_repeated_nowhere(where: str, tmp_path: Path) -> None:
    """Also where the call was denied, and where it is much; planted while the server runs. Control: before that."""
    async with watching(tmp_path) as seen:
        await seen.watch.decided(a_call(arguments={where: "x" * 40}), decision("allow"), None)
        canary = planted(tmp_path)
        await seen.watch.decided(a_call(arguments={where: "y" * 100_000}), decision("allow"), None)
        assert seen.alarms() == []
        written = "https://e.example/?" + "".join(f"%{ord(each):02x}" for each in canary.marker)
        arguments = {"url": "https://e.example/", where: "y" * 100_000 + written}
        await seen.watch.decided(a_call(arguments=arguments), decision("deny"), None)
        assert seen.alarms() == [("canary", "stop", "arguments", canary.id)]
        log = b"".join(log_lines(tmp_path / "audit"))
        assert canary.marker.encode() not in log
        refusal = seen.stops.refusal(a_call())
        assert refusal is not None
        assert canary.marker not in str(refusal)


async def test_much_is_looked_through_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control is a letter less, which is looked through at once."""
    async with watching(tmp_path) as seen:
        planted(tmp_path)
        run_sync = AsyncMock()
        monkeypatch.setattr(anyio.to_thread, "run_sync", run_sync)
        for more in (0, 1):
            code = "x" * (watch.LOOP_BYTES + more - len(of_value({"code": ""})))
            await seen.watch.decided(a_call(arguments={"code": code}), decision("allow"), None)
            assert run_sync.await_count == more


async def test_a_canary_on_its_way_out_is_not_dialled(tmp_path: Path) -> None:
    """The call is cancelled before the attempt comes back; the control is the same URL without."""
    async with watching(tmp_path) as seen:
        marker = planted(tmp_path).marker
        with suppress(CallDeniedError), seen.stops.ending(a_call()):
            await seen.watch.connecting(a_call(), attempt("https://e.example/?q=x"))
            await seen.watch.connecting(a_call(), attempt(f"https://e.example/?q={marker}"))
            pytest.fail("it came back")
        assert [each[2] for each in seen.alarms()] == ["url"]


# Whole calls.


async def test_output_with_a_canary_reaches_neither_caller_nor_store(scene: Scene, tmp_path: Path) -> None:
    """In a file, backwards; nothing is published or shown. Control: one without."""
    (tmp_path / "state").mkdir()
    async with watching(tmp_path / "state") as seen:
        marker = planted(tmp_path / "state").marker
        scene = scene.guarded(stops=seen.stops, watch=seen.watch)

        async def script(guest: Guest) -> None:
            await guest.file("a.txt", content)
            await guest.done()

        scene.driver.script = script
        who = Principal(id="local:1", transport="cli")
        content = b"nothing"
        assert not (await scene.broker.submit(who, "run_python", ARGUMENTS, Heard(), run=NAMES["run"])).failed
        content = b"x" * 300_000 + marker[::-1].encode()
        result = await scene.broker.submit(who, "run_python", ARGUMENTS, Heard(), run=NAMES["run"])
        assert result.failed
        assert result.structured["refused"]["rule"] == "stop"
        assert marker not in str(result)
        assert seen.alarms()[0][:3] == ("canary", "stop", "file")
        kinds = [each.kind for each in scene.audit.events]
        assert kinds.count("artifact.collected") == 1
        assert kinds[-1] == "call.cancelled"
        again = await scene.broker.submit(who, "run_python", ARGUMENTS, Heard(), run=NAMES["run"])
        assert again.structured["refused"]["rule"] == "stop"


async def test_a_run_that_is_asked_about_does_not_run_unasked(scene: Scene, tmp_path: Path) -> None:
    """Without anybody who could be asked it is refused; the control is another run."""
    (tmp_path / "state").mkdir()
    async with watching(tmp_path / "state", denials="ask") as seen:
        broker = scene.guarded(stops=seen.stops, watch=seen.watch).broker
        who = Principal(id="local:1", transport="cli")
        for _ in range(watch.DENIALS_IN_A_ROW):
            await seen.watch.decided(a_call(), decision("deny"), None)
        asked = await broker.submit(who, "run_python", ARGUMENTS, Heard(), run=NAMES["run"])
        assert asked.structured["refused"]["rule"] == "watch.denials"
        for effect, rule in (("ask", "watch.denials"), ("deny", "test")):  # where its profile asks, an operator is too
            _, verdict = await weighed(seen, a_call(), replace(decision(effect), rule="test"))
            assert (verdict.effect, verdict.rule) == (effect, rule)
        assert not (await broker.submit(who, "run_python", ARGUMENTS, Heard(), run="r_" + "1" * 26)).failed


async def test_no_caller_has_what_is_counted_of_another_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many runs it begins; the control is that its own longest idle is forgotten."""
    monkeypatch.setattr(watch, "MAX_KEPT", 8)
    other = Principal(id="token:other", transport="http")
    async with watching(tmp_path, denials="ask") as seen:
        for _ in range(watch.DENIALS_IN_A_ROW):
            await seen.watch.decided(a_call(), decision("deny"), None)
        begun = [replace(a_call(run=f"r_{number:026}"), principal=other) for number in range(2, 30)]
        for call in begun:
            await seen.watch.decided(call, decision("deny"), None)
            await seen.watch.decided(begun[0], decision("deny"), None)
        assert (await weighed(seen, a_call(), decision("allow")))[1].effect == "ask"
        assert len(seen.watch.runs) == watch.MAX_KEPT
        assert begun[0].run in seen.watch.runs
        assert begun[1].run not in seen.watch.runs
