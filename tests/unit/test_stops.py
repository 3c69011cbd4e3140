"""Stops: what each names, what becomes of calls that run, wait or come, and of what cannot be read or written."""

import errno
import json
import os
import signal
import subprocess  # noqa: TID251 - a whole command is killed
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
from click.testing import CliRunner
from tests.fixtures.audit_logs import log_lines
from tests.fixtures.brokered import Heard
from tests.unit.test_broker import ARGUMENTS, Scene, scene

from glovebox_server.audit.log import AuditLog
from glovebox_server.audit.verify import verify
from glovebox_server.broker.admission import Admission
from glovebox_server.calls import CallResult, Principal, ToolCall, new_call_id
from glovebox_server.cli.main import main
from glovebox_server.exits import OK, UNAVAILABLE, USAGE
from glovebox_server.governance.files import Files, Found
from glovebox_server.governance.stops.stop import HINT, SCOPES, Scope, Stop, new_stop, stops_of
from glovebox_server.governance.stops.stops import Stops
from glovebox_server.secret_files import SecretDirectory, SecretUnusable

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
def test_a_stop_names_what_it_says_and_nothing_beside_it(scope: Scope) -> None:
    """The control is the same stop with another name, and a call that has none of that kind."""
    assert a_stop(scope).names(a_call())
    if scope != "all":
        assert not a_stop(scope, NAMES[scope][:-1] + "x").names(a_call())
    bare = a_call(run=None, principal=Principal(id="local:0", transport="cli"), id="c_" + "1" * 26, tool="fetch_url")
    assert a_stop(scope).names(bare) is (scope == "all")


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
    reads = 0
    read = stops_of(tmp_path).read

    def counted(_files: object) -> Found[Stop]:
        nonlocal reads
        reads += 1
        return read()

    async with obeying(tmp_path) as stops:
        await anyio.sleep(0.1)
        assert stops.refusal(a_call()) is None
        monkeypatch.setattr(Files, "read", counted)
        for _ in range(10):
            assert stops.refusal(a_call()) is None
        assert reads == 0
        put(tmp_path, a_stop())
        assert stops.refusal(a_call()) is not None
        assert reads == 1


async def test_a_running_call_ends_and_those_it_does_not_name_go_on(tmp_path: Path) -> None:
    """Within the time between two looks, and a margin; one that began stopped ends at once."""
    async with obeying(tmp_path) as stops:
        with anyio.CancelScope() as scope, anyio.CancelScope() as others, ExitStack() as held:
            stopped = held.enter_context(stops.ending(a_call(), scope))
            spared = held.enter_context(stops.ending(a_call(run="r_" + "1" * 26), others))
            stop = put(tmp_path, a_stop("run"))
            began = time.monotonic()
            with anyio.fail_after(5):
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        assert time.monotonic() - began < 1
        assert (stopped.stop, spared.refusal, others.cancel_called) == (stop.id, None, False)
        assert stops._running == set()
        with anyio.CancelScope() as late, stops.ending(a_call(), late):
            await anyio.sleep_forever()
        assert late.cancelled_caught


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
        with anyio.CancelScope() as scope, stops.ending(a_call(), scope) as stopped:
            stops_of(tmp_path).add(name, content)
            with anyio.fail_after(5):
                await anyio.sleep_forever()
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


def _full(monkeypatch: pytest.MonkeyPatch, *, also_empty: bool) -> None:
    make = SecretDirectory.make

    def refuse(self: SecretDirectory, name: str, content: bytes) -> bool:
        if content or also_empty:
            problem = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise self._failure(self.path / name, f"it cannot be written: {problem.strerror}", "Free space.")
        return make(self, name, content)

    monkeypatch.setattr(SecretDirectory, "make", refuse)


async def test_a_watch_rules_stop_is_recorded_before_it_acts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And acts all the same where it cannot be recorded, or has no room on the disk."""
    async with obeying(tmp_path) as stops:
        seen: list[int] = []
        add = stops._files.add

        def noted(name: str, content: bytes, *, instead: bytes | None = None) -> bool:
            seen.append(len(log_lines(tmp_path / "audit")))
            return add(name, content, instead=instead)

        monkeypatch.setattr(stops._files, "add", noted)
        await stops.make("run", NAMES["run"], because="it found one", by="watch:canary")
        assert seen == [1]
        assert b'"kind":"stop.made"' in log_lines(tmp_path / "audit")[0]
        assert stops.refusal(a_call()) is not None
        assert stops.refusal(a_call(run=None)) is None
        monkeypatch.undo()
        _full(monkeypatch, also_empty=True)
        stops._audit._unusable = "the disk is full"
        await stops.make("tool", "run_python", because="it found one", by="watch:canary")
        assert stops.refusal(a_call(run=None)) is not None
        stops._audit._unusable = None


# What becomes of whole calls.


async def _submitted(scene: Scene, principal: str, ended: list[CallResult], **arguments: Any) -> None:
    who = Principal(id=principal, transport="cli")
    ended.append(await scene.broker.submit(who, "run_python", {**ARGUMENTS, **arguments}, Heard()))


async def test_running_and_waiting_calls_end_as_refusals_on_record(scene: Scene, tmp_path: Path) -> None:
    """One runs and one waits for its turn: both are refused by the stop; a third, of somebody else's, is served."""
    (tmp_path / "state").mkdir()
    async with obeying(tmp_path / "state") as stops:
        broker = replace(
            scene.broker, governance=replace(scene.broker.governance, stops=stops), admission=Admission(running=1)
        )
        scene = replace(scene, broker=broker)
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


