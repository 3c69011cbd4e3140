"""Budgets in their file, exact whatever happens between; and their time, whatever is done to the clocks."""

import json
import subprocess  # noqa: TID251 - whole processes, to be killed
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fixtures.draws import draws

from glovebox_profiles.policy.model import Budget, Rate
from glovebox_sandboxes.contract.errors import Refusal
from glovebox_server.errors import StoreError
from glovebox_server.guards.budgets import store
from glovebox_server.guards.budgets.spending import (
    LENGTH_MS,
    Amounts,
    Clocks,
    Every,
    Funds,
    Spender,
    advanced,
    all_lines,
    lines_of,
    little,
    read_clocks,
    refusal,
    window,
    worst_case,
)
from glovebox_server.guards.budgets.store import Ledger, ReservationRequest
from glovebox_server.stores import database
from glovebox_server.stores.database import Database

T = TypeVar("T")
HOUR, DAY = LENGTH_MS["hour"], LENGTH_MS["day"]
NOW = 1_800_000_000_000
ME = Spender(principal="token:a", run="r_1", workflow="", tool="run_python")
WORST = {"calls": 1, "failures": 1, "wall_seconds": 10_000, "cpu_seconds": 5_000, "disclosed_bytes": 1_000,
         "fetched_bytes": 0, "connections": 0, "artifacts": 4}  # fmt: skip


class Kept:
    def __init__(self, kept: Database) -> None:
        self.kept = kept
        self.passed = 0
        self.boot = "a"
        self.calls = 0

    def clocks(self) -> Clocks:
        return Clocks(wall=NOW + self.passed, boot=self.boot, since_boot=self.passed)

    def do(self, work: Callable[..., T], **given: Any) -> T:
        return self.kept.transact_now(lambda connection: work(Ledger(connection, self.clocks()), **given))

    def reserve(self, *budgets: Budget, spender: Spender = ME, worst: Amounts = WORST) -> ReservationRequest | Refusal:
        self.calls += 1
        lines = lines_of(budgets, spender)
        asked = ReservationRequest(call_id=f"c_{self.calls}", spender=spender, lines=lines, worst=worst)
        found = self.do(Ledger.reserve, server="s", asked=asked)
        return found if isinstance(found, Refusal) else asked

    def settle(self, asked: ReservationRequest | Refusal, **spent: int) -> None:
        assert isinstance(asked, ReservationRequest)
        self.do(Ledger.settle, call_id=asked.call_id, spent={"calls": 1, **spent})

    def left(self, *budgets: Budget, spender: Spender = ME) -> dict[str, float]:
        found = self.do(Ledger.left, lines=lines_of(budgets, spender))
        return {f"{each.budget} {each.what}": each.left for each in found}


def _rows(kept: Kept, query: str) -> Any:
    return kept.do(lambda it: it.connection.execute(query).fetchall())


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    with database.opened(tmp_path / "governance" / store.NAME, store.SCHEMA) as found:
        yield Kept(found)


def budget(
    name: str = "b", *, per: Any = "principal", every: Any = "hour", tool: str | None = None, **of: Any
) -> Budget:
    return Budget(name=name, per=per, every=every, tool=tool, **of)


def test_a_refusal_names_the_budget_and_what_is_left_of_the_others_and_when_it_refills(kept: Kept) -> None:
    few, more = budget("calls-an-hour", calls=1), budget("cpu-a-day", every="day", cpu_seconds=60)
    kept.settle(kept.reserve(few, more), cpu_seconds=1_500)
    kept.passed = 50 * 60_000
    refused = kept.reserve(few, more)
    assert refused == Refusal(
        rule="budget.calls-an-hour",
        reason="Of the budget calls-an-hour 0 of 1 calls are left.",
        hint="It refills in 10 min, at 2027-01-15T09:00:00Z. Left of the others: cpu-a-day 58.5 of 60 cpu seconds.",
    )


