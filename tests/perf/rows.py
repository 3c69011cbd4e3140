"""The rows of ``make bench``: what is promised of which measurement, as data. Nothing here measures.

A row judges one number of a series, alone or beside the same number of a base that was measured in the same run. Its
key is what ``--rows`` takes; docs/internals/performance.csv has each with its result.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

from tests.perf.series import Interval, Series, Statistic, compared, rounded

Compare = Literal["ratio", "more", "alone"]  # to its base: as a ratio; by how much it is more; or not at all
MAX_REASON = 300  # characters of why something was not measured
PERCENTILES: tuple[Statistic, ...] = ("p50", "p99")
Part = Literal["latency", "work", "broker", "load", "burst", "idle", "wire", "growth"]  # rows of one: together


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    key: str
    part: Part
    what: str
    series: str = ""  # key of what is judged; the row's own where it is empty
    base: str = ""
    statistic: Statistic = "p50"
    compare: Compare = "ratio"
    unit: str = "ms"  # of what is judged
    most: float | None = None
    least: float | None = None
    floor: float = 0.0
    """Between two revisions: what is below this is as good as this, being finer than it can be measured."""
    between: bool = True
    """Whether two revisions are compared by it; not by what is not ours, nor what ought to be 0, nor part growth."""
    limit: str = ""  # what stands in the way of a bound that is not met: said beside the number, where it is not

    @property
    def judged(self) -> str:
        """Key of the series."""
        return self.series or self.key

    @property
    def bound(self) -> str:
        """The bound in words, empty where the number is only reported."""
        if self.most is not None:
            return f"≤ {self.most:g}"
        return "" if self.least is None else f"≥ {self.least:g}"

    @property
    def needs(self) -> tuple[str, ...]:
        """Keys of the series it is made of."""
        return (self.judged, self.base) if self.base else (self.judged,)

    @property
    def driver(self) -> str:
        """The one that it needs."""
        return next((name for name in ("docker", "gvisor") if name in self.key), "bubblewrap")

    @property
    def rate(self) -> bool:
        """Whether more is better."""
        return self.unit.endswith("/s")


_PRINT = "`print(1)`, whole MCP call over stdio, bubblewrap, one after another"
_PANDAS = "read a CSV, group, print with pandas; whole MCP call over stdio, bubblewrap, one after another"
_START = "from starting the server to its first answered call over stdio, beyond `import mcp.server`"
_LOAD = "`print(1)`, 16 callers without a pause, whole MCP calls over HTTP, bubblewrap"
_CORE = "% of a core"
_WORK = (
    "one after another without a pause, a call costs what it makes two processors do, itself and its next sandbox: "
    "twice a bare interpreter's work, half of it two forks of an interpreter and half the server"
)
_ALONE = (
    "with the next sandbox made in the pauses, it is the server's own path, two disk flushes and the program's fork"
)
_SLOWEST = f"{_WORK}; the slowest are those whose sandbox is not ready yet"
_timed = partial(Row, part="latency")
_p99 = partial(_timed, statistic="p99", most=1)
_work = partial(Row, part="work")
_rate = partial(Row, part="load", unit="calls/s")
_burst = partial(Row, part="burst", compare="alone")
_broker = partial(Row, part="broker", compare="alone")
_memory = partial(Row, part="idle", compare="alone", unit="MiB")
_idle = partial(Row, part="idle", compare="alone", unit=_CORE, floor=0.01)
_wire = partial(Row, part="wire", compare="alone")
_growth = partial(Row, part="growth", between=False)
_peer = partial(_timed, base="bare", between=False)
_alone = partial(_timed, compare="alone")

ROWS: tuple[Row, ...] = (
    _timed(key="print-p50", what=_PRINT, series="print", base="bare", most=0.3, limit=_WORK),
    _p99(key="print-p99", what=_PRINT, series="print", base="bare", limit=_SLOWEST),
    _timed(key="paused", what="the same with a pause of 20 ms after each call", base="bare", most=0.4, limit=_ALONE),
    _timed(
        key="pandas-p50",
        what=_PANDAS,
        series="pandas",
        base="bare-pandas",
        most=0.03,
        limit="nothing is imported any more; what is left is a call as for `print-p50`, forked from a larger "
        "interpreter, and the program's own work, 7 ms of pandas",
    ),
    _p99(key="pandas-p99", what=_PANDAS, series="pandas", base="bare-pandas", limit=_SLOWEST),
    _timed(
        key="docker",
        what="`print(1)`, docker, one ready",
        base="bare",
        most=0.35,
        limit="the container stands ready and adds little; it is the call's own path: client, protocol, two "
        "disk flushes, receipt, ten changes of process",
    ),
    _timed(
        key="gvisor",
        what="`print(1)`, gvisor, one ready",
        base="bare",
        most=0.4,
        limit="as for docker, and each copied page, change of process and message is work of gVisor's own "
        "kernel, several times as slow as the host's",
    ),
    _timed(
        key="cold-bubblewrap",
        what="`print(1)`, bubblewrap, nothing prepared",
        base="bare",
        most=2.2,
        limit="bwrap alone takes 1.3 × and the interpreter that is the guest 1 ×, one after the other; the "
        "call comes on top",
    ),
    _timed(
        key="cold-docker",
        what="`print(1)`, docker, nothing prepared",
        base="bare",
        most=12,
        limit="the Engine alone takes 8 × to an interpreter's first word, without its network",
    ),
    _timed(
        key="cold-gvisor",
        what="`print(1)`, gvisor, nothing prepared",
        base="bare",
        most=18,
        limit="runsc alone takes 14 × to an interpreter's end; ours starts behind bwrap, measures itself and "
        "forks the program",
    ),
    _timed(key="start", what=_START, base="import-mcp", compare="more", most=400),
    _timed(
        key="list",
        what="`list_workspace_files` of 100,000 files, beside find",
        base="host-list",
        most=1.5,
        limit="a call costs what it costs beside a host command of a few milliseconds",
    ),
    _timed(
        key="search",
        what="`search_workspace` in them, beside ripgrep or grep",
        base="host-search",
        most=1.5,
        limit="Python opens and reads 100,000 files in two processes, where ripgrep is compiled and has a thread for "
        "each processor",
    ),
    _timed(
        key="read",
        what="`read_workspace_file` of one of them, beside cat",
        base="host-read",
        most=1.5,
        limit="cat takes a millisecond and a call takes what a call takes, however small the file",
    ),
    _peer(key="docker-run", what="peer: `docker run`, `print(1)`"),
    _peer(key="sandbox-runtime", what="peer: sandbox-runtime, `print(1)`"),
    _peer(key="srt", what="peer: npm's sandbox-runtime, its command, `print(1)`"),
    _peer(key="srt-library", what="peer: npm's sandbox-runtime, as a library, `print(1)`"),
    _peer(key="llm-sandbox", what="peer: llm-sandbox on Docker, `print(1)`"),
    _peer(key="llm-sandbox-pool", what="peer: llm-sandbox on Docker, a pool of two, `print(1)`"),
    _peer(key="mcp-run-python", what="peer: mcp-run-python, `print(1)`"),
    # Where process 1 is Python: 1.35 times, and 1,000 faults.
    _work(
        key="processor",
        what="processor time of a warm `print(1)`, of the whole machine, from the client to kernel threads",
        base="bare-processor",
        most=0.9,
        limit="client, server, worker, process 1 and a forked interpreter each take a part, the server the largest",
    ),
    _work(key="faults", what="page faults of the same", compare="alone", unit="faults", most=500),
    _work(key="stop", what="from cancelling an endless program to its sandbox's end", compare="alone", most=200),
    _work(key="stop-hung", what="the same while the worker hangs", compare="alone", most=1000, between=False),
    _rate(key="throughput", what=_LOAD, base="bare-throughput", least=1.1, limit="as for `print-p50`"),
    _rate(
        key="throughput-pandas",
        what="the same with the program with pandas",
        base="bare-throughput-pandas",
        least=20,
        limit="as for `throughput`, forked from an interpreter with the modules, which costs half as much again, and "
        "the program's own work, 7 ms of pandas",
    ),
    _rate(
        key="processes",
        what="`print(1)`, 16 callers without a pause, over HTTP: `--processes 2` beside 1",
        base="processes-one",
        least=0.95,
        between=False,
    ),
    Row(
        key="killed",
        part="load",
        what="the slowest of `print(1)` over HTTP, in a process beside one that is killed every 2 s; and beside none",
        base="not-killed",
        statistic="p99",
        most=3,
        between=False,
    ),
    _burst(key="burst-lost", what="200 calls at once, nothing prepared: lost", unit="calls", most=0, between=False),
    _burst(key="burst-p99", what="the same: from sending to the answer", series="burst", statistic="p99"),
    _burst(key="burst-memory", what="the same: the server's most resident memory", unit="MiB"),
    _broker(
        key="broker",
        what="policy, audit on disk and receipt of one call together, p50",
        most=1.5,
        limit="two disk flushes (`disk` is one of them on a disk that is kept busy) and two hand-overs to the "
        "log's thread and back, each 0.25 ms on processors that went idle between calls, 0.05 on busy ones",
    ),
    _broker(key="broker-policy", what="of that, deciding, p50"),
    _broker(key="broker-audit", what="of that, records on disk but the last, p50"),
    _broker(key="broker-receipt", what="of that, the last record and its receipt, p50"),
    _broker(
        key="disk",
        what="a record's length written and flushed, with nothing else, on the same disk, p50",
        between=False,
    ),
    _memory(key="memory-bare", what="a ready sandbox, bubblewrap, nothing preloaded: memory", most=6),
    _memory(key="memory-pandas", what="a ready sandbox, bubblewrap, with pandas: memory", most=25),
    _memory(
        key="memory-shipped", what="a ready sandbox, bubblewrap, with the shipped profile's modules: memory", most=25
    ),
    _memory(key="memory-docker", what="a ready sandbox, docker, nothing preloaded: memory", most=12),
    _memory(
        key="memory-docker-pandas",
        what="a ready sandbox, docker, with pandas: memory",
        most=50,
        limit="each container imports pandas itself: what is not a file is shared with nobody",
    ),
    _memory(
        key="memory-docker-shipped",
        what="a ready sandbox, docker, with the shipped profile's modules: memory",
        most=50,
        limit="matplotlib on top of pandas, and each container imports them itself: what is not a file is shared with "
        "nobody",
    ),
    _memory(key="memory-gvisor", what="a ready sandbox, gvisor, nothing preloaded: memory"),
    _idle(key="idle-bubblewrap", what="a ready sandbox, bubblewrap: processor time", most=0.05),
    _idle(key="idle-docker", what="a ready sandbox, docker: processor time", most=0.05),
    _idle(key="idle-gvisor", what="a ready sandbox, gvisor: processor time"),
    _wire(key="wire", what="32 MiB printed, from the first byte to the last", unit="MB/s", least=200),
    _wire(
        key="wire-memory",
        what="the same: memory of the host above what it was, in windows of 1 MiB",
        unit="windows",
        statistic="max",
        most=3,
        floor=1,
    ),
    _growth(
        key="roles",
        what="`print(1)` over HTTP, 64 roles and 1,000 tokens beside one of each",
        base="roles-one",
        most=1.1,
    ),
    _growth(key="tokens", what="`tools/list` over HTTP, the same", base="tokens-one", most=1.1),
    _growth(key="session", what="memory of a session with its stream, of 200", unit="KiB", compare="alone"),
    _growth(
        key="commit", what="the longest of 5,000 writes to a log, three of them with a seal", compare="alone", most=20
    ),
    _growth(key="query", what="`audit query` of 1,000,000 records, eleven questions: the middle one", compare="alone"),
    _growth(key="query-slowest", what="the slowest of them", series="query", statistic="max", compare="alone"),
)

_COLD = ("cold-bubblewrap", "cold-docker", "cold-gvisor")
_WITH_PANDAS = ("docker", "gvisor", *_COLD)
BETWEEN: tuple[Row, ...] = (
    *(row for row in ROWS if row.between),
    *(_alone(key=f"{key}-p99", what=f"the slowest of `{key}`", series=key, statistic="p99") for key in _WITH_PANDAS),
    *(
        _alone(
            key=f"{key}-pandas-{p}", what=f"as `{key}`, the program with pandas", series=f"{key}-pandas", statistic=p
        )
        for key in _WITH_PANDAS
        for p in PERCENTILES
    ),
    _alone(key="help", what="`glovebox --help`"),
    _alone(key="import", what="importing the server"),
    _memory(key="memory-server", what="the server, with the sandboxes of `memory-shipped` ready"),
)  # what two revisions are compared by: the rows above that are ours, and what is promised of nothing else


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of one row."""

    row: Row
    value: float | None = None  # the statistic of what is judged, in the row's unit; None where it was not measured
    base: float | None = None
    found: float | None = None  # what the bound is about: the ratio, the difference, or the value itself
    met: bool | None = None  # None where there is no bound, or nothing was measured
    reason: str = ""  # why it was not measured
    interval: Interval | None = None  # of a ratio of medians, where enough rounds have both

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        numbers = {name: getattr(self, name) for name in ("value", "base", "found")}
        return {
            "row": self.row.key,
            **{name: None if number is None else rounded(number) for name, number in numbers.items()},
            "unit": self.row.unit,
            "statistic": self.row.statistic,
            "compare": self.row.compare,
            "bound": self.row.bound,
            "met": self.met,
            "reason": self.reason,
            "interval": [rounded(self.interval.low), rounded(self.interval.high)] if self.interval else None,
        }


