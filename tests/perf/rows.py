"""The rows of ``make bench``: what is promised of which measurement, as data. Nothing here measures.

A row judges one number of a series, alone or beside the same number of a base that was measured in the same run. Its
key is what ``--rows`` takes and what docs/performance.md explains.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from tests.perf.series import Series, Statistic, rounded

Compare = Literal["ratio", "more", "alone"]
"""To its base: as a ratio; by how much it is more; or not at all."""
MAX_REASON = 300
"""Characters of why something was not measured."""
Part = Literal["latency", "broker", "load", "burst", "idle", "wire"]
"""Rows of one part are measured together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    key: str
    part: Part
    what: str
    series: str = ""
    """Key of what is judged; the row's own where it is empty."""
    base: str = ""
    statistic: Statistic = "p50"
    compare: Compare = "ratio"
    most: float | None = None
    least: float | None = None

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


PRINT = "`print(1)`, whole MCP call over stdio, bubblewrap, one after another"
PANDAS = "read a CSV, group, print with pandas; whole MCP call over stdio, bubblewrap, one after another"

ROWS: tuple[Row, ...] = (
    Row(key="print-p50", part="latency", what=PRINT, series="print", base="bare", most=0.3),
    Row(key="print-p99", part="latency", what=PRINT, series="print", base="bare", statistic="p99", most=1),
    Row(key="pandas-p50", part="latency", what=PANDAS, series="pandas", base="bare-pandas", most=0.03),
    Row(
        key="pandas-p99", part="latency", what=PANDAS, series="pandas", base="bare-pandas", statistic="p99", most=1
    ),
    Row(key="docker", part="latency", what="`print(1)`, docker, one ready", base="bare", most=0.35),
    Row(key="gvisor", part="latency", what="`print(1)`, gvisor, one ready", base="bare", most=0.4),
    Row(key="cold-bubblewrap", part="latency", what="`print(1)`, bubblewrap, nothing prepared", base="bare", most=2.2),
    Row(key="cold-docker", part="latency", what="`print(1)`, docker, nothing prepared", base="bare", most=12),
    Row(key="cold-gvisor", part="latency", what="`print(1)`, gvisor, nothing prepared", base="bare", most=18),
    Row(
        key="start",
        part="latency",
        what="from starting the server to its first answered call over stdio, beyond `import mcp.server`",
        base="import-mcp",
        compare="more",
        most=400,
    ),
    Row(
        key="list",
        part="latency",
        what="`list_workspace_files` of 100,000 files, beside find",
        base="host-list",
        most=1.5,
    ),
    Row(
        key="search",
        part="latency",
        what="`search_workspace` in 100,000 files, beside ripgrep or grep",
        base="host-search",
        most=1.5,
    ),
    Row(key="read", part="latency", what="`read_workspace_file` among them, beside cat", base="host-read", most=1.5),
    Row(key="docker-run", part="latency", what="peer: `docker run`, `print(1)`", base="bare"),
    Row(key="sandbox-runtime", part="latency", what="peer: sandbox-runtime, `print(1)`", base="bare"),
    Row(key="llm-sandbox", part="latency", what="peer: llm-sandbox on Docker, `print(1)`", base="bare"),
    Row(key="mcp-run-python", part="latency", what="peer: mcp-run-python, `print(1)`", base="bare"),
    Row(
        key="throughput",
        part="load",
        what="`print(1)`, 16 callers without a pause, whole MCP calls over HTTP, bubblewrap",
        base="bare-throughput",
        least=1,
    ),
    Row(
        key="throughput-pandas",
        part="load",
        what="the same with the pandas program",
        base="bare-throughput-pandas",
        least=20,
    ),
    Row(key="burst-lost", part="burst", what="200 calls at once, nothing prepared: lost", compare="alone", most=0),
    Row(
        key="burst-p99",
        part="burst",
        what="the same: from sending to the answer",
        series="burst",
        statistic="p99",
        compare="alone",
    ),
    Row(key="burst-memory", part="burst", what="the same: the server's most resident memory", compare="alone"),
    Row(
        key="broker",
        part="broker",
        what="policy, audit on disk and receipt of one call together, p50",
        compare="alone",
        most=1.5,
    ),
    Row(key="broker-policy", part="broker", what="of that, deciding, p50", compare="alone"),
    Row(key="broker-audit", part="broker", what="of that, records on disk but the last, p50", compare="alone"),
    Row(key="broker-receipt", part="broker", what="of that, the last record and its receipt, p50", compare="alone"),
    Row(key="memory-bare", part="idle", what="a ready sandbox, bubblewrap, nothing preloaded", compare="alone", most=6),
    Row(key="memory-pandas", part="idle", what="a ready sandbox, bubblewrap, with pandas", compare="alone", most=25),
    Row(key="memory-docker", part="idle", what="a ready sandbox, docker, nothing preloaded", compare="alone", most=12),
    Row(
        key="memory-docker-pandas",
        part="idle",
        what="a ready sandbox, docker, with pandas",
        compare="alone",
        most=50,
    ),
    Row(key="memory-gvisor", part="idle", what="a ready sandbox, gvisor, nothing preloaded", compare="alone"),
    Row(
        key="idle-bubblewrap", part="idle", what="processor time of a ready sandbox, bubblewrap", compare="alone",
        most=0.05,
    ),
    Row(key="idle-docker", part="idle", what="processor time of a ready sandbox, docker", compare="alone", most=0.05),
    Row(key="idle-gvisor", part="idle", what="processor time of a ready sandbox, gvisor", compare="alone"),
    Row(key="wire", part="wire", what="32 MiB printed, from the first byte to the last", compare="alone", least=200),
    Row(
        key="wire-memory",
        part="wire",
        what="the same: the host's memory above what it was, in windows of 1 MiB",
        statistic="max",
        compare="alone",
        most=3,
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of one row."""

    row: Row
    value: float | None = None
    """The statistic of what is judged, in the series' unit; None where it was not measured."""
    unit: str = ""
    base: float | None = None
    found: float | None = None
    """What the bound is about: the ratio, the difference, or the value itself."""
    met: bool | None = None
    """None where there is no bound, or nothing was measured."""
    reason: str = ""
    """Why it was not measured."""

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        numbers = {name: getattr(self, name) for name in ("value", "base", "found")}
        return {
            "row": self.row.key,
            **{name: None if number is None else rounded(number) for name, number in numbers.items()},
            "unit": self.unit,
            "statistic": self.row.statistic,
            "compare": self.row.compare,
            "bound": self.row.bound,
            "met": self.met,
            "reason": self.reason,
        }


def judge(row: Row, series: Mapping[str, Series], reasons: Mapping[str, str]) -> Verdict:
    """Hold what was measured against what is promised.

    Args:
        row: the promise.
        series: what was measured, by key.
        reasons: why what is missing was not measured, by key.
    """
    missing = next((key for key in row.needs if key not in series), None)
    if missing is not None:
        return Verdict(row=row, reason=reasons.get(missing, "not measured in this run"))
    ours = series[row.judged]
    value = ours.get(row.statistic)
    base = series[row.base].get(row.statistic) if row.base else None
    found = value
    if base == 0:
        return Verdict(
            row=row, value=value, unit=ours.unit, base=base, reason="what it is compared with came to nothing"
        )
    if base is not None:
        found = value - base if row.compare == "more" else value / base
    met = None
    if row.most is not None:
        met = found <= row.most
    elif row.least is not None:
        met = found >= row.least
    return Verdict(row=row, value=value, unit=ours.unit, base=base, found=found, met=met)


def told(problem: BaseException) -> str:
    """Why something was not measured, in a line: of several exceptions, the first that is one."""
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    return " ".join(f"{type(problem).__name__}: {problem}".split())[:MAX_REASON]


def chosen(patterns: Sequence[str]) -> tuple[Row, ...]:
    """Rows by key or by pattern (``cold-*``), all where there is none.

    Raises:
        ValueError: nothing is called that.
    """
    for pattern in patterns:
        if not any(fnmatchcase(row.key, pattern) for row in ROWS):
            raise ValueError(f"there is no row {pattern!r}; there are {', '.join(row.key for row in ROWS)}")
    return tuple(row for row in ROWS if not patterns or any(fnmatchcase(row.key, each) for each in patterns))
