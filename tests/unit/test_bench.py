"""``make bench`` says what was measured and no more: statistics, verdicts, page, and what it changes in servers."""

import csv
import io
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.perf import bare, clients, idle, plot, report, spans, where, work, workspace
from tests.perf.clients import Setup, adapted, succeeded
from tests.perf.latency import Way, interleaved
from tests.perf.rows import MAX_REASON, ROWS, Row, Verdict, chosen, judge, told
from tests.perf.series import Series, compared, one, quantile, rounded

from glovebox_profiles.load.loader import SHIPPED


def series(key: str, *rounds: tuple[float, ...], unit: str = "ms") -> Series:
    return Series(key=key, what=key, unit=unit, rounds=rounds)


def test_quantiles_lie_straight_between_neighbours_and_count_all_rounds() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [quantile(values, share) for share in (0.0, 0.5, 1.0)] == [1.0, 2.5, 4.0]
    assert quantile([7.0], 0.99) == 7.0
    with pytest.raises(ValueError, match="of nothing"):
        quantile([], 0.5)
    found = series("x", (1.0, 2.0, 3.0), (100.0,))
    assert (found.get("p50"), found.get("max")) == (2.5, 100.0)
    assert found.get("p95") == pytest.approx(85.45)
    summary = found.summary()
    assert (summary["count"], summary["rounds"]) == (4, [2.0, 100.0])


@pytest.mark.parametrize(("value", "shown"), [(0.0, 0.0), (123456.0, 123456.0), (0.0123456, 0.01235), (9.87654, 9.877)])
def test_numbers_are_shown_with_four_digits(value: float, shown: float) -> None:
    assert rounded(value) == shown


def test_what_differs_is_told_apart_and_noise_is_not() -> None:
    """Though every round has a slow moment that falls on both; the control is noise, and what was not interleaved."""
    slow = [1.0, 5.0, 1.2, 3.0, 1.1, 2.0, 1.3, 1.0]
    theirs = series("theirs", *[(10.0 * each, 10.1 * each, 9.9 * each) for each in slow])
    ours = series("ours", *[(20.0 * each, 20.3 * each, 19.7 * each) for each in slow])
    found = compared(ours, theirs)
    assert found.ratio == pytest.approx(2.0)
    assert 1.9 < found.low <= found.high < 2.1
    assert found.differs
    ours = series("ours", (10.0,), (11.0,), (10.5,), (9.5,), (10.2,))
    theirs = series("theirs", (10.4,), (10.1,), (10.9,), (9.9,), (9.8,))
    assert not compared(ours, theirs).differs
    with pytest.raises(ValueError, match="zip"):
        compared(series("a", (1.0,)), series("b", (1.0,), (2.0,)))


RATIO = Row(key="r", part="latency", what="", base="b", most=0.5)


@pytest.mark.parametrize(
    ("row", "found", "met"),
    [
        (RATIO, 0.4, True),
        (Row(key="r", part="latency", what="", base="b", most=0.3), 0.4, False),
        (Row(key="r", part="latency", what="", base="b", compare="more", most=-7), -6.0, False),
        (Row(key="r", part="latency", what="", base="b", least=0.4), 0.4, True),
        (Row(key="r", part="latency", what="", base="b", least=0.41), 0.4, False),
        (Row(key="r", part="latency", what="", base="b"), 0.4, None),
        (Row(key="r", part="wire", what="", compare="alone", most=4), 4.0, True),
    ],
)
def test_a_verdict_is_what_the_bound_says(row: Row, found: float, met: bool | None) -> None:
    """Ratio, difference or the value itself; at most or at least; none where nothing is promised."""
    verdict = judge(row, {"r": series("r", (4.0,)), "b": series("b", (10.0,))}, {})
    assert verdict.found == pytest.approx(found)
    assert verdict.met is met


def test_p99_is_held_against_p99_and_what_is_missing_against_nothing() -> None:
    row = Row(key="r", part="latency", what="", base="b", statistic="p99", most=1)
    many = {"r": series("r", (1.0,) * 50 + (30.0,) * 50), "b": series("b", (10.0,) * 50 + (40.0,) * 50)}
    assert judge(row, many, {}).found == pytest.approx(0.75)
    assert judge(RATIO, {}, {"r": "no docker"}).reason == "no docker"
    half = judge(RATIO, {"r": series("r", (1.0,))}, {"b": "no interpreter"})
    assert (half.met, half.reason) == (None, "no interpreter")
    assert judge(RATIO, {}, {}).reason == "not measured in this run"
    found = judge(RATIO, {"r": series("r", (1.0,)), "b": series("b", (0.0,))}, {})
    assert (found.met, found.reason) == (None, "what it is compared with came to nothing")


def test_the_reason_is_the_first_exception_in_a_group() -> None:
    inner = ValueError("two\nlines " + "x" * 1000)
    reason = told(BaseExceptionGroup("unhandled", [ExceptionGroup("again", [inner])]))
    assert reason.startswith("ValueError: two lines x")
    assert len(reason) == MAX_REASON


