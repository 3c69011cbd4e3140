"""``make bench AGAINST=rev`` names what is slower and nothing else: intervals, verdicts, exit code, whose code runs."""

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from rich.console import Console
from tests.perf import idle, peers, sides
from tests.perf.contrast import EXIT_SLOWER, EXIT_UNMEASURED, SLOWER, Contrast, code, contrast, show
from tests.perf.latency import Way, interleaved
from tests.perf.machine import ROOT
from tests.perf.rows import BETWEEN, ROWS, Row, chosen
from tests.perf.series import Series, compared
from tests.perf.sides import NoRevisionError, Side

TIMED = Row(key="r", part="latency", what="", compare="alone")
RATE = Row(key="r", part="load", what="", compare="alone", unit="calls/s")
NOISE = (1.0, 1.01, 0.99, 1.005, 0.995, 1.0, 1.008, 0.992)
"""Of a round, which falls on both; and, turned around, what falls on one alone."""


def series(key: str, values: Sequence[float]) -> Series:
    return Series(key=key, what=key, unit="ms", rounds=tuple((each,) for each in values))


def between(here: Sequence[float], there: Sequence[float], row: Row = TIMED) -> Contrast:
    return contrast(row, {"r here": series("r here", here), "r there": series("r there", there)}, {})


def scaled(by: float, noise: Sequence[float] = NOISE) -> list[float]:
    return [10 * by * each for each in noise]


def test_only_what_is_surely_slower_fails() -> None:
    """A fifth. Not four hundredths, told apart from the same, nor any ratio with noise that straddles the bound."""
    found = between(scaled(1.2, NOISE[::-1]), scaled(1.0))
    assert found.interval is not None
    assert found.interval.low > SLOWER
    assert (found.slower, found.verdict, code([found])) == (True, "SLOWER", EXIT_SLOWER)
    found = between(scaled(1.04, NOISE[::-1]), scaled(1.0))
    assert found.interval is not None
    assert 1 < found.interval.low <= found.interval.high < SLOWER
    assert (found.slower, found.verdict, code([found])) == (False, "worse, not surely by 5%", 0)
    wild = (1.0, 1.6, 0.7, 1.4, 0.8, 1.5, 0.75, 1.2)
    found = between(scaled(1.1, wild), scaled(1.0, wild[::-1]))
    assert found.interval is not None
    assert found.interval.low < SLOWER < found.interval.high
    assert (found.slower, code([found])) == (False, 0)


def test_less_of_a_rate_is_slower_and_a_few_rounds_condemn_nothing() -> None:
    """Student's interval: two rounds with a fifth between them say nothing, two that are alike do."""
    assert between(scaled(0.8), scaled(1.0), RATE).slower
    more = between(scaled(1.2), scaled(1.0), RATE)
    assert (more.slower, more.verdict) == (False, "better")
    assert not between([12.0, 13.5], [10.0, 10.0]).slower
    assert between([12.0, 12.01], [10.0, 10.0]).slower
    alone = between([12.0], [10.0])
    assert (alone.slower, alone.interval, code([alone])) == (False, None, EXIT_UNMEASURED)


def test_the_slowest_are_compared_with_the_slowest() -> None:
    """One in twenty calls that takes twice as long shows at p99 and not at p50."""
    usual = tuple((10.0,) * 20 for _ in range(8))
    tailed = tuple((10.0,) * 19 + (20.0,) for _ in range(8))
    here, there = (Series(key="", what="", unit="ms", rounds=rounds) for rounds in (tailed, usual))
    assert compared(here, there).ratio == 1
    assert compared(here, there, "p99").low == 2


def test_what_is_finer_than_can_be_measured_is_no_difference() -> None:
    row = next(row for row in ROWS if row.key == "idle-bubblewrap")
    low, high = row.floor / 4, row.floor / 2
    values = {f"{row.key} here": series("", [high] * 3), f"{row.key} there": series("", [low, 0.0, low])}
    found = contrast(row, values, {})
    assert (found.slower, found.interval and found.interval.ratio) == (False, 1)
    values[f"{row.key} here"] = series("", [row.floor * 2] * 3)
    assert contrast(row, values, {}).slower
    found = between([1.0] * 8, [0.0] * 8)
    assert "came to nothing" in found.reason
    assert code([found]) == EXIT_UNMEASURED


def test_what_was_not_measured_has_its_side_and_reason_and_a_code() -> None:
    missing = contrast(TIMED, {"r here": series("", [1.0])}, {"r there": "it broke"})
    assert (missing.verdict, missing.reason) == ("not measured", "r there: it broke")
    assert contrast(TIMED, {}, {"r": "no docker"}).reason == "r here: no docker"
    same, slower = between(scaled(1.0), scaled(1.0)), between(scaled(1.2), scaled(1.0))
    assert code([same, missing]) == EXIT_UNMEASURED
    assert code([same, missing, slower]) == EXIT_SLOWER
    assert (code([same]), code([])) == (0, EXIT_UNMEASURED)