def judge(row: Row, series: Mapping[str, Series], reasons: Mapping[str, str]) -> Verdict:
    """Hold what was measured against what is promised."""
    missing = next((key for key in row.needs if key not in series), None)
    if missing is not None:
        return Verdict(row=row, reason=reasons.get(missing, "not measured in this run"))
    ours = series[row.judged]
    value = ours.get(row.statistic)
    base = series[row.base].get(row.statistic) if row.base else None
    found = value
    if base == 0:
        return Verdict(row=row, value=value, base=base, reason="what it is compared with came to nothing")
    if base is not None:
        found = value - base if row.compare == "more" else value / base
    met = None
    if row.most is not None:
        met = found <= row.most
    elif row.least is not None:
        met = found >= row.least
    interval = None
    if base is not None and (row.compare, row.statistic) == ("ratio", "p50"):
        with suppress(ValueError):
            interval = compared(ours, series[row.base])
    return Verdict(row=row, value=value, base=base, found=found, met=met, interval=interval)


def told(problem: BaseException) -> str:
    """Why something was not measured, in a line: of several exceptions, the first that is one."""
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    return " ".join(f"{type(problem).__name__}: {problem}".split())[:MAX_REASON]


def chosen(patterns: Sequence[str], rows: tuple[Row, ...] = ROWS) -> tuple[Row, ...]:
    """Rows by key or by pattern (``cold-*``), all where there is none."""
    for pattern in patterns:
        if not any(fnmatchcase(row.key, pattern) for row in rows):
            raise ValueError(f"there is no row {pattern!r}; there are {', '.join(row.key for row in rows)}")
    return tuple(row for row in rows if not patterns or any(fnmatchcase(row.key, each) for each in patterns))
