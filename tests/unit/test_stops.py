"""Stops: what each names, what becomes of calls that run, wait or come, and of what cannot be read or written."""

import errno
import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import anyio
import pytest
from tests.fixtures.audit_logs import log_lines
from tests.fixtures.brokered import Heard
from tests.fixtures.steps import steps
from tests.unit.test_broker import ARGUMENTS, Scene, scene

from glovebox_audit.chain import new_call_id
from glovebox_audit.log import AuditLog
from glovebox_audit.place import take_lock
from glovebox_server import secret_files
from glovebox_server.calls import CallResult, Principal, ToolCall
from glovebox_server.core.call import CallDeniedError
from glovebox_server.guards.admission.admission import Admission
from glovebox_server.guards.approvals.approvals import Approvals
from glovebox_server.guards.stops import stops as stops_module
from glovebox_server.guards.stops.stops import (
    HINT,
    LOOK_SECONDS,
    SCOPES,
    SPARE_STOPS,
    Scope,
    Stop,
    Stops,
    new_stop,
    stops_of,
)
from glovebox_server.secret_files import Files, SecretDirectory, SecretFileError

__all__ = ["scene"]
WHEN = datetime(2026, 11, 22, tzinfo=UTC)
NAMES: Mapping[Scope, str] = {
    "call": "c_" + "0" * 26,
    "run": "r_" + "0" * 26,
    "principal": "token:ci",
    "workflow": "release",
    "tool": "run_python",
    "all": "",
}


def a_stop(scope: Scope = "all", name: str | None = None) -> Stop:
    """A stop."""
    return new_stop(scope, NAMES[scope] if name is None else name, because="it went wild", by="local:1", made=WHEN)


def a_call(**changed: Any) -> ToolCall:
    """The call that each of ``NAMES`` names."""
    who = Principal(id=NAMES["principal"], transport="http", workflow=NAMES["workflow"])
    call = ToolCall(
        id=NAMES["call"], principal=who, session=None, tool="run_python", arguments={}, received=WHEN, run=NAMES["run"]
    )
    return replace(call, **changed)


@asynccontextmanager
async def obeying(place: Path) -> AsyncIterator[Stops]:
    """A server process's view of the stops of a state directory, with a log of its own."""
    place.chmod(0o700)
    async with AuditLog.open(place / "audit", f"s_{new_call_id()}") as audit, Stops.opened(place, audit) as stops:
        yield stops


def put(place: Path, stop: Stop) -> Stop:
    """What ``glovebox stop`` does, but for the record."""
    assert stops_of(place).add(stop.id, stop.encoded(), instead=b"")
    return stop


@pytest.mark.parametrize("scope", SCOPES)
async def test_a_stop_names_what_it_says_and_nothing_beside_it(tmp_path: Path, scope: Scope) -> None:
    """The control is the same stop with another name, and a call that has none of that kind. All need no name."""
    bare = a_call(run=None, principal=Principal(id="local:0", transport="cli"), id="c_" + "1" * 26, tool="fetch_url")
    async with obeying(tmp_path) as stops:
        other = put(tmp_path, a_stop(scope, NAMES[scope][:-1] + "x"))
        assert bool(stops.refusal(a_call())) is bool(stops.refusal(bare)) is (scope == "all")
        stops_of(tmp_path).remove(other.id)
        put(tmp_path, a_stop(scope))
        assert stops.refusal(a_call())
        assert bool(stops.refusal(bare)) is (scope == "all")


async def test_of_many_stops_the_first_is_told_in_the_same_steps(tmp_path: Path) -> None:
    """Beside 4 of other runs and beside 60; a later one of its principal changes nothing."""
    first, second = sorted((a_stop("run"), a_stop("run")), key=lambda stop: stop.id)
    taken = set()
    async with obeying(tmp_path) as stops:
        for stop in (second, first):
            put(tmp_path, stop)
        for number in range(1, 61):
            put(tmp_path, a_stop("run", f"r_{number}"))
            if number in (4, 60):
                assert stops.refusal(a_call())
                taken.add(steps(lambda: stops._objection(a_call())))
        put(tmp_path, a_stop("principal"))
        stops.refusal(a_call())
        assert stops._objection(a_call()) == (first.refusal, first.id)
    assert len(taken) == 1