def test_rows_are_whole_and_found_by_key_and_by_pattern() -> None:
    assert [row.key for row in chosen(["cold-*", "wire"])] == ["cold-bubblewrap", "cold-docker", "cold-gvisor", "wire"]
    assert chosen([]) == ROWS
    with pytest.raises(ValueError, match="no row 'prnit'"):
        chosen(["print-p50", "prnit"])
    assert len({row.key for row in ROWS}) == len(ROWS)
    assert [row.key for row in ROWS if (row.compare == "alone") == bool(row.base)] == []
    assert [row.key for row in ROWS if row.most is not None and row.least is not None] == []


def kept() -> dict[str, Any]:
    """A report with one row met, one unmet, the others not measured."""
    found = {
        "print": series("print", (1.0, 2.0), (3.0,)),
        "bare": series("bare", (10.0,), (12.0,)),
        "wire": one("wire", "rate", "MB/s", 100.0, "a | note"),
    }
    verdicts = [judge(row, found, {}) for row in ROWS]
    return report.as_json(verdicts, found, {"processor": "2 × a | b"}, None)


def table(report_: dict[str, Any]) -> dict[str, dict[str, str]]:
    lines = csv.DictReader(io.StringIO(report.as_csv(report_)))
    return {line["row"]: line for line in lines if line["row"] != report.MACHINE}


def test_the_table_has_every_row_once_explained_and_its_verdict(tmp_path: Path) -> None:
    text = report.as_csv(kept())
    lines = table(kept())
    assert list(lines) == [row.key for row in ROWS]
    assert text.count("\n") == 1 + len(ROWS) + len(kept()["machine"])
    assert all(line["what is measured"] for line in lines.values())
    assert [line["row"] for line in lines.values() if line["must be"]] == [row.key for row in ROWS if row.bound]
    assert [*lines["print-p50"].values()][2:6] == ["≤ 0.3 ×", "2 ms against 11", "0.1818 × (0.007544 to 4.971)", "met"]
    assert [*lines["wire"].values()][2:6] == ["≥ 200 MB/s", "100 MB/s", "", "not met"]
    assert lines["docker"]["verdict"] == "not measured"
    assert "machine,processor,,2 × a | b" in text
    assert report.TABLE.read_text() == report.as_csv(report.read(report.KEPT))
    (tmp_path / "r.json").write_text(json.dumps(kept()))
    assert report.read(tmp_path / "r.json") == kept()


async def test_ways_are_interleaved_and_a_failing_one_ends_alone() -> None:
    """Rounds begin with another way each; the first warms up; what does not count does not; what fails has a reason."""
    order: list[str] = []

    def way(key: str, **options: Any) -> Way:
        async def once() -> float:
            await anyio.lowlevel.checkpoint()
            order.append(key)
            if key == "bad":
                raise RuntimeError("it broke")
            return float(len(order))

        return Way(key=key, what=key, once=once, **options)

    reasons: dict[str, str] = {}
    ways = [way("a"), way("b", block=3, uncounted=2), way("bad"), way("rare", every=2)]
    found = await interleaved(ways, 3, reasons, lambda _: None)
    assert order[:6] == ["a", "b", "b", "b", "bad", "rare"]
    assert order[6:11] == ["b", "b", "b", "rare", "a"]
    assert reasons == {"bad": "RuntimeError: it broke"}
    assert {key: [len(each) for each in one.rounds] for key, one in found.items()} == {
        "a": [1, 1, 1], "b": [1, 1, 1], "rare": [1, 0, 1],
    }  # fmt: skip


@pytest.mark.parametrize("shipped", sorted(SHIPPED.glob("*.toml")), ids=lambda path: path.stem)
def test_servers_differ_from_what_is_shipped_only_as_they_should(shipped: Path, tmp_path: Path) -> None:
    """The driver; and where asked, what is prepared. Limits, files and network stay."""
    original = tomllib.loads(shipped.read_text())
    setup = Setup(directory=tmp_path, workspace=tmp_path, driver="gvisor")
    warm = tomllib.loads(adapted(shipped.read_text(), setup))
    assert warm == original | {"isolation": ["gvisor"]}
    cold = tomllib.loads(adapted(shipped.read_text(), Setup(directory=tmp_path, workspace=tmp_path, cold=True)))
    assert cold.get("python", {}).get("preload", []) == []
    assert cold.get("python", {}).get("start", "cold") == "cold"
    assert {**cold, "python": None} == {**original, "isolation": ["bubblewrap"], "python": None}


