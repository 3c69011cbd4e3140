"""What a run found, as JSON, as a table in a terminal, and as docs/internals/performance.csv. Nothing here measures."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.perf.machine import ROOT
from tests.perf.rows import ROWS, Verdict
from tests.perf.series import Series, rounded
from tests.perf.where import Parts

TABLE = ROOT / "docs" / "internals" / "performance.csv"
KEPT = ROOT / "docs" / "internals" / "performance.json"
PICTURE = ROOT / "docs" / "internals" / "performance.png"
COLUMNS = ("row", "what is measured", "must be", "measured", "relative", "verdict", "why it is not met")
MACHINE = "machine"
_PLANNED = {row.key: row for row in ROWS}


def title(row: Mapping[str, Any]) -> str:
    """What a row of the JSON is about, with the number that is judged where there are several."""
    planned = _PLANNED[row["row"]]
    several = planned.part == "latency" or planned.statistic == "p99"
    return f"{planned.what}, {planned.statistic}" if several else planned.what


def as_json(
    verdicts: Sequence[Verdict], series: Mapping[str, Series], facts: Mapping[str, str], parts: Parts | None
) -> dict[str, Any]:
    """Everything of a run that is kept."""
    report: dict[str, Any] = {
        "format": 1,
        "machine": dict(facts),
        "rows": [each.as_json() for each in verdicts],
        "series": {key: each.summary() for key, each in series.items()},
    }
    if parts is not None:
        report["where"] = [
            {"part": part, "p50_us": rounded(_of(parts, part).get("p50") * 1000),
             "p95_us": rounded(_of(parts, part).get("p95") * 1000)}
            for part in parts.named()
        ]  # fmt: skip
    return report


def _of(parts: Parts, part: str) -> Series:
    return Series(key=part, what=part, unit="ms", rounds=(tuple(parts.of(part)),))


def said(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """What was measured, what the bound is about, and the verdict, of one row of the JSON."""
    if row["found"] is None:
        return "", "", f"not measured: {row['reason']}"
    measured = f"{row['value']:g} {row['unit']}"
    if row["base"] is not None:
        measured += f" against {row['base']:g}"
    found = {"ratio": f"{row['found']:g} ×", "more": f"{row['found']:g} {row['unit']} more", "alone": ""}[
        row["compare"]
    ]
    if row.get("interval"):
        found += " ({:g} to {:g})".format(*row["interval"])
    if row["met"] is False:
        limit = _PLANNED[row["row"]].limit
        return measured, found, f"**not met**: {limit}" if limit else "**not met**"
    return measured, found, "reported" if row["met"] is None else "met"


def bound_of(row: Mapping[str, Any]) -> str:
    """The bound with what it counts."""
    if not row["bound"]:
        return ""
    unit = {"ratio": "×", "more": "ms more", "alone": row["unit"]}[row["compare"]]
    return f"{row['bound']} {unit}".strip()


def show(report: Mapping[str, Any], console: Console) -> None:
    """The table, and under it what it belongs to."""
    table = Table(title="make bench", title_justify="left")
    for head in ("row", "", "measured", "", "bound", "verdict"):
        table.add_column(head, overflow="fold")
    for row in report["rows"]:
        measured, found, verdict = said(row)
        style = {True: "green", False: "red"}.get(row["met"], "dim")
        table.add_row(
            row["row"], title(row), measured, found, bound_of(row), f"[{style}]{verdict.replace('**', '')}[/]"
        )
    console.print(table)
    for name, fact in report["machine"].items():
        console.print(f"[dim]{name:18} {fact}[/]", highlight=False)


def as_csv(report: Mapping[str, Any]) -> str:
    """Return the text of docs/internals/performance.csv: every row, and the machine it was measured on."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(COLUMNS)
    for row in report["rows"]:
        measured, relative, verdict = said(row)
        word, _, why = verdict.replace("**", "").partition(": ")
        lines.writerow([row["row"], title(row), bound_of(row), measured, relative, word, why])
    lines.writerows([MACHINE, name, "", fact, "", "", ""] for name, fact in report["machine"].items())
    return text.getvalue()


def keep(report: Mapping[str, Any], picture: bytes | None) -> None:
    """Write the numbers into docs/: JSON, table, picture."""
    KEPT.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    TABLE.write_text(as_csv(report), encoding="utf-8")
    if picture is not None:
        PICTURE.write_bytes(picture)


def read(file: Path) -> dict[str, Any]:
    """A report that was kept."""
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
