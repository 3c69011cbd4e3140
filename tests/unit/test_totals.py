"""Totals are those of the log, whoever is killed; no name makes a series; the files that ship name what there is."""

import json
import re
import shutil
import subprocess  # noqa: TID251 - a process that is killed
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures import segments
from tests.fixtures.audit_logs import decided, finished, started
from tests.unit.test_segment_retention import make_old, retain

from glovebox_audit import events, read
from glovebox_audit.chain import Record, draft
from glovebox_audit.file import LogFile
from glovebox_server.telemetry import names, prometheus, spans
from glovebox_server.telemetry.names import METRICS, OTHER
from glovebox_server.telemetry.totals import BOUNDS, Series, Tally, TotalStore

HOSTILE = ("x{n}", 'run_python"}} 1\n# {n}', "\u202e{n}", "{n}" * 200, "token:a b {n}", "local:{n}\n")


def day(directory: Path) -> Iterator[None]:
    """Records of a day, with pauses: calls of every end, of two servers; the second one is killed in a call."""
    ends: list[Any] = [
        finished,
        lambda call: replace(finished(call), failed=True),
        lambda call: replace(finished(call), ended="limit"),
        lambda call: events.CallCancelled(call_id=call, by="client", elapsed_ms=3.0),
        lambda call: events.CallFailed(call_id=call, error="SandboxError", reason="gone", elapsed_ms=70_000.0),
    ]  # fmt: skip
    first = LogFile(directory, "s_first", segments.rotation(20_000))
    for number in range(60):
        call, tool = f"c_{number}", ("run_python", "fetch_url", "odd")[number % 3]
        whose: dict[str, Any] = {"tool": tool, "principal": f"token:{number % 2}"}
        beside = [
            events.EgressDecided(
                call_id=call, scheme="https", host="a.b", port=443, asked_digest="d", effect="allow", rule="r", **whose
            ),
            events.RequestsRefused(since="now", count=3, refused=()),
        ]
        begun = replace(decided(call), **whose)
        if number % 10 == 9:
            first.commit([draft(replace(begun, effect="deny"))])
            continue
        end = replace(ends[number % len(ends)](call), **whose)
        first.commit([draft(begun), started(call), *map(draft, beside), draft(end)])
        if number % 25 == 24:
            yield
    command = [sys.executable, "-m", "tests.fixtures.audit_logs", str(directory), "s_second", "9", "7"]
    assert subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode == -9
    yield
    first.close()
    LogFile(directory, "s_third").close()
    yield


def summed(directory: Path) -> Counter[tuple[str, ...]]:
    """What the records of a log say, counted another way."""
    found = Counter[tuple[str, ...]]()
    with read.opened(directory) as log:
        for file, size in log.each():
            for record in (line.record for line in read.lines(file, 0, size) if line.record is not None):
                found["records", record.kind] += 1
                data, ended = record.data, record.data.get("ended")
                if record.kind == "call.decided" and data["effect"] == "deny":
                    status = "denied"
                elif record.kind == "call.finished":
                    status = "error" if ended == "limit" or data.get("failed") else "success"
                elif record.kind in {"call.failed", "call.lost"}:
                    status = "error"
                elif record.kind == "call.cancelled":
                    status = "cancelled"
                else:
                    found["connections",] += record.kind == "egress.decided"
                    found["refused",] += data.get("count", 0)
                    continue
                tool = OTHER if data.get("tool") == "odd" else data.get("tool")
                found["calls", *filter(None, (tool, data.get("principal"), status))] += 1
                found["microseconds",] += round(data.get("elapsed_ms", 0) * 1000)
    return +found


async def counted(totals: TotalStore) -> Counter[tuple[str, ...]]:
    """The same of the totals, when all that is new is counted."""
    sums = Counter[tuple[str, ...]]()
    await totals.count()
    for each in (await totals.read())[0]:
        if each.metric is names.RECORDS:
            sums["records", each.labels["kind"]] += int(each.value)
        elif each.metric is names.CALLS:
            sums["calls", *each.labels.values()] += int(each.value)
        elif each.metric is names.DURATION:
            sums["microseconds",] += round(each.value * 1_000_000)
            assert sum(each.counts) == sum(count for _, count in each.exponents)
        elif each.metric is names.CONNECTIONS:
            sums["connections",] += int(each.value)
        elif each.metric is names.REFUSED:
            sums["refused",] += int(each.value)
    return +sums


COUNTING = """
import sys
from functools import partial
from pathlib import Path
from glovebox_server.telemetry import totals
totals._STEP_BYTES = 1000
with totals.TotalStore.opened(Path(sys.argv[1])) as opened:
    while True:
        opened._store.transact_now(partial(opened._add, totals.Tally()))
        print(1, flush=True)
"""