@pytest.mark.parametrize("order", [1, -1])
def test_where_one_budget_refuses_nothing_is_taken_of_another(kept: Kept, order: int) -> None:
    both = [budget("one", calls=1), budget("many", calls=100)][::order]
    kept.settle(kept.reserve(*both))
    assert isinstance(kept.reserve(*both), Refusal)
    assert kept.left(*both) == {"one calls": 0, "many calls": 99}
    asked = ReservationRequest(call_id="c", spender=ME, lines=lines_of(both[:1], ME), worst={"connections": 1})
    assert kept.do(Ledger.spend, asked=asked) is None
    assert kept.left(budget(both[0].name, connections=4)) == {f"{both[0].name} connections": 4}  # unbounded until now


def test_calls_in_flight_hold_the_most_they_can_take(kept: Kept) -> None:
    """Two of ten seconds fit into twenty-five; a third fits once one of them gave back what it did not use."""
    seconds = budget(wall_seconds=25)
    one, _two = kept.reserve(seconds), kept.reserve(seconds)
    third = kept.reserve(seconds)
    assert isinstance(third, Refusal)
    assert "5 of 25 wall seconds are left, and this call may take 10." in third.reason
    assert "Calls under way hold 20 and give back what they do not use." in third.hint
    assert "A shorter timeout_seconds takes less." in third.hint
    kept.settle(one, wall_seconds=100)
    assert kept.left(seconds) == {"b wall_seconds": 14.9}
    assert isinstance(kept.reserve(seconds), ReservationRequest)


def test_of_bytes_a_call_may_have_the_rest_and_no_second_one_beside_it(kept: Kept) -> None:
    """A call needs one byte left, not its worst case; two at one time cannot both have the rest."""
    rest = budget(disclosed_bytes=100)
    one = kept.reserve(rest)
    assert isinstance(kept.reserve(rest), Refusal)
    kept.settle(one, disclosed_bytes=99)
    two = kept.reserve(rest)
    kept.settle(two, disclosed_bytes=500)
    assert kept.left(rest) == {"b disclosed_bytes": 0}
    assert isinstance(kept.reserve(rest), Refusal)


def test_what_a_call_cannot_spend_refuses_it_not(kept: Kept) -> None:
    """A tool without a network goes on where the connections are spent; one with it is refused."""
    few = budget(connections=1)
    online = {**WORST, "connections": 5}
    kept.settle(kept.reserve(few, worst=online), connections=1)
    assert isinstance(kept.reserve(few, worst=online), Refusal)
    assert isinstance(kept.reserve(few), ReservationRequest)


@pytest.mark.parametrize(
    ("per", "shared"),
    [("principal", {"run", "tool", "workflow"}), ("run", {"tool", "workflow"}), ("tool", {"run", "workflow"}),
     ("workflow", {"principal", "run", "tool"})],
)  # fmt: skip
def test_each_has_a_budget_of_its_own(per: str, shared: set[str], kept: Kept) -> None:
    one = budget(per=per, calls=1)
    mine = replace(ME, workflow="release")
    kept.settle(kept.reserve(one, spender=mine))
    for name in ("principal", "run", "tool", "workflow"):
        other = Spender(**{**{each: getattr(mine, each) for each in mine.__slots__}, name: "other"})
        assert kept.left(one, spender=other) == {"b calls": 0 if name in shared else 1}, name


def test_who_works_in_no_workflow_shares_its_budget_with_nobody(kept: Kept) -> None:
    """Nor with a workflow that is named as the caller is; the controls are its own other runs and tools."""
    one = budget(per="workflow", calls=1)
    kept.settle(kept.reserve(one))
    for other in (replace(ME, principal="token:b"), replace(ME, principal="token:b", workflow=ME.principal)):
        assert kept.left(one, spender=other) == {"b calls": 1}
    assert kept.left(one, spender=replace(ME, run="r_2", tool="other")) == {"b calls": 0}


def test_a_call_that_has_taken_something_takes_nothing_more_before_it_is_settled(kept: Kept) -> None:
    """The store says so; the control is the same call afterwards."""
    ten = budget(calls=10)
    asked = kept.reserve(ten)
    kept.calls -= 1
    with pytest.raises(StoreError, match="c_1 took before is not settled"):
        kept.reserve(ten)
    assert kept.left(ten) == {"b calls": 9}
    kept.settle(asked)
    kept.calls -= 1
    kept.settle(kept.reserve(ten))
    assert kept.left(ten) == {"b calls": 8}