async def test_new_calls_are_refused_with_the_reason_until_it_is_lifted(tmp_path: Path) -> None:
    """At once in every process of the state directory, also in one that begins later; control: before and after."""
    async with obeying(tmp_path) as one, obeying(tmp_path) as other:
        assert one.refusal(a_call()) is None
        stop = put(tmp_path, a_stop("tool"))
        for each in (one, other):
            refusal = each.refusal(a_call())
            assert refusal is not None
            assert (refusal.rule, refusal.reason) == ("stop", "This tool is stopped: it went wild.")
            assert refusal.hint == HINT
            assert each.refusal(a_call(tool="fetch_url")) is None
        async with obeying(tmp_path) as later:
            assert later.refusal(a_call()) is not None
        stops_of(tmp_path).remove(stop.id)
        assert one.refusal(a_call()) is None
        assert other.refusal(a_call()) is None


async def test_every_change_is_seen_however_close_together(tmp_path: Path) -> None:
    """The kernel's clock stands still for milliseconds; a directory changed twice in a tick looks the same."""
    async with obeying(tmp_path) as stops:
        for _ in range(100):
            stop = put(tmp_path, a_stop())
            assert stops.refusal(a_call()) is not None
            stops_of(tmp_path).remove(stop.id)
            assert stops.refusal(a_call()) is None


async def test_without_a_change_nothing_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One ``stat`` a call; the control is a change, which is read."""
    read = Mock(side_effect=stops_of(tmp_path).read)
    async with obeying(tmp_path) as stops:
        await anyio.sleep(0.1)
        assert stops.refusal(a_call()) is None
        monkeypatch.setattr(Files, "read", read)
        for _ in range(10):
            assert stops.refusal(a_call()) is None
        assert read.call_count == 0
        put(tmp_path, a_stop())
        assert stops.refusal(a_call()) is not None
        assert read.call_count == 1


async def test_while_no_call_is_under_way_nobody_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing wakes an idle server; the control is a call, during which it does."""
    look = Mock(side_effect=stops_of(tmp_path).look)
    async with obeying(tmp_path) as stops:
        monkeypatch.setattr(Files, "look", look)
        await anyio.sleep(3 * LOOK_SECONDS)
        assert look.call_count == 0
        with stops.ending(a_call()):
            while look.call_count < 2:  # noqa: ASYNC110 - only time makes it look
                await anyio.sleep(LOOK_SECONDS)
        await anyio.sleep(2 * LOOK_SECONDS)
        before = look.call_count
        await anyio.sleep(3 * LOOK_SECONDS)
        assert look.call_count == before


