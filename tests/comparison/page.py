"""What was kept of a comparison, as tables: each case, the sums by area, how each system was run."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MARKS = {"stopped": "✓", "through": "✗", "unpromised": "○", "absent": "–", "unclear": "?"}
AREAS = {
    "workspace": "files: workspace, root, devices",
    "host": "the host: files, processes, sockets, kernel settings",
    "network": "network",
    "privileges": "rights and kernel surface",
    "limits": "limits and lifetime",
    "fresh": "nothing left for the next call",
}


def keep(kept: Mapping[str, Any], to_json: Path, order: Sequence[str]) -> None:
    """Write the results as JSON, systems in this order, and the tables beside it."""
    ordered = {**kept, "systems": {key: kept["systems"][key] for key in order if key in kept["systems"]}}
    to_json.write_text(json.dumps(ordered, indent=1, ensure_ascii=False, sort_keys=False) + "\n", encoding="utf-8")
    for name, text in tables(ordered).items():
        to_json.with_name(name).write_text(text, encoding="utf-8")


def about(kept: Mapping[str, Any]) -> str:
    """Say when and where the comparison was run, and how much of the suite it is."""
    host = kept["host"]
    portable, all_cases = len(kept["cases"]), len(kept["cases"]) + len(kept["elsewhere"])
    return (
        f"Run on {kept['date']}: {host['system']}, kernel {host['kernel']}, {host['processors']} processors, as "
        f"{'root' if host['root'] else 'a normal user'}, control groups {host['control_groups']}. "
        f"{portable} of {all_cases} cases are portable; suite {kept['suite'][:19]}…."
    )


def summary(kept: Mapping[str, Any]) -> list[list[str]]:
    """Return the sums by area and system, the versions, and how long a call takes."""
    systems = {key: system for key, system in kept["systems"].items() if not system["skipped"]}
    rows = [["", *(system["title"] for system in systems.values())]]
    rows.append(["version", *(system["version"] for system in systems.values())])
    for area, title in {**AREAS, "": "all"}.items():
        names = [case["id"] for case in kept["cases"] if area in {"", case["area"]}]
        rows.append([f"{title} ({len(names)})", *(_counts(system["results"], names) for system in systems.values())])
    times = (system.get("median_ms") for system in systems.values())
    rows.append(["print(1), whole call, median of 10", *(f"{time} ms" if time else "·" for time in times)])
    rows.append([about(kept), *("" for _ in systems)])
    skipped = {key: system["skipped"] for key, system in kept["systems"].items() if system["skipped"]}
    return rows + [[f"{key} was not asked: {why}", *("" for _ in systems)] for key, why in skipped.items()]


def _counts(results: Mapping[str, Any], names: Sequence[str]) -> str:
    words = [results[name]["word"] for name in names if name in results]
    return " ".join(f"{words.count(word)}{mark}" for word, mark in MARKS.items() if word in words) or "·"


def tables(kept: Mapping[str, Any]) -> Mapping[str, str]:
    """The files beside the page, as CSV by name: every case under every system that was asked; how each was run."""
    systems = [each for each in kept["systems"].values() if not each["skipped"]]
    cases = [["area", "case", "claim", *(each["title"] for each in systems)]]
    for case in sorted(kept["cases"], key=lambda case: [*AREAS].index(case["area"])):
        words = (each["results"].get(case["id"], {}).get("word", "") for each in systems)
        cases.append([case["area"], case["id"], case["claim"], *(MARKS.get(word, "·") for word in words)])
    runs = [["system", "version", "command", "about it", "not promised"]]
    runs += [[each["title"], each["version"], each["command"], each["notes"], _unpromised(each)] for each in systems]
    elsewhere = [["case that is not asked of others", "why"], *([name, why] for name, why in kept["elsewhere"].items())]
    return {
        "comparison.csv": _csv(cases),
        "comparison-systems.csv": _csv(runs),
        "comparison-elsewhere.csv": _csv(elsewhere),
        "comparison-summary.csv": _csv(summary(kept)),
    }


def _unpromised(system: Mapping[str, Any]) -> str:
    reasons: dict[str, list[str]] = {}
    for name, found in system["results"].items():
        if found["word"] == "unpromised":
            reasons.setdefault(found["reason"], []).append(name)
    return " ".join(f"{_sentence(reason)} ({', '.join(names)})" for reason, names in reasons.items())


def _csv(rows: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}" + ("" if words.endswith(".") else ".")