def test_a_new_run_has_not_the_principals_budget_anew(kept: Kept) -> None:
    own, all_ = budget("run", per="run", every="run", calls=2), budget("all", calls=3)
    for _ in range(2):
        kept.settle(kept.reserve(own, all_))
    assert isinstance(kept.reserve(own, all_), Refusal)
    anew = Spender(principal=ME.principal, run="r_2", workflow="", tool="run_python")
    kept.settle(kept.reserve(own, all_, spender=anew))
    refused = kept.reserve(own, all_, spender=anew)
    assert isinstance(refused, Refusal)
    assert refused.rule == "budget.all"


def test_a_runs_budget_does_not_refill_and_says_so(kept: Kept) -> None:
    own = budget(per="run", every="run", calls=3)
    for _ in range(3):
        kept.settle(kept.reserve(own))
        kept.passed += 6 * LENGTH_MS["day"]
        kept.do(Ledger.tidy, is_gone=lambda _: False)
    refused = kept.reserve(own)
    assert isinstance(refused, Refusal)
    assert refused.hint == "It does not refill within this run."


def test_a_call_counts_once_and_for_its_tool_alone(kept: Kept) -> None:
    """What failed is tried again, and may have been done."""
    ten = budget(calls=10)
    asked = kept.reserve(ten)
    kept.settle(asked)
    kept.settle(asked)
    assert kept.left(ten) == {"b calls": 9}
    reads = budget("reads", tool="read_workspace_file", calls=1)
    kept.settle(kept.reserve(reads))
    reading = Spender(principal=ME.principal, run=ME.run, workflow="", tool="read_workspace_file")
    kept.settle(kept.reserve(reads, spender=reading))
    assert isinstance(kept.reserve(reads, spender=reading), Refusal)
    assert isinstance(kept.reserve(reads), ReservationRequest)


def test_a_window_that_is_over_when_a_call_ends_is_left_alone(kept: Kept) -> None:
    ten = budget(every="minute", calls=10)
    asked = kept.reserve(ten)
    kept.passed = 120_000
    kept.do(Ledger.tidy, is_gone=lambda _: False)
    kept.settle(asked)
    assert kept.left(ten) == {"b calls": 10}


def test_calls_of_a_dead_server_stay_spent(kept: Kept) -> None:
    """At the most they could take; those of a living one go on, and its end gives back the rest."""
    seconds = budget(wall_seconds=100, calls=10)
    asked = kept.reserve(seconds)
    counted = "SELECT calls, lost FROM usage"
    kept.do(Ledger.tidy, is_gone=lambda _: False)
    assert _rows(kept, counted) == []
    kept.do(Ledger.tidy, is_gone=lambda server: server == "s")
    assert kept.left(seconds) == {"b wall_seconds": 90, "b calls": 9}
    kept.settle(asked)
    assert kept.left(seconds) == {"b wall_seconds": 90, "b calls": 9}
    assert _rows(kept, counted) == [(1, 1)]


def test_little_is_less_than_a_fifth() -> None:
    """What is bounded and not spent is not little; at a fifth nothing is said of it, beside what is."""
    line, once = lines_of([budget(tool=ME.tool, calls=5, artifacts=5), budget(calls=1)], ME)
    granted = Funds(line=line, left={"calls": 5, "artifacts": 5}, refills=NOW + HOUR)
    assert [each.what for each in little(granted, {"calls": 4, "artifacts": 4})] == []
    (low,) = little(granted, {"calls": 4, "artifacts": 5})
    assert (low.what, low.tool, low.left, low.of, low.refills) == ("artifacts", ME.tool, 0, 5, "2027-01-15T09:00:00Z")
    assert little(replace(granted, line=once, left={"calls": 1}), {"artifacts": 5}) == []