async def test_a_running_call_ends_and_those_it_does_not_name_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the next look after one that may be under way; one that began stopped ends at once."""
    async with obeying(tmp_path) as stops:
        monkeypatch.setattr(Files, "look", look := Mock(side_effect=stops_of(tmp_path).look))
        with suppress(CallDeniedError), ExitStack() as held:
            stopped = held.enter_context(stops.ending(a_call()))
            spared = held.enter_context(stops.ending(a_call(run="r_" + "1" * 26)))
            stop = put(tmp_path, a_stop("run"))
            looked = look.call_count
            with anyio.fail_after(30):
                await anyio.sleep_forever()
        assert stopped.scope.cancelled_caught
        assert stopped.refusal == stop.refusal
        assert look.call_count - looked <= 2
        assert (stopped.stop, spared.refusal, spared.scope.cancel_called) == (stop.id, None, False)
        assert stops._running == set()
        with pytest.raises(CallDeniedError), stops.ending(a_call()):
            await anyio.sleep_forever()


DAMAGED: Mapping[str, tuple[str, bytes]] = {
    "empty": ("s_" + "0" * 26, b""),
    "cut": ("s_" + "0" * 26, a_stop().encoded()[:-5]),
    "another's name": ("s_" + "1" * 26, a_stop().encoded()),
    "no stop's name": ("notes.txt", b"hello"),
    "a key too many": ("s_" + "0" * 26, b'{"x":1,' + a_stop().encoded()[1:]),
    "too long": ("s_" + "0" * 26, b" " * 10_000 + a_stop().encoded()),
}


@pytest.mark.parametrize("case", DAMAGED)
async def test_what_is_no_stop_stops_everything_and_says_how_to_lift_it(case: str, tmp_path: Path) -> None:
    """What it was to stop is not known; the control is that its removal, as it says, is all it takes."""
    name, content = DAMAGED[case]
    async with obeying(tmp_path) as stops:
        with suppress(CallDeniedError), stops.ending(a_call()) as stopped:
            stops_of(tmp_path).add(name, content)
            with anyio.fail_after(30):
                await anyio.sleep_forever()
        assert stopped.scope.cancelled_caught
        assert stopped.refusal is not None
        assert stopped.refusal.rule == "store"
        refusal = stops.refusal(a_call())
        assert refusal is not None
        assert refusal.rule == "store"
        assert "glovebox stops list" in refusal.hint
        assert str(tmp_path) not in str(refusal)
        (problem,) = stops_of(tmp_path).read().damaged
        assert ("glovebox resume" in problem.fix) is name.startswith("s_")
        stops_of(tmp_path).remove(name)
        assert stops.refusal(a_call()) is None


@pytest.mark.parametrize("what", ["gone", "a file", "open to others"])
async def test_a_directory_that_cannot_be_trusted_stops_everything(what: str, tmp_path: Path) -> None:
    """The control is before."""
    async with obeying(tmp_path) as stops:
        assert stops.refusal(a_call()) is None
        place = stops._files.path
        if what == "open to others":
            place.chmod(0o777)
        else:
            place.rmdir()
        if what == "a file":
            place.write_text("")
        refusal = stops.refusal(a_call())
        assert refusal is not None
        assert refusal.rule == "store"


def full(monkeypatch: pytest.MonkeyPatch, *, also_empty: bool) -> None:
    make = SecretDirectory.make

    def refuse(self: SecretDirectory, name: str, content: bytes) -> bool:
        if content or also_empty:
            problem = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise SecretFileError(
                self._kind, self.path / name, f"it cannot be written: {problem.strerror}", "Free space."
            )
        return make(self, name, content)

    monkeypatch.setattr(SecretDirectory, "make", refuse)


async def test_a_watch_rules_stop_is_recorded_before_it_acts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also after its call was cancelled; and acts where it cannot be recorded, or has no room on the disk."""
    async with obeying(tmp_path) as stops:
        seen: list[int] = []
        add = stops._files.add

        def noted(name: str, content: bytes, *, instead: bytes | None = None, spare: int = 0) -> bool:
            seen.append(len(log_lines(tmp_path / "audit")))
            return add(name, content, instead=instead, spare=spare)

        monkeypatch.setattr(stops._files, "add", noted)
        with anyio.CancelScope() as cancelled:
            cancelled.cancel()
            await stops.make("run", NAMES["run"], because="it found one", by="watch:canary")
        assert seen == [1]
        (stop,) = stops._found.items
        (line,) = log_lines(tmp_path / "audit")
        said = {"stop": stop.id, **stop.model_dump(include={"scope", "name", "because", "by"})}
        assert json.loads(line).items() >= {"kind": "stop.made", "data": said}.items()
        assert stops.refusal(a_call()) is not None
        assert stops.refusal(a_call(run=None)) is None
        monkeypatch.undo()
        full(monkeypatch, also_empty=True)
        stops._audit._unusable = "the disk is full"
        await stops.make("tool", "run_python", because="it found one", by="watch:canary")
        assert stops.refusal(a_call(run=None)) is not None
        stops._audit._unusable = None
        unrecorded, alone = caplog.messages
        assert unrecorded.startswith("stop.made is not recorded: write a record: the disk is full.")
        assert alone.startswith("a stop is in effect in this process alone: stop ")
        monkeypatch.undo()
        full(monkeypatch, also_empty=False)  # a file without content stops everything, in every process
        await stops.make("workflow", "release", because="it found one", by="watch:canary")
        damaged = stops.refusal(a_call(run=None, tool="", principal=Principal(id="", transport="cli")))
        assert damaged == stops_module.DAMAGED
        (problem,) = stops._found.damaged
        assert caplog.messages[2:] == [f"everything is stopped: {problem}"]
        assert str(problem).startswith("stop ")