def test_an_answer_is_read_to_its_end_and_held_against_the_right_words() -> None:
    data = b"4\r\nwiki\r\n3;x=y\r\nped\r\n0\r\n\r\n".replace(b";x=y", b"")
    assert clients._chunks(data) == len(data)
    assert clients._chunks(data + b"HTTP/1.1 200") == len(data)
    assert [clients._chunks(data[:end]) for end in range(len(data))] == [0] * len(data)
    good = json.dumps({"stdout": {"text": "1\n"}, "isolation": {"verified": True}}).encode()
    assert succeeded(good, "1\n")
    assert not succeeded(good, "2\n")
    assert not succeeded(good.replace(b"true", b"false"), "1\n")
    assert not succeeded(b"", "1\n")


@pytest.mark.parametrize("place", [spans.PARSE, spans.CALL, *spans.POINTS])
def test_every_part_of_a_call_is_where_it_is_looked_for(place: str) -> None:
    """A function that was renamed would silently count as "between the parts"."""
    owner, last, function = spans.found(place)
    assert callable(function)
    assert getattr(owner, last) is function


@pytest.mark.parametrize(
    "place", ["glovebox_server.nowhere:main", f"{spans.PARSE}ed", "tests.perf.spans:found.no.such"]
)
def test_a_part_that_has_moved_is_named(place: str) -> None:
    """With the file to correct; the control of the test above."""
    with pytest.raises(LookupError, match=f"{place} has moved .*spans.py"):
        spans.found(place)


def test_no_part_that_rows_are_made_of_is_renamed() -> None:
    """Another revision is compared by these words."""
    last = "audit: last record and signed receipt, on disk"
    assert {"policy: decide", "audit: {}, on disk", last} <= {*spans.POINTS.values()}


async def test_parts_add_up_to_the_whole() -> None:
    async def inner() -> None:
        await anyio.lowlevel.checkpoint()

    timed_inner = spans.wrapped(inner, "inner")

    async def outer() -> None:
        await timed_inner()

    timed_outer = spans.wrapped(outer, "outer")
    await timed_outer()
    call = spans._Call()
    span = spans._Span(call, None)
    token = spans._now.set(span)
    await timed_outer()
    spans._now.reset(token)
    whole = span.end("rest")
    assert call.parts.keys() == {"inner", "outer", "rest"}
    assert sum(call.parts.values()) == pytest.approx(whole)
    assert min(call.parts.values()) >= 0


def test_a_disk_takes_its_time(tmp_path: Path) -> None:
    found = where.disk(tmp_path, 3)
    assert len(found.values) == 3
    assert min(found.values) > 0
    assert (tmp_path / "disk").stat().st_size == 3 * where.RECORD_BYTES


def test_the_hosts_commands_see_what_the_tools_are_asked_for(tmp_path: Path) -> None:
    """The control of the rows about files: on the host, each command runs and shows what the tool has to."""
    workspace.build(tmp_path, workspace.FOLDERS * 2)
    (tmp_path / workspace.PICKED).write_text("x\n")
    for question in workspace.questions(workspace.FOLDERS * 2).values():
        assert workspace.on_host(question, tmp_path) > 0
    assert len(list(tmp_path.rglob("*.txt"))) == workspace.FOLDERS * 2 + 1


def test_the_bare_interpreter_is_named_by_its_path_and_held_to_what_it_prints() -> None:
    """What a shim costs would flatter us."""
    found = bare.candidates()
    assert found
    assert all(Path(each).is_absolute() for each in found)
    assert len({Path(each).resolve() for each in found}) == len(found)
    python = bare.Bare(python=sys.executable, version="")
    assert python.milliseconds("print(1)", "1\n") > 0
    with pytest.raises(RuntimeError, match="printed '2"):
        python.milliseconds("print(2)", "1\n")


def test_memory_and_processor_time_of_a_process_can_be_read() -> None:
    own = [int(Path("/proc/self").readlink().name)]
    assert 0 < idle.own_mib(own) <= idle.pss_mib(own) + 1
    assert sum(idle.processor_seconds(own).values()) > 0
    assert idle.in_namespaces(own) == {}


def test_processor_time_is_the_machines_or_said_to_be_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container shows the counter of its own group, which has no part of what the kernel does for it."""
    assert work.page_faults() > 0
    monkeypatch.setattr(work, "_SCHEDSTAT", tmp_path / "schedstat")
    monkeypatch.setattr(work, "_CPUACCT", tmp_path)
    (tmp_path / "cpuacct.usage").write_text("5000000\n")
    with pytest.raises(OSError, match="cannot be read"):
        work.processor_ms()
    (tmp_path / "release_agent").write_text("")
    assert work.processor_ms() == 5
    line = "cpu{} 0 0 10 11 12 13 {}000000 14 15\ndomain0 3 16 17\n"
    (tmp_path / "schedstat").write_text("version 15\ntimestamp 9\n" + line.format(0, 2) + line.format(1, 40))
    assert work.processor_ms() == 42


def test_the_picture_and_the_json_are_of_what_was_measured() -> None:
    code = plot.program(kept(), ("docker-run",))
    compile(code, "plot", "exec")
    assert '"bare"' in code
    assert plot.program({"series": {}}, ()) == ""
    assert Verdict(row=RATIO, reason="why").as_json()["found"] is None