class _Asks:
    """Approvals where somebody is to be asked, who never answers."""

    def __init__(self) -> None:
        self.waiting = anyio.Event()

    async def consult(self, _proposal: object, _settled: object) -> object:
        """Somebody is to be asked."""
        return self

    async def settle(self, _question: object, _listener: object) -> None:
        """Nobody answers."""
        self.waiting.set()
        await anyio.sleep_forever()


async def test_a_call_that_waits_for_a_person_ends_too(scene: Scene, tmp_path: Path) -> None:
    """As a refusal by the stop, on record; the control is that it waits until then."""
    (tmp_path / "state").mkdir()
    async with obeying(tmp_path / "state") as stops:
        asks = _Asks()
        rights = replace(
            scene.broker.governance.rights_of(Principal(id="local:1", transport="cli")), approvals=cast("Any", (1,))
        )
        governance = replace(
            scene.broker.governance, stops=stops, approvals=cast("Any", asks), rights_of=lambda _: rights
        )
        scene = replace(scene, broker=replace(scene.broker, governance=governance))
        ended: list[CallResult] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_submitted, scene, "local:1", ended)
            with anyio.fail_after(10):
                await asks.waiting.wait()
            assert ended == []
            put(tmp_path / "state", a_stop("tool"))
        assert ended[0].structured["refused"]["rule"] == "stop"
        assert [(each.kind, each.effect) for each in scene.audit.events] == [("call.decided", "deny")]


# The command line.


def run(place: Path, *words: str) -> tuple[int, str]:
    """One command on the state directory."""
    found = CliRunner().invoke(main, [*words, "--state-dir", str(place)])
    return found.exit_code, found.output


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state directory that nobody has used."""
    return tmp_path / "state"


def test_stopping_listing_and_resuming_are_on_record(state: Path) -> None:
    """Two events that say what, why and who; the log is whole."""
    status, text = run(state, "stop", "--tool", "run_python", "--because", "it went\x1b[2J wild", "--json")
    found = json.loads(text)
    assert (status, found["recorded"], found["everything"]) == (OK, True, False)
    identity = found["stop"]["id"]
    assert found["stop"]["because"] == "it went\\x1b[2J wild"
    status, text = run(state, "stops", "list")
    assert status == OK
    assert identity in text
    assert "tool run_python" in text
    assert run(state, "resume", identity) == (OK, "1 stop lifted.\n")
    assert json.loads(run(state, "stops", "list", "--json")[1]) == {"stops": [], "damaged": []}
    records = [json.loads(line) for line in log_lines(state / "audit")]
    assert [each["kind"] for each in records] == ["stop.made", "stop.lifted"]
    assert records[0]["data"]["stop"] == records[1]["data"]["stop"] == identity
    assert verify(state / "audit").ok


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("stop", "--because", "x"), "Say what to stop"),
        (("stop", "--all", "--tool", "run_python", "--because", "x"), "Say what to stop"),
        (("stop", "--all"), "--because"),
        (("stop", "--all", "--because", " "), "1 to 500 characters"),
        (("stop", "--tool", "run_pyton", "--because", "x"), "there are fetch_url"),
        (("stop", "--call", "last", "--because", "x"), "a call's id"),
        (("stop", "--run", "r_1", "--because", "x"), "a run's id"),
        (("stop", "--principal", "ci", "--because", "x"), "token:ci"),
        (("stop", "--workflow", "No!", "--because", "x"), "name of a workflow"),
        (("resume",), "Name one stop"),
        (("resume", "x", "--all"), "Name one stop"),
        (("resume", "s_1"), "There is no stop s_1"),
    ],
)
def test_a_slip_stops_nothing_and_says_what_to_write(words: tuple[str, ...], told: str, state: Path) -> None:
    """A stop that names nobody would be believed."""
    status, text = run(state, *words)
    assert status == USAGE
    assert told in text
    assert stops_of(state).read().items == ()


def test_a_stop_that_cannot_be_recorded_still_stops_and_says_so(state: Path) -> None:
    """The log's place is taken by a file; lifting it needs the record, and waits for that."""
    state.mkdir(mode=0o700)
    (state / "audit").write_text("")
    status, text = run(state, "stop", "--all", "--because", "now")
    assert status == OK
    assert "not in the audit log" in text
    (stop,) = stops_of(state).read().items
    assert run(state, "resume", stop.id)[0] == UNAVAILABLE
    assert stops_of(state).read().items == (stop,)
    (state / "audit").unlink()
    assert run(state, "resume", "--all")[0] == OK


