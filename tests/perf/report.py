"""What a run found, as JSON, as a table in a terminal, as the tables of performance.md. Nothing here measures."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.perf.machine import ROOT
from tests.perf.rows import ROWS, Verdict
from tests.perf.series import Series, rounded
from tests.perf.where import Parts

PAGE = ROOT / "docs" / "internals" / "performance.md"
PROMISES = ROOT / "docs" / "operate" / "specification.md"
KEPT = ROOT / "docs" / "internals" / "performance.json"
PICTURE = ROOT / "docs" / "internals" / "performance.png"
BEGIN = "<!-- begin: written by make bench -->"
END = "<!-- end: written by make bench -->"
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


def page(report: Mapping[str, Any]) -> str:
    """What stands between the markers of docs/internals/performance.md: the rows without a bound, and the machine."""
    lines = ["| row | measured | | |", "| --- | --- | --- | --- |"]
    for row in report["rows"]:
        if not row["bound"]:
            measured, found, verdict = said(row)
            lines.append(f"| `{row['row']}` | {measured} | {found} | {_cell(verdict)} |")
    lines += ["", *(f"- {name}: {_cell(fact)}" for name, fact in report["machine"].items())]
    return "\n".join(lines)


def promises(report: Mapping[str, Any]) -> str:
    """What stands between the markers of docs/operate/specification.md: the rows that have a bound."""
    lines = ["| row | must | measured | |", "| --- | --- | --- | --- |"]
    for row in report["rows"]:
        if row["bound"]:
            measured, found, verdict = said(row)
            numbers = f"{found} ({measured})" if found else measured
            lines.append(f"| `{row['row']}` | {bound_of(row)} | {numbers} | {_cell(verdict)} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def written(text: str, between: str) -> str:
    """A page with what stands between its markers renewed.

    Raises:
        ValueError: the markers are not there.
    """
    if BEGIN not in text or END not in text:
        raise ValueError(f"the page has no place between {BEGIN} and {END}")
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    return pattern.sub(lambda _: f"{BEGIN}\n{between}\n{END}", text)


def keep(report: Mapping[str, Any], picture: bytes | None) -> None:
    """Write the numbers into docs/: JSON, the tables of both pages, picture."""
    KEPT.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for path, between in ((PAGE, page(report)), (PROMISES, promises(report))):
        path.write_text(written(path.read_text(encoding="utf-8"), between), encoding="utf-8")
    if picture is not None:
        PICTURE.write_bytes(picture)


def read(file: Path) -> dict[str, Any]:
    """A report that was kept."""
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
