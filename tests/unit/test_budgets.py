"""Budgets on the path of a call: what it may spend is taken before it starts, and what it did not is given back."""

import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from click.testing import CliRunner
from tests.fixtures.brokered import Heard
from tests.fixtures.channels import OUTCOME, Guest
from tests.unit.test_broker import ARGUMENTS, Scene, scene

from glovebox_profiles.policy.model import Budget, Rate
from glovebox_sandboxes.contract.errors import Refusal, SandboxError
from glovebox_server.calls import CallResult, Image, Link, Principal, Text
from glovebox_server.cli.main import main
from glovebox_server.core.call import Attempt, CallDeniedError
from glovebox_server.egress.gate import Traffic
from glovebox_server.errors import StoreError
from glovebox_server.exits import UNAVAILABLE
from glovebox_server.guards.budgets import budgets as budgeting
from glovebox_server.guards.budgets import store
from glovebox_server.guards.budgets.budgets import Budgets, Reservation
from glovebox_server.guards.budgets.spending import Amounts, Clocks, Funds, Spender, lines_of
from glovebox_server.guards.budgets.store import ReservationRequest
from glovebox_server.tools.base import MAX_OUTPUT, ToolResult

__all__ = ["scene"]

ME = Principal(id="token:a", transport="http")
ASKED = ReservationRequest(
    call_id="c", spender=Spender(principal=ME.id, run="", workflow="", tool=""), lines=(),
    worst={"wall_seconds": 30_000, "cpu_seconds": 10_000},
)  # fmt: skip


@dataclass
class Spending:
    scene: Scene
    budgets: Budgets
    state_dir: Path

    async def call(self, principal: Principal = ME, run: str | None = "r_1", **arguments: Any) -> CallResult:
        given = {**ARGUMENTS, **arguments}
        return await self.scene.broker.submit(principal, "run_python", given, Heard(), run=run)

    async def left(self, principal: Principal = ME, run: str | None = "r_1") -> dict[str, float]:
        rights = self.scene.guards.rights_of(principal)
        return {f"{each.budget} {each.what}": each.left for each in await self.budgets.left(principal, run, rights)}


@asynccontextmanager
async def spending(
    scene: Scene, tmp_path: Path, *budgets: Budget, rates: tuple[Rate, ...] = ()
) -> AsyncIterator[Spending]:
    async with budgeting.opened(tmp_path) as found:
        rights = replace(scene.guards.rights_of(ME), budgets=budgets, rates=rates)
        yield Spending(scene.guarded(rights_of=lambda _: rights, budgets=found), found, tmp_path)


def budget(name: str = "b", **of: Any) -> Budget:
    """One of a principal, by the hour, unless told otherwise."""
    return Budget(**{"name": name, "per": "principal", "every": "day", **of})


def refused(result: CallResult) -> str | None:
    found = result.structured.get("refused")
    return found and str(found["rule"])