_LIMITS = SimpleNamespace(wall_seconds=30, cpu_seconds=10, stream=1_000, output=SimpleNamespace(files=7))


@pytest.mark.parametrize(
    ("mode", "files", "seconds", "more"),
    [
        ("none", "", None, {}),
        ("none", "", 2.5, {"wall_seconds": 2_500}),
        ("none", "", 31, {}),
        ("proxy", "", None, {"connections": 3, "fetched_bytes": 150}),
        ("none", "output", None, {"artifacts": 7}),
        ("none", "scan", None, {}),
        ("none", "output scan", None, {"artifacts": 7, "wall_seconds": 50_000, "cpu_seconds": 30_000}),
    ],
)
def test_the_most_that_a_call_can_spend_is_what_its_profile_allows(
    mode: str, files: str, seconds: float | None, more: Amounts
) -> None:
    """The time that it asks for at most, and that of scanning, which uses a processor; nothing of what it has not."""
    profile = SimpleNamespace(
        limits=_LIMITS,
        network=SimpleNamespace(mode=mode, max_connections=3, max_bytes=50),
        files=SimpleNamespace(output="output" in files, scan="scan" in files),
    )
    least = {"calls": 1, "failures": 1, "wall_seconds": 30_000, "cpu_seconds": 10_000, "disclosed_bytes": 2_000,
             "fetched_bytes": 0, "connections": 0, "artifacts": 0}  # fmt: skip
    assert worst_case(cast("Any", profile), {"timeout_seconds": seconds}) == {**least, **more}


def test_all_that_bounds_a_caller_is_listed_once_for_each_tool_that_it_counts() -> None:
    """And each rate of a host, for its principal."""
    budgets = [budget("all", calls=1), budget("each", per="tool", calls=2), budget("reads", tool="read", calls=3)]
    lines = all_lines(budgets, [Rate(host="a.example", connections=4, every="minute")], ME, ["run", "read"])
    assert [(each.name, each.per, each.every, each.tool, each.key, each.limits) for each in lines] == [
        ("all", "principal", "hour", None, "token:a", {"calls": 1}),
        ("each", "tool", "hour", "run", "run token:a", {"calls": 2}),
        ("each", "tool", "hour", "read", "read token:a", {"calls": 2}),
        ("reads", "principal", "hour", "read", "token:a", {"calls": 3}),
        ("a.example every minute", "principal", "minute", None, "token:a", {"connections": 4}),
    ]


@draws(40)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("reserve"), st.integers(0, 3)),
            st.tuples(st.just("settle"), st.integers(0, 20)),
            st.tuples(st.just("wait"), st.integers(0, 90_000)),
            st.tuples(st.just("tidy"), st.just(0)),
        ),
        max_size=40,
    )
)
def test_each_window_has_what_its_own_calls_spent(steps: list[tuple[str, int]]) -> None:
    """Whatever the order: a call is refused where the most that it can take is not left, and nowhere else."""
    three = budget(every="minute", calls=3, wall_seconds=25)
    with (
        TemporaryDirectory() as directory,
        database.opened(Path(directory, "governance", store.NAME), store.SCHEMA) as found,
    ):
        kept = Kept(found)
        under_way: list[tuple[ReservationRequest, int]] = []
        calls, wall = Counter[int](), Counter[int]()
        for what, n in steps:
            now = kept.passed // 60_000
            if what == "reserve":
                asked = kept.reserve(three)
                assert isinstance(asked, ReservationRequest) == (calls[now] < 3 and wall[now] <= 15_000)
                if isinstance(asked, ReservationRequest):
                    under_way.append((asked, now))
                    calls[now] += 1
                    wall[now] += 10_000
            elif what == "settle" and under_way:
                asked, began = under_way.pop(n % len(under_way))
                kept.settle(asked, wall_seconds=n * 500)
                wall[began] += n * 500 - 10_000
            elif what == "wait":
                kept.passed += n
            elif what == "tidy":
                kept.do(Ledger.tidy, is_gone=lambda _: False)
            now = kept.passed // 60_000
            assert kept.left(three) == {"b calls": 3 - calls[now], "b wall_seconds": (25_000 - wall[now]) / 1000}