def test_a_log_that_does_not_answer_holds_no_stop_up(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that hangs is not waited for longer than the bound."""
    from glovebox_server.cli.actions.governance import stops as commands  # noqa: PLC0415 - its bound is changed

    monkeypatch.setattr(commands, "audit_log", lambda _settings: time.sleep(1))
    monkeypatch.setattr(commands, "RECORD_SECONDS", 0.05)
    began = time.monotonic()
    status, text = run(state, "stop", "--all", "--because", "now")
    assert time.monotonic() - began < 0.8
    assert status == OK
    assert "did not answer in time" in text
    assert len(stops_of(state).read().items) == 1


def test_where_the_disk_is_full_everything_is_stopped_instead(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without content needs no room; the control is a disk with room, where one tool is."""
    _full(monkeypatch, also_empty=False)
    status, text = run(state, "stop", "--tool", "run_python", "--because", "now")
    assert status == OK
    assert "so everything is" in text
    status, text = run(state, "stops", "list")
    assert status == UNAVAILABLE
    assert "Everything is stopped" in text
    monkeypatch.undo()
    assert run(state, "resume", "--all") == (OK, "1 stop lifted.\n")
    assert run(state, "stops", "list") == (OK, "0 stops in force.\n")


FULL_DISK = """
import errno, os, sys
from click.testing import CliRunner
from glovebox_server.cli.main import main
place = sys.argv[1]
filler = os.open(place + "/filler", os.O_WRONLY | os.O_CREAT, 0o600)
try:
    while True:
        os.write(filler, bytes(512))
except OSError as problem:
    assert problem.errno == errno.ENOSPC
def run(*words):
    found = CliRunner().invoke(main, [*words, "--state-dir", place + "/state"])
    print(found.exit_code, found.output)
    return found
os.mkdir(place + "/state", 0o700)
assert "so everything is" in run("stop", "--tool", "run_python", "--because", "now").output
assert "Everything is stopped" in run("stops", "list").output
os.ftruncate(filler, 0)
assert run("resume", "--all").exit_code == 0
assert run("stop", "--tool", "run_python", "--because", "now").exit_code == 0
assert "tool run_python" in run("stops", "list").output
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_disk_of_its_own_has_room_for_a_stop(tmp_path: Path) -> None:
    """A real one; the control is the same command once there is room."""
    place = tmp_path / "small"
    place.mkdir(mode=0o700)
    script = f'mount -t tmpfs -o size=512k,mode=700 none {place} && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", script, "sh", sys.executable, "-c", FULL_DISK, str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_where_nothing_can_be_made_the_command_fails(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not be believed; the control is the test above."""
    _full(monkeypatch, also_empty=True)
    found = CliRunner().invoke(main, ["stop", "--all", "--because", "now", "--state-dir", str(state)])
    assert found.exit_code == UNAVAILABLE


def test_there_are_never_more_stops_than_are_looked_at(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is refused with what to do; the control is the last that fits."""
    state.mkdir(mode=0o700)
    files = stops_of(state)
    files._most = 2
    for _ in range(2):
        stop = a_stop()
        files.add(stop.id, stop.encoded())
    with pytest.raises(SecretUnusable, match="2 files already"):
        files.add("s_" + "2" * 26, b"")


KILLED = """
import os, signal, sys
from glovebox_server.governance.files import Files
Files.add = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
from glovebox_server.cli.entry import run
sys.argv = ["glovebox", "stop", "--all", "--because", "now", "--state-dir", sys.argv[1]]
sys.exit(run())
"""


def test_killed_between_the_record_and_the_act_it_is_made_again(state: Path) -> None:
    """The record is there and no stop: never the other way round, and nothing is in the next one's way."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(state)], check=False, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert b'"kind":"stop.made"' in log_lines(state / "audit")[-1]
    assert stops_of(state).read().items == ()
    assert run(state, "stop", "--all", "--because", "again")[0] == OK
    assert len(stops_of(state).read().items) == 1
    assert verify(state / "audit").ok