async def test_what_is_over_is_removed_after_a_call_and_not_before_it(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That looks through all that is kept, once a minute."""
    done: list[str] = []
    for step in ("reserve", "settle", "tidy"):
        real = getattr(store.Ledger, step)

        def noted(*given: Any, real: Any = real, step: str = step, **named: Any) -> Any:
            done.append(step)
            return real(*given, **named)

        monkeypatch.setattr(store.Ledger, step, noted)
    async with spending(scene, tmp_path, budget(calls=9)) as spent:
        for seconds, tidied in ((0, []), (59, []), (60, ["tidy"])):
            now = Clocks(wall=10**12 + seconds * 1000, boot="a", since_boot=seconds * 1000)
            monkeypatch.setattr(spent.budgets, "_clocks", lambda now=now: now)
            await spent.call()
            await spent.budgets.settle()
            await anyio.wait_all_tasks_blocked()
            assert done == ["reserve", "settle", *tidied]
            done.clear()


async def test_a_spent_budget_refuses_on_record_and_starts_nothing(scene: Scene, tmp_path: Path) -> None:
    async with spending(scene, tmp_path, budget(calls=2)) as spent:
        results = [await spent.call() for _ in range(4)]
        assert [refused(each) for each in results] == [None, None, "budget.b", "budget.b"]
        assert scene.driver.opened == 2
        decided = [each for each in scene.audit.events if each.kind == "call.decided"]
        assert [(each.effect, each.rule) for each in decided][2:] == [("deny", "budget.b")] * 2
        assert refused(await spent.call(Principal(id="token:b", transport="http"))) is None
        assert await spent.left() == {"b calls": 0}


def _granted(*names: str, **takes: int) -> list[Funds]:
    """What is left of budgets of one call each."""
    lines = lines_of([budget(name, calls=1) for name in names], ASKED.spender)
    return [Funds(line=line, left={"calls": 1}, refills=None, takes=takes) for line in lines]


def _taken(monkeypatch: pytest.MonkeyPatch, *granted: Funds) -> Reservation:
    """Of 4 s ago."""
    monkeypatch.setattr(anyio, "current_time", lambda: 104.0)
    return Reservation(asked=ASKED, granted=granted, _began=100.0)


def _ran(**more: Any) -> Any:
    limits = SimpleNamespace(processors=2)
    now = {"finished": None, "traffic": None, "is_started": True, "profile": SimpleNamespace(limits=limits)}
    return SimpleNamespace(**{**now, **more})


@pytest.mark.parametrize(
    ("usage", "seconds"),
    [
        ({"wall_ms": 1500, "cpu_ms": 250, "scan_ms": 500}, {"wall_seconds": 2_000, "cpu_seconds": 750}),
        ({"wall_ms": 1500, "cpu_ms": 250}, {"wall_seconds": 1_500, "cpu_seconds": 250}),
        ({"wall_ms": 1500, "cpu_ms": None, "scan_ms": 500}, {"wall_seconds": 2_000, "cpu_seconds": 8_000}),
    ],
)
@pytest.mark.parametrize("failed", [False, True])
def test_a_call_is_charged_what_it_used_and_gave_back(
    usage: dict[str, Any], seconds: dict[str, int], failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scanning too, in both kinds of seconds; where no processor time is known, that of all its processors."""
    link = Link(uri="artifact://f", name="f", media_type="text/csv", bytes=4, sha256="b")
    content = (Text(text="né"), Image(data=b"12345", media_type="image/png"), link)
    reservation = _taken(monkeypatch, *_granted("a", "b"))
    now = _ran(finished=SimpleNamespace(usage=usage), traffic=Traffic(connections=2, received_bytes=30))
    result = CallResult(structured={"kept": 1}, content=content, failed=failed, meta={}, beside=7)
    told = reservation.spent(now, result)
    assert reservation.amounts(now) == {
        "calls": 1, "failures": int(failed), "disclosed_bytes": 3 + 5 + 7, "artifacts": 1, "connections": 2,
        "fetched_bytes": 30, **seconds,
    }  # fmt: skip
    assert told.content == (*content, Text(text="[left of your budgets: a 0 of 1 calls; b 0 of 1 calls]"))
    assert (told.structured["kept"], [each["budget"] for each in told.structured["budget"]]) == (1, ["a", "b"])


@pytest.mark.parametrize(("started", "most"), [(True, {"artifacts": 4, "disclosed_bytes": 0}), (False, {})])
@pytest.mark.parametrize(
    ("passed", "seconds"),
    [(4, {"wall_seconds": 4_000, "cpu_seconds": 8_000}), (5_000, {"wall_seconds": 30_000, "cpu_seconds": 10_000})],
)
def test_a_call_without_an_end_on_record_is_charged_the_most_that_was_taken(
    started: bool, most: Amounts, passed: float, seconds: Amounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what it might have told, once it started, whichever budget took more; of seconds at most those that passed."""
    granted = (*_granted("a", artifacts=4, disclosed_bytes=0), *_granted("b", artifacts=1))
    reservation, now = _taken(monkeypatch, *granted), _ran(is_started=started)
    monkeypatch.setattr(anyio, "current_time", lambda: 100.0 + passed)
    result = CallResult(structured={}, content=(Text(text="x"),), failed=False, meta={})
    assert reservation.spent(now, result) is result
    assert reservation.amounts(now) == {
        **most, "calls": 1, "failures": 1, "connections": 0, "fetched_bytes": 0, **seconds
    }  # fmt: skip


@pytest.mark.parametrize("run", [None, "r_1"])
@pytest.mark.parametrize("workflow", [None, "release"])
async def test_a_caller_is_told_what_its_own_run_and_workflow_have_left(
    run: str | None, workflow: str | None, scene: Scene, tmp_path: Path
) -> None:
    """Also where it names none; the control is another run, and another workflow."""
    each = (budget("run", per="run", every="run", calls=9), budget("flow", per="workflow", calls=9))
    async with spending(scene, tmp_path, *each) as spent:
        me = replace(ME, workflow=workflow)
        await spent.call(me, run=run)
        assert await spent.left(me, run=run) == {"run calls": 8, "flow calls": 8}
        assert await spent.left(replace(ME, workflow="x"), run="r_2") == {"run calls": 9, "flow calls": 9}


async def test_what_is_left_is_told_when_it_is_little(scene: Scene, tmp_path: Path) -> None:
    """As text and as data that fits the result's model; the control is the call before, of which a fifth is left."""
    async with spending(scene, tmp_path, budget("calls-a-day", calls=5)) as spent:
        results = [await spent.call() for _ in range(5)]
    assert ["budget" in each.structured for each in results] == [False] * 4 + [True]
    (low,) = results[4].structured["budget"]
    assert (low["budget"], low["what"], low["left"], low["of"]) == ("calls-a-day", "calls", 0, 5)
    assert low["refills"].endswith("T00:00:00Z")
    assert results[4].content[-1] == Text(text="[left of your budgets: calls-a-day 0 of 5 calls]")
    tool = scene.broker.tools["run_python"]
    assert isinstance(tool.result.model_validate(results[4].structured), ToolResult)


async def test_output_that_is_in_an_artifact_counts_as_if_it_were_told(scene: Scene, tmp_path: Path) -> None:
    """What is cut out is charged when the call ends, with the file that has it; the failure is given back."""

    async def prints(guest: Guest) -> None:
        stream, frames = guest.wire.open("stdout", {})
        await guest.say(frames + guest.wire.data(stream, b"x" * 100_000) + guest.wire.end(stream))
        await guest.done()

    scene.driver.script = prints
    many = budget(calls=9, failures=9, disclosed_bytes=10**6, artifacts=99, wall_seconds=900)
    async with spending(scene, tmp_path, many) as spent:
        before = await spent.left()
        result = await spent.call()
        after = await spent.left()
    (kept,) = result.structured["artifacts"]
    assert kept["bytes"] == 100_000
    assert kept["uri"] in result.structured["truncated"]
    told = sum(len(each.text.encode()) for each in result.content if isinstance(each, Text))
    assert told < 17_000
    assert before["b disclosed_bytes"] - after["b disclosed_bytes"] == told + 100_000 - MAX_OUTPUT
    used = [before[f"b {name}"] - after[f"b {name}"] for name in ("calls", "failures", "artifacts")]
    assert used == [1, 0, 1]
    assert 0 <= before["b wall_seconds"] - after["b wall_seconds"] < 1


async def test_failures_are_counted_and_refused(scene: Scene, tmp_path: Path) -> None:
    """Of two that may fail, two calls at one time are all that may be under way."""
    scene.driver.script = lambda guest: guest.done({**OUTCOME, "status": 1})
    async with spending(scene, tmp_path, budget(failures=2)) as spent:
        assert [refused(await spent.call(code=str(n))) for n in range(3)] == [None, None, "budget.b"]


async def test_a_cancelled_call_counts_the_most_that_it_could_have_told(scene: Scene, tmp_path: Path) -> None:
    """Else whoever cancels each call would read for nothing; the time is what it took."""
    began = anyio.Event()

    async def hang(guest: Guest) -> None:
        began.set()
        await anyio.sleep_forever()

    scene.driver.script = hang
    async with spending(scene, tmp_path, budget(calls=9, disclosed_bytes=10**9, wall_seconds=900)) as spent:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(spent.call)
            await began.wait()
            tasks.cancel_scope.cancel()
        left = await spent.left()
    profile = scene.guards.rights_of(ME).profiles["run_python"]
    assert left["b calls"] == 8
    assert left["b disclosed_bytes"] == 10**9 - 2 * profile.limits.stream
    assert left["b wall_seconds"] > 899


async def test_a_call_whose_sandbox_died_counts_the_most_that_it_could_have_told(scene: Scene, tmp_path: Path) -> None:
    """As a cancelled one: what it printed may have been read; one failure, and the time at most that it could take."""

    async def dies(guest: Guest) -> None:
        guest.channel.to_host.close()

    scene.driver.script = dies
    every = budget(calls=9, failures=9, disclosed_bytes=10**9, artifacts=999, wall_seconds=900)
    async with spending(scene, tmp_path, every) as spent:
        with pytest.raises(SandboxError, match="ended without an outcome"):
            await spent.call()
        left = await spent.left()
    limits = scene.guards.rights_of(ME).profiles["run_python"].limits
    assert (left["b calls"], left["b failures"]) == (8, 8)
    assert left["b disclosed_bytes"] == 10**9 - 2 * limits.stream
    assert left["b artifacts"] == 999 - limits.output.files
    assert left["b wall_seconds"] > 899


async def test_a_call_that_could_not_start_tells_nothing_and_counts_no_more_seconds_than_it_had(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.driver.problem = RuntimeError("no sandbox")
    times = count(anyio.current_time(), 5_000)
    monkeypatch.setattr(anyio, "current_time", lambda: next(times))
    each = budget(calls=9, failures=9, disclosed_bytes=10**9, artifacts=9, wall_seconds=10_000)
    async with spending(scene, tmp_path, each) as spent:
        with pytest.raises(RuntimeError, match="no sandbox"):
            await spent.call()
        monkeypatch.undo()
        left = await spent.left()
    seconds = scene.guards.rights_of(ME).profiles["run_python"].limits.wall_seconds
    assert left.pop("b wall_seconds") == 10_000 - seconds
    assert left == {"b calls": 8, "b failures": 8, "b disclosed_bytes": 10**9, "b artifacts": 9}


async def test_a_call_that_is_reserved_and_then_denied_spends_nothing(scene: Scene, tmp_path: Path) -> None:
    """As when somebody is to be asked first; the control is one that runs."""
    async with spending(scene, tmp_path, budget(calls=9)) as spent:
        reserved = spent.budgets.reserved

        @asynccontextmanager
        async def denied(now: Attempt, worst: Amounts | None = None) -> AsyncIterator[Reservation]:
            async with reserved(now, worst) as found:
                if found.asked.lines:
                    raise CallDeniedError(Refusal(rule="test", reason="It is denied.", hint="Ask."))
                yield found

        spent.budgets.reserved = denied  # type: ignore[method-assign]
        assert refused(await spent.call()) == "test"
        assert await spent.left() == {"b calls": 9}
        spent.budgets.reserved = reserved  # type: ignore[method-assign]
        await spent.call()
        assert await spent.left() == {"b calls": 8}


async def test_a_store_that_fails_refuses_calls_with_the_fix_and_forgets_nothing(scene: Scene, tmp_path: Path) -> None:
    """Full here; once there is room again, what was spent is still spent."""
    async with spending(scene, tmp_path, budget(calls=9)) as spent:
        assert refused(await spent.call()) is None
        path = spent.budgets._database.path
        aside = tmp_path / "aside"
        path.rename(aside)
        result = await spent.call()
        assert refused(result) == "store"
        assert "The operator must act." in result.structured["refused"]["hint"]
        assert str(tmp_path) not in str(result.structured)
        assert scene.driver.opened == 1
        aside.rename(path)
        assert refused(await spent.call()) is None
        assert await spent.left() == {"b calls": 7}


async def test_what_was_not_settled_is_settled_later(
    scene: Scene, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller has its result; until then the most that it could spend stays spent."""
    async with spending(scene, tmp_path, budget(wall_seconds=10_000)) as spent:
        path, aside = spent.budgets._database.path, tmp_path / "aside"

        async def loses(guest: Guest) -> None:
            path.rename(aside)
            await guest.done()

        scene.driver.script = loses
        assert not (await spent.call()).failed
        with pytest.raises(StoreError):
            await spent.left()
        assert "stays at the most it could" in caplog.text
        aside.rename(path)
        worst = scene.guards.rights_of(ME).profiles["run_python"].limits.wall_seconds
        with closing(sqlite3.connect(path)) as connection, connection:
            assert connection.execute("SELECT wall_seconds FROM spent").fetchall() == [(worst * 1000,)]
        scene.driver.script = None
        await spent.call()
        assert (await spent.left())["b wall_seconds"] > 9_990


async def test_calls_are_settled_as_they_end_without_being_asked_for(scene: Scene, tmp_path: Path) -> None:
    """Twice, since one task does it for all calls: the file is read here by another connection, and asked nothing."""
    async with spending(scene, tmp_path, budget(wall_seconds=10_000)) as spent:
        with closing(sqlite3.connect(spent.budgets._database.path)) as connection:
            for calls in (1, 2):
                await spent.call()
                with anyio.fail_after(10):
                    while connection.execute("SELECT sum(calls) FROM usage").fetchone() != (calls,):  # noqa: ASYNC110
                        await anyio.sleep(0.01)
                assert connection.execute("SELECT count(*) FROM reserved").fetchone() == (0,)


async def test_a_mistake_while_settling_ends_no_server_and_stays_spent(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller has its result, and the next call runs; the control is what that one gives back."""
    async with spending(scene, tmp_path, budget(wall_seconds=10_000)) as spent:
        with monkeypatch.context() as broken:
            broken.setattr(store.Ledger, "settle", lambda *_: 1 / 0)
            assert not (await spent.call()).failed
            await spent.budgets.settle()
        assert "ZeroDivisionError" in caplog.text
        assert not (await spent.call()).failed
        worst = scene.guards.rights_of(ME).profiles["run_python"].limits.wall_seconds
        assert 9_990 < (await spent.left())["b wall_seconds"] + worst <= 10_000


async def test_calls_of_a_server_that_died_stay_spent(scene: Scene, tmp_path: Path) -> None:
    """Whoever opens the file next finds them, of another boot too; those of a process that lives are left alone."""
    async with spending(scene, tmp_path, budget(calls=9, wall_seconds=10_000)) as spent:
        await spent.call()
        await spent.budgets.settle()
        path = spent.budgets._database.path
        with closing(sqlite3.connect(path)) as connection, connection:
            owner = spent.budgets._server.split(":")
            boots = [(owner[0], owner[3]), (owner[0], "1"), ("another", owner[3])]
            for number, (boot, started) in enumerate(boots):
                mark = ":".join([boot, *owner[1:3], started, owner[4]])
                body = '{"lines": [], "who": ["token:a", "", "run_python"]}'
                connection.execute("INSERT INTO reserved VALUES (?, ?, ?)", (f"c_{number}", mark, body))
            connection.execute("UPDATE clock SET tidied = 0")
        await spent.call()
        await spent.budgets.settle()
        with closing(sqlite3.connect(path)) as connection, connection:
            assert connection.execute("SELECT call FROM reserved").fetchall() == [("c_0",)]
            assert connection.execute("SELECT sum(calls), sum(lost) FROM usage").fetchone() == (4, 2)


async def test_a_host_has_a_rate_of_its_own(scene: Scene, tmp_path: Path) -> None:
    rates = (Rate(host="*.example.org", connections=2, every="minute"),)
    async with spending(scene, tmp_path, rates=rates) as spent:
        connect = partial(spent.budgets.connect, ASKED, rates)
        assert [await connect(f"{each}.example.org") for each in "ab"] == [None, None]
        third = await connect("a.example.org")
        assert isinstance(third, Refusal)
        assert third.rule == "egress.rate"
        assert "*.example.org every minute 0 of 2 connections" in third.reason
        assert await connect("example.com") is None
        path = spent.budgets._database.path
        path.rename(tmp_path / "aside")
        uncounted = await connect("a.example.org")
        assert uncounted is not None
        assert uncounted.rule == "store"
        (tmp_path / "aside").rename(path)
        assert await spent.left() == {"*.example.org every minute connections": 0}


async def test_nothing_is_opened_where_nobody_has_a_budget(scene: Scene, tmp_path: Path) -> None:
    """The control is the file that a budget makes."""
    assert scene.guards.budgets is None
    await scene.call()
    assert not os.path.lexists(tmp_path / "governance")
    async with spending(scene, tmp_path, budget(calls=1)):
        assert os.path.lexists(tmp_path / "governance" / "budgets.sqlite")


@pytest.mark.parametrize("content", [b"", b"no database at all", None])
def test_a_damaged_file_starts_no_server_and_is_left_as_it_is(content: bytes | None, tmp_path: Path) -> None:
    """The operator reads the fix; the control, without a file, starts."""
    (tmp_path / "policy.toml").write_text(POLICY)
    path = tmp_path / "state" / "governance" / "budgets.sqlite"
    if content is not None:
        path.parent.mkdir(parents=True, mode=0o700)
        path.parent.parent.chmod(0o700)
        path.write_bytes(content)
        path.chmod(0o600)
    options = ["--state-dir", str(tmp_path / "state"), "--policy", str(tmp_path / "policy.toml")]
    arguments = ["call", "fetch_url", "--args", '{"url": "https://example.com/"}', *options]
    done = CliRunner().invoke(main, arguments)
    if content is None:
        assert "Refused (role.tools)" in done.stdout
        return
    assert done.exit_code == UNAVAILABLE
    assert "it is damaged" in done.stderr
    assert f"put a whole copy of {path} back" in done.stderr
    assert path.read_bytes() == content


POLICY = """\
version = 1
default = "any"

[roles.any]
tools = ["run_python"]

[[roles.any.budget]]
name = "calls-a-day"
per = "principal"
every = "day"
calls = 1

[[example]]
principal = "token:a"
call = { tool = "fetch_url", arguments = { url = "https://example.com/" } }
expect = "deny"
"""