async def test_what_is_stopped_already_is_not_stopped_again(tmp_path: Path) -> None:
    """Many calls of one run hit at once: one file and one record; the control is another run."""
    async with obeying(tmp_path) as stops:

        async def hit(name: str) -> None:
            await stops.make("run", name, because="it found one", by="watch:canary")

        async with anyio.create_task_group() as tasks:
            for _ in range(10):
                tasks.start_soon(hit, NAMES["run"])
        await hit(NAMES["run"])
        (first,) = stops_of(tmp_path).names()
        await hit("r_" + "1" * 26)
        assert len(stops_of(tmp_path).names()) == len(log_lines(tmp_path / "audit")) == 2
        stops_of(tmp_path).remove(first)
        await hit(NAMES["run"])
        assert len(stops_of(tmp_path).names()) == 2
        assert first not in stops_of(tmp_path).names()


async def test_watch_rules_leave_the_last_places_to_the_operator(tmp_path: Path) -> None:
    """What has no place is stopped in this process all the same; the control is the place before."""
    async with obeying(tmp_path) as stops:
        stops._files._most = SPARE_STOPS + 1
        for digit in "01":
            await stops.make("run", "r_" + digit * 26, because="it found one", by="watch:canary")
            refusal = stops.refusal(a_call(run="r_" + digit * 26))
            assert refusal is not None
            assert refusal.rule == "stop"
        assert len(stops_of(tmp_path).names()) == 1
        stop = a_stop("tool")
        assert stops._files.add(stop.id, stop.encoded())
        assert stops.refusal(a_call(run=None)) == stop.refusal


async def test_what_a_process_remembers_has_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of stops without a file the last one there is room for stops everything; the control is the one before it."""
    monkeypatch.setattr(stops_module, "MAX_STOPS", 3)
    async with obeying(tmp_path) as stops:
        full(monkeypatch, also_empty=True)
        for digit in "0123":
            assert (stops.refusal(a_call(run=None)) is not None) == (digit == "3")
            await stops.make("run", "r_" + digit * 26, because="it found one", by="watch:canary")
            assert stops.refusal(a_call(run="r_" + digit * 26)) is not None
        assert [each.scope for each in stops._here] == ["run", "run", "all"]
        assert stops._here[-1].name == ""
        assert "everything is stopped, by this process: it has 3 stops of its own" in caplog.messages


def test_many_at_once_do_not_make_more_than_there_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more would stop everything."""
    names = SecretDirectory.names

    def slow(self: SecretDirectory) -> list[str]:
        found = names(self)
        time.sleep(0.01)
        return found

    def add(_: int) -> bool:
        files, stop = stops_of(tmp_path), a_stop()
        files._most = 3
        try:
            return files.add(stop.id, stop.encoded())
        except SecretFileError:
            return False

    tmp_path.chmod(0o700)
    stops_of(tmp_path).prepare()
    monkeypatch.setattr(SecretDirectory, "names", slow)
    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(add, range(8))) == len(stops_of(tmp_path).names()) == 3