def count_until_killed(state_dir: Path) -> None:
    """Count in another process, which is killed while it does."""
    with subprocess.Popen([sys.executable, "-c", COUNTING, str(state_dir)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        process.kill()


async def test_totals_are_those_of_the_log_whoever_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted a few lines at a time, by processes of which one is killed; another log is counted anew."""
    directory = tmp_path / "audit"
    monkeypatch.setattr("glovebox_server.telemetry.totals._STEP_BYTES", 3000)
    for _ in day(directory):
        count_until_killed(tmp_path)
        with TotalStore.opened(tmp_path) as totals, TotalStore.opened(tmp_path) as other:
            await totals.count()
            assert await counted(other) == summed(directory)
    assert summed(directory)["records", "call.lost"] == 7
    assert summed(directory)["records", "segment.sealed"] > 1
    shutil.rmtree(directory)
    segments.fill(directory, 3)
    with TotalStore.opened(tmp_path) as totals:
        assert await counted(totals) == summed(directory)


async def test_a_removed_segment_that_was_counted_stays_counted(tmp_path: Path) -> None:
    """Retention takes nothing away from a total."""
    directory = tmp_path / "audit"
    with TotalStore.opened(tmp_path) as totals:
        segments.fill(directory, 20)
        before = await counted(totals)
        with pytest.MonkeyPatch.context() as patch:
            make_old(patch)
            removed = retain(directory, bytes=1)
        after = await counted(totals)
    assert removed
    assert summed(directory)["calls", "success"] < 20
    assert before["calls", "success"] == after["calls", "success"] == 20


async def test_no_name_makes_a_series(tmp_path: Path) -> None:
    """100,000 hostile names, as each label of each metric; of an operator's names only so many have their own."""
    tally = Tally()
    for number in range(100_000):
        metric = [*METRICS.values()][number % len(METRICS)]
        value = HOSTILE[number % len(HOSTILE)].format(n=number)
        add = tally.observe if metric.kind == "histogram" else tally.add
        add(metric, *([1.0] if metric.kind == "histogram" else []), *[value] * len(metric.labels))
    assert {(name, labels) for name, labels, _ in tally.parts} == {
        (metric.name, json.dumps([OTHER] * len(metric.labels))) for metric in METRICS.values()
    }
    file = LogFile(tmp_path / "audit", "s_test")
    for number in range(names.MAX_CLIENTS + 9):
        call = f"c_{number}"
        ended = replace(finished(call), tool="run_python", principal=f"token:t{number}")
        file.commit([draft(decided(call)), draft(ended)])
    file.close()
    with TotalStore.opened(tmp_path) as totals:
        await totals.count()
        found = {
            each.labels["client_id"]: each.value for each in (await totals.read())[0] if each.metric is names.CALLS
        }
    assert len(found) == names.MAX_CLIENTS + 1
    assert found[OTHER] == 9


def test_what_prometheus_reads() -> None:
    """The whole text. Another test has promtool read a server's."""
    client, counts = 'a\\b"c\nd', (1, *[0] * (len(BOUNDS) - 1), 2)
    text = prometheus.written([
        Series(names.CALLS, {"tool_name": "run_python", "client_id": client, "status": "error"}, 3),
        Series(names.SESSIONS, {names.TRANSPORT: "pipe"}, 1200.5, counts),
        Series(names.SERVERS, {}, 2),
    ])  # fmt: skip
    les = "".join(
        f'mcp_server_session_duration_seconds_bucket{{network_transport="pipe",le="{bound}"}} 1\n' for bound in BOUNDS
    )
    assert text == (
        "# HELP mcp_tool_calls_total Calls that are over, by status.\n# TYPE mcp_tool_calls_total counter\n"
        'mcp_tool_calls_total{tool_name="run_python",client_id="a\\\\b\\"c\\nd",status="error"} 3\n'
        "# HELP mcp_server_session_duration_seconds Length of sessions.\n"
        f"# TYPE mcp_server_session_duration_seconds histogram\n{les}"
        'mcp_server_session_duration_seconds_bucket{network_transport="pipe",le="+Inf"} 3\n'
        'mcp_server_session_duration_seconds_sum{network_transport="pipe"} 1200.5\n'
        'mcp_server_session_duration_seconds_count{network_transport="pipe"} 3\n'
        "# HELP glovebox_servers Server processes that have the log open.\n# TYPE glovebox_servers gauge\n"
        "glovebox_servers 2\n"
    )
    assert BOUNDS[0] == 0.001


SHIPPED = Path(prometheus.__file__).parent
RULES = SHIPPED / "alerts.yml"
DASHBOARD = json.loads((SHIPPED / "grafana.json").read_text())


@pytest.mark.parametrize(
    "text",
    [RULES.read_text(), *(each["expr"] for panel in DASHBOARD["panels"] for each in panel["targets"])],
    ids=lambda text: re.sub(r"\W+", "-", text)[:40],
)
def test_a_query_names_metrics_that_there_are(text: str) -> None:
    """And labels of theirs, in the dashboard and in the rules."""
    asked = re.findall(r"\b((?:mcp|gen_ai|glovebox)_\w+?)(?:_bucket)?(?:\{([^}]*)\})?(?=[\[\s)]|$)", text)
    asked = [(name, inner) for name, inner in asked if name not in {"gen_ai_tool_name", "mcp_method_name"}]
    known = {metric.prometheus: {label.replace(".", "_") for label in metric.labels} for metric in METRICS.values()}
    assert asked
    for name, inner in asked:
        assert set(re.findall(r"(\w+)[=!]", inner)) <= known[name], name


def heard(*told: tuple[str, float, float, dict[str, Any]]) -> list[spans.Heard]:
    """Records, each written and on the disk so many milliseconds after the message."""
    return [
        (
            int(at * 1e6),
            Record(
                seq=1, time=f"1970-01-01T00:00:00.{int(written * 1000):06d}Z", server="s", kind=kind, call_id="c",
                data=data, prev="", hash="", line=b"",
            ),
        )
        for kind, written, at, data in told
    ]  # fmt: skip


DECIDED, STARTED = ("call.decided", 2, 3, {"effect": "allow", "rule": "r"}), ("sandbox.started", 2, 3, {"level": "vm"})
FINISHED = ("call.finished", 9, 11, {"elapsed_ms": 8, "usage": {"wall_ms": 4.5}, "kept": {"stdout": "out"}})
SIGNED = ("receipt.signed", 9, 11, {"digest": "sha256:1"})
ASKED = ("egress.decided", 4, 5, {"host": "a.b", "port": 443, "effect": "allow", "asked_digest": "d"})
ANSWERED = ("egress.answered", 6, 7, {"host": "a.b", "status": 200, "bytes": 5})


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([], {}),
        ([("call.decided", 2, 3, {"effect": "deny"})], {"admission": (0, 2), "decision": (2, 3)}),
        (
            [DECIDED, STARTED, FINISHED, SIGNED],
            {
                "admission": (0, 1), "decision": (1, 2), "sandbox": (2, 3), "run": (3, 7.5), "collect": (7.5, 9),
                "receipt": (9, 11),
            },
        ),
        (
            [DECIDED, STARTED, ASKED, ANSWERED, ("call.cancelled", 9, 11, {"elapsed_ms": 8, "by": "stop"})],
            {
                "admission": (0, 1), "decision": (1, 2), "sandbox": (2, 3), "run": (3, 9), "receipt": (9, 11),
                "connections": (4, 6),
            },
        ),
        (
            [DECIDED, ("call.failed", 9, 11, {"elapsed_ms": 8})],
            {"admission": (0, 1), "decision": (1, 2), "sandbox": (2, 9), "receipt": (9, 11)},
        ),
        (
            [DECIDED, FINISHED],
            {"admission": (0, 1), "decision": (1, 2), "run": (2, 9), "collect": (9, 9), "receipt": (9, 11)},
        ),
    ],
    ids=["no records", "denied", "warm", "cancelled", "no sandbox", "on the host"],
)  # fmt: skip
def test_parts_of_a_call(told: list[Any], expected: dict[str, tuple[float, float]]) -> None:
    """In milliseconds since the message; with what was connected to."""
    found = spans.parts(0, heard(*told))
    assert {part.name: (part.begin / 1e6, part.end / 1e6) for part in found} == expected
    events = [event for part in found for event in part.events]
    if ASKED in told:
        first = {"server.address": "a.b", "server.port": 443, "glovebox.decision": "allow"}
        second = {"server.address": "a.b", "http.response.status_code": 200, "http.response.body.size": 5}
        assert events == [(4_000_000, first), (6_000_000, second)]


def test_a_clock_that_steps_back_makes_no_negative_part() -> None:
    found = spans.parts(5_000_000, heard(DECIDED, STARTED, FINISHED))
    assert all(5_000_000 <= part.begin <= part.end for part in found)


def test_what_a_span_says() -> None:
    """Arguments and output only where records have them."""
    kept = (DECIDED[0], 2, 3, {**DECIDED[3], "arguments": {"code": "1"}})
    said = {
        "glovebox.decision": "allow", "glovebox.rule": "r", "glovebox.isolation.level": "vm",
        "glovebox.receipt.digest": "sha256:1",
    }  # fmt: skip
    assert spans.attributes(heard(DECIDED, STARTED, SIGNED)) == said
    more = {"gen_ai.tool.call.arguments": '{"code": "1"}', "gen_ai.tool.call.result": '{"stdout": "out"}'}
    assert spans.attributes(heard(kept, STARTED, FINISHED, SIGNED)) == said | more