def test_the_table_names_what_is_slower_and_what_is_not_measured() -> None:
    rows = [Row(key=key, part="wire", what="", compare="alone") for key in ("fast", "slow", "gone")]
    values = {
        f"{key} {side}": series("", scaled(by))
        for key, side, by in (("fast", "here", 1), ("fast", "there", 1), ("slow", "here", 2), ("slow", "there", 1))
    }
    contrasts = [contrast(row, values, {}) for row in rows]
    console = Console(file=io.StringIO(), width=160)
    show(contrasts, {"revision": "abc", "against": "def"}, console)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().rstrip().splitlines()
    assert "gone not measured: gone here: not measured in this run" in lines
    assert lines[-2:] == ["slower by more than 5%: slow", "not measured: gone"]
    assert json.loads(json.dumps(contrasts[1].as_json()))["slower"] is True


def test_two_revisions_are_compared_by_everything_that_is_ours() -> None:
    keys = [row.key for row in BETWEEN]
    # An earlier revision does not start with a thousand tokens, nor has it several processes.
    left = {row.key for row in ROWS if row.part != "growth"} - set(keys)
    assert left == {*peers.KEYS, "disk", "burst-lost", "stop-hung", "processes", "killed"}
    assert len(set(keys)) == len(keys)
    for driver in ("docker", "gvisor", "cold-bubblewrap", "cold-docker", "cold-gvisor"):
        assert {driver, f"{driver}-p99", f"{driver}-pandas-p50", f"{driver}-pandas-p99"} <= set(keys)
    assert [row.key for row in chosen(["memory-server", "h*"], BETWEEN)] == ["help", "memory-server"]
    looked = {key for look in idle.LOOKS for key in look.keys}
    assert {row.judged for row in BETWEEN if row.part == "idle"} == looked
    found = {row.key: row.driver for row in BETWEEN}
    assert (found["print-p50"], found["cold-docker-pandas-p50"], found["idle-gvisor"]) == (
        "bubblewrap", "docker", "gvisor",
    )  # fmt: skip


async def test_sides_take_turns_call_by_call() -> None:
    """Who is first alternates; what is to be sustained takes turns by blocks; a failing side ends alone."""
    order: list[str] = []

    def way(key: str, turn: str, **options: Any) -> Way:
        async def once() -> float:
            await anyio.lowlevel.checkpoint()
            order.append(key)
            if key == "c there" and len(order) > 20:
                raise RuntimeError("it broke")
            return 1.0

        return Way(key=key, what=key, once=once, turn=turn, **options)

    ways = [way(f"{key} {side}", key, block=3) for key in "ac" for side in ("here", "there")]
    ways += [way(f"b {side}", "b", block=2, uncounted=1) for side in ("here", "there")]
    reasons: dict[str, str] = {}
    found = await interleaved(ways, 2, reasons, lambda _: None)
    assert order[:6] == ["a here", "a there", "a there", "a here", "a here", "a there"]
    assert order[12:16] == ["b here", "b here", "b there", "b there"]
    assert order[16:20] == ["c there", "c here", "c here", "c there"]
    assert reasons == {"c there": "RuntimeError: it broke"}
    assert "c there" not in found
    assert {key: [len(each) for each in found[key].rounds] for key in ("a here", "b there", "c here")} == {
        "a here": [3, 3], "b there": [1, 1], "c here": [3, 3],
    }  # fmt: skip


def test_code_of_the_other_side_is_an_error() -> None:
    root = Path("/there")
    good = {"server": ["/there/server/__init__.py"], "tests": ["/there/tests"]}
    assert sides.strays(good, root, ["server"]) == []
    stray = {"more": ["/here/more/__init__.py"]}
    assert sides.strays({**good, **stray}, root, ["server"]) == ["more is /here/more/__init__.py"]
    assert sides.strays({}, root, ["server"]) == ["server is not found"]


def checkout(root: Path, package: str) -> Path:
    """The least that is a checkout of the layout with folders."""
    for folder, name in (("server", package), ("sandboxes", "sandboxed"), ("profiles", "profiled")):
        (root / folder / name).mkdir(parents=True)
        (root / folder / name / "__init__.py").touch()
    return root


def test_each_side_has_an_environment_with_its_own_code_and_our_packages(tmp_path: Path) -> None:
    """Also where its folders are packages, and although this clone is installed in the environment we share."""
    old = tmp_path / "old"
    for name in sides.FOLDERS:
        (old / name).mkdir(parents=True)
        (old / name / "__init__.py").touch()
    here = sides.made("here", ROOT, tmp_path / "sides")
    there = sides.made("there", old, tmp_path / "sides")
    assert set(sides.own_code((here, there))) == {"here runs", "there runs"}
    assert sides.parsed(there, "import anyio, json; print(json.dumps(anyio.__name__))") == "anyio"
    assert sides.parsed(there, "import json, server; print(json.dumps(server.__file__))").startswith(str(old))


def test_a_side_that_would_import_the_others_code_is_refused(tmp_path: Path) -> None:
    """The control: run by this clone's own environment, it does."""
    other = checkout(tmp_path / "other", "glovebox_server")
    mixed = Side(name="there", root=other, python=sys.executable)
    with pytest.raises(NoRevisionError, match=r"does not run its own code: .*glovebox_server is "):
        sides.own_code((sides.OURS, mixed))
    sides.own_code((sides.OURS, sides.made("there", other, tmp_path / "sides")))


def test_a_layout_that_nobody_knows_is_said(tmp_path: Path) -> None:
    with pytest.raises(NoRevisionError, match="say how it starts"):
        _ = Side(root=tmp_path).layout
    assert sides.OURS.command("serve")[1:] == ["-m", "glovebox_server", "serve"]
    assert list((ROOT / sides.OURS.layout.profiles).glob("*.toml"))