def test_old_usage_is_kept_by_the_day_and_then_not_at_all(kept: Kept) -> None:
    """After the 32nd whole day, and after 400: the control of each is the last moment before."""
    for _ in range(3):
        kept.settle(kept.reserve(), wall_seconds=5)
        kept.passed += HOUR
    midnight = NOW - 8 * HOUR
    hours = [(NOW + n * HOUR, 1, 1, 5) for n in range(3)]
    for days, rows in ((33, [(midnight, 24, 3, 15)]), (400, [])):
        kept.passed = days * DAY - 8 * HOUR - (days == 33)
        for left in (hours, rows):
            kept.do(Ledger.tidy, is_gone=lambda _: False)
            assert _rows(kept, "SELECT since, hours, calls, wall_seconds FROM usage ORDER BY since") == left
            kept.passed += 1
        hours = rows


def test_of_runs_and_of_usage_only_so_much_is_kept(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """A principal's longest idle runs go, and the oldest usage; what stays is another principal's run."""
    monkeypatch.setattr(store, "MAX_RUNS", 2)
    monkeypatch.setattr(store, "MAX_USAGE", 3)
    usage = []
    for key in ("r_1 token:a", "r_2 token:a", "r_3 token:a", "r_1 token:b"):
        run, principal = key.split()
        spender = replace(ME, run=run, principal=principal)
        kept.settle(kept.reserve(budget(per="run", every="run", calls=9), spender=spender))
        kept.do(Ledger.tidy, is_gone=lambda _: False)
        usage.append(len(_rows(kept, "SELECT since FROM usage")))
        kept.passed += HOUR
    assert usage == [1, 2, 3, 2]
    assert _rows(kept, "SELECT min(since) FROM usage") == [(NOW + 2 * HOUR,)]
    assert [key for (key,) in _rows(kept, "SELECT key FROM spent ORDER BY until")] == [
        "r_2 token:a", "r_3 token:a", "r_1 token:b"
    ]  # fmt: skip


def test_the_time_is_kept_once_a_second_and_the_file_tidied_once_a_minute(kept: Kept) -> None:
    """Within a boot, by the clock that nobody sets; after a reboot the time is kept at once."""
    for passed, boot, written, untidy in (
        (0, "a", 0, True), (999, "a", 0, False), (1_000, "a", 1_000, False), (1_001, "b", 1_001, False),
        (59_999, "b", 59_999, False), (60_000, "b", 59_999, True), (119_999, "b", 119_999, False),
    ):  # fmt: skip
        kept.passed, kept.boot = passed, boot
        assert kept.do(lambda it: it.is_untidy) is untidy
        kept.reserve()
        assert _rows(kept, "SELECT time, boot FROM clock") == [(NOW + written, boot)]
        if untidy:
            kept.do(Ledger.tidy, is_gone=lambda _: False)


@pytest.mark.parametrize(
    ("ms", "said"),
    [(99_000, "99 s"), (99_001, "2 min"), (120_001, "3 min"), (HOUR, "1 h 0 min"), (5 * HOUR // 2, "2 h 30 min")],
)
def test_a_caller_reads_no_shorter_time_than_it_must_wait(ms: int, said: str) -> None:
    (spent,) = Funds(line=lines_of([budget(calls=1)], ME)[0], left={"calls": 0}, refills=NOW).remainders()
    assert f"It refills in {said}, at 2027-01-15T08:00:00Z." in refusal("calls", 1, [spent], 0, ms).hint


RACE = """
import json, pathlib, sys
from glovebox_server.stores import database
from glovebox_server.guards.budgets import store
from glovebox_server.guards.budgets.spending import read_clocks
from tests.unit.test_budget_store import ME, WORST, budget, lines_of
from glovebox_server.guards.budgets.store import Ledger, ReservationRequest
ten = budget(per="principal", every="day", calls=10)
with database.opened(pathlib.Path(sys.argv[1]) / store.NAME, store.SCHEMA, lock_wait=60) as kept:
    print("ready", flush=True)
    sys.stdin.readline()
    for n in range(int(sys.argv[3])):
        asked = ReservationRequest(call_id=f"c_{sys.argv[2]}_{n}", spender=ME, lines=lines_of([ten], ME), worst=WORST)
        found = kept.transact_now(lambda c: Ledger(c, read_clocks()).reserve("s", asked))
        print(json.dumps(isinstance(found, list)), flush=True)
"""


def _racer(directory: Path, number: int, times: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RACE, str(directory), str(number), str(times)]
    cwd = Path(__file__).parents[2]
    found = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=cwd)
    assert found.stdout is not None
    assert found.stdout.readline() == "ready\n"
    return found


@pytest.mark.long
def test_a_race_of_sixty_four_for_ten_spends_ten(tmp_path: Path) -> None:
    directory = tmp_path / "governance"
    running = [_racer(directory, number, 32) for number in range(2)]
    for each in running:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    answers = [json.loads(line) for each in running for line in each.communicate(timeout=60)[0].split()]
    assert (len(answers), sum(answers)) == (64, 10)


TIMES = st.integers(0, 1 << 45)
EVERY: st.SearchStrategy[Every] = st.sampled_from(["minute", "hour", "day"])


def clocks(wall: int = NOW, since_boot: int = 1_000, boot: str = "a") -> Clocks:
    return Clocks(wall=wall, boot=boot, since_boot=since_boot)


@given(every=EVERY, time=TIMES)
def test_windows_lie_side_by_side(every: Every, time: int) -> None:
    """Each time is in one window, the next one begins where it ends, and it is as long as it says."""
    start, end = window(every, time)
    assert start <= time < end == start + LENGTH_MS[every]
    assert window(every, end)[0] == end
    assert window(every, end - 1) == (start, end)


def test_windows_begin_on_the_hour_and_the_clocks_of_this_machine_can_be_read() -> None:
    assert window("hour", 3 * HOUR + 5)[0] == 3 * HOUR
    assert window("day", 3 * DAY + 5 * HOUR)[0] == 3 * DAY
    assert window("run", 7)[0] == window("run", NOW)[0] == 0
    one, two = read_clocks(), read_clocks()
    assert one.boot == two.boot
    assert one.since_boot <= two.since_boot


@given(st.lists(st.tuples(TIMES, st.integers(0, 10 * DAY))))
def test_within_a_boot_time_is_that_of_no_wall_clock(steps: list[tuple[int, int]]) -> None:
    """Set forward, set back, over and over: as much time passes as passed."""
    mark, since_boot, passed = advanced(None, clocks()), 1_000, 0
    for wall, step in steps:
        since_boot, passed = since_boot + step, passed + step
        mark = advanced(mark, clocks(wall, since_boot))
        assert mark.wall == NOW + passed


@given(st.lists(st.tuples(TIMES, st.integers(0, DAY), st.booleans())))
def test_time_never_goes_back(steps: list[tuple[int, int, bool]]) -> None:
    """Not over reboots either, with whatever wall clock; and it goes on after each."""
    mark, boot, since_boot = advanced(None, clocks()), 0, 1_000
    for wall, step, reboots in steps:
        boot, since_boot = (boot + 1, step) if reboots else (boot, since_boot + step)
        after = advanced(mark, clocks(wall, since_boot, str(boot)))
        assert after.wall >= mark.wall
        mark = after
        assert advanced(mark, clocks(0, since_boot + HOUR, str(boot))).wall == mark.wall + HOUR


@pytest.mark.parametrize("days", [-365, 1])
def test_after_a_reboot_it_is_the_later_of_the_wall_clock_and_the_time_seen(days: int) -> None:
    """So a clock that is set back locks nobody out; time_namespaces(7) can shift that of the boot alone."""
    mark = advanced(None, clocks())
    rebooted = advanced(mark, clocks(NOW + days * DAY, 5, "b"))
    assert rebooted.wall == NOW + max(0, days) * DAY
    assert advanced(rebooted, clocks(NOW - 365 * DAY, 1, "b")).wall == rebooted.wall