def test_whoever_hangs_with_the_lock_keeps_no_stop_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a suspended process does; the control is that the lock is asked for."""
    taken: list[bool] = []
    monkeypatch.setattr(secret_files, "LOCK_SECONDS", 0.1)
    monkeypatch.setattr(secret_files, "take_lock", lambda *given: taken.append(take_lock(*given)))
    tmp_path.chmod(0o700)
    files = stops_of(tmp_path)
    with files._opened() as directory, directory.locked():
        stop = put(tmp_path, a_stop())
    assert taken == [True, False]
    assert files.read().items == (stop,)


# What becomes of whole calls.


async def _submitted(scene: Scene, principal: str, ended: list[CallResult], **arguments: Any) -> None:
    who = Principal(id=principal, transport="cli")
    ended.append(await scene.broker.submit(who, "run_python", {**ARGUMENTS, **arguments}, Heard()))


async def test_running_and_waiting_calls_end_as_refusals_on_record(scene: Scene, tmp_path: Path) -> None:
    """One runs and one waits for its turn: both are refused by the stop; a third, of somebody else's, is served."""
    (tmp_path / "state").mkdir()
    async with obeying(tmp_path / "state") as stops:
        scene = scene.guarded(stops=stops, admission=Admission(running=1))
        started = anyio.Event()

        async def forever(_guest: object) -> None:
            started.set()
            await anyio.sleep_forever()

        scene.driver.script = forever
        ended: list[CallResult] = []
        others: list[CallResult] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_submitted, scene, "local:1", ended)
            await started.wait()
            tasks.start_soon(_submitted, scene, "local:1", ended)
            tasks.start_soon(_submitted, scene, "local:2", others)
            await anyio.sleep(0.01)
            scene.driver.script = None
            stop = put(tmp_path / "state", a_stop("principal", "local:1"))
        refused = [each.structured["refused"] for each in ended]
        assert [each["rule"] for each in refused] == ["stop", "stop"]
        assert {each["reason"] for each in refused} == {"This principal is stopped: it went wild."}
        assert not others[0].failed
        (cancelled,) = [each for each in scene.audit.events if each.kind == "call.cancelled"]
        assert (cancelled.by, cancelled.stop, cancelled.principal) == ("stop", stop.id, "local:1")
        decided = [each for each in scene.audit.events if each.kind == "call.decided"]
        assert [(each.principal, each.effect, each.rule) for each in decided if each.effect == "deny"] == [
            ("local:1", "deny", "stop")
        ]
        assert scene.driver.live == 0


class _Asks(Approvals):
    """Approvals where somebody is to be asked, who never answers."""

    def __init__(self) -> None:
        nothing: Any = None
        super().__init__(nothing, nothing, nothing, nothing, nothing)
        self.waiting = anyio.Event()

    async def consult(self, _now: object, _settled: object) -> Any:
        """Somebody is to be asked."""
        return "q_1"

    async def settle(self, _question: object, _listener: object) -> Any:
        """Nobody answers."""
        self.waiting.set()
        await anyio.sleep_forever()


async def test_a_call_that_waits_for_a_person_ends_too(scene: Scene, tmp_path: Path) -> None:
    """As a refusal by the stop, on record; the control is that it waits until then."""
    (tmp_path / "state").mkdir()
    async with obeying(tmp_path / "state") as stops:
        asks = _Asks()
        rights = replace(scene.guards.rights_of(Principal(id="local:1", transport="cli")), approvals=cast("Any", (1,)))
        scene = scene.guarded(stops=stops, approvals=cast("Any", asks), rights_of=lambda _: rights)
        ended: list[CallResult] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_submitted, scene, "local:1", ended)
            with anyio.fail_after(10):
                await asks.waiting.wait()
            assert ended == []
            put(tmp_path / "state", a_stop("tool"))
        assert ended[0].structured["refused"]["rule"] == "stop"
        assert [(each.kind, each.effect) for each in scene.audit.events] == [("call.decided", "deny")]
