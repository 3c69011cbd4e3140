"""What was kept of a comparison, as tables: case by case in a file, the rest between two markers of a page."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BEGIN = "<!-- begin: written by make compare -->"
END = "<!-- end: written by make compare -->"
MARKS = {"stopped": "✓", "through": "✗", "unpromised": "○", "absent": "–", "unclear": "?"}
AREAS = {
    "workspace": "files: workspace, root, devices",
    "host": "the host: files, processes, sockets, kernel settings",
    "network": "network",
    "privileges": "rights and kernel surface",
    "limits": "limits and lifetime",
    "fresh": "nothing left for the next call",
}


def keep(kept: Mapping[str, Any], to_json: Path, to_page: Path, order: Sequence[str]) -> None:
    """Write the results as JSON, systems in this order, the tables beside it, and the generated part of the page.

    Raises:
        ValueError: the page has no place for it.
    """
    ordered = {**kept, "systems": {key: kept["systems"][key] for key in order if key in kept["systems"]}}
    to_json.write_text(json.dumps(ordered, indent=1, ensure_ascii=False, sort_keys=False) + "\n", encoding="utf-8")
    for name, text in tables(ordered).items():
        to_json.with_name(name).write_text(text, encoding="utf-8")
    to_page.write_text(merged(to_page.read_text(encoding="utf-8"), rendered(ordered)), encoding="utf-8")


def merged(page: str, part: str) -> str:
    """The page with this part between its markers; raises ``ValueError`` where they are missing."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} … {END}")
    return f"{head}{BEGIN}\n{part}{END}{tail}"


def rendered(kept: Mapping[str, Any]) -> str:
    """The generated part."""
    systems = {key: each for key, each in kept["systems"].items() if not each["skipped"]}
    host = kept["host"]
    portable, all_cases = len(kept["cases"]), len(kept["cases"]) + len(kept["elsewhere"])
    about = (
        f"Run on {kept['date']}: {host['system']}, kernel {host['kernel']}, {host['processors']} processors, as "
        f"{'root' if host['root'] else 'a normal user'}, control groups {host['control_groups']}. "
        f"{portable} of {all_cases} cases are portable; suite `{kept['suite'][:19]}…`."
    )
    parts = [
        about,
        _short(kept["cases"], systems),
        *(f"`{key}` was not asked: {each['skipped']}" for key, each in kept["systems"].items() if each["skipped"]),
    ]
    return "\n" + "\n\n".join(parts) + "\n\n"


def _short(cases: Sequence[Mapping[str, str]], systems: Mapping[str, Any]) -> str:
    rows = [["", *(each["title"] for each in systems.values())]]
    rows.append(["version", *(each["version"] for each in systems.values())])
    for area, title in AREAS.items():
        names = [case["id"] for case in cases if case["area"] == area]
        rows.append([f"{title} ({len(names)})", *(_counts(each["results"], names) for each in systems.values())])
    every = [case["id"] for case in cases]
    rows.append([f"**all** ({len(every)})", *(_counts(each["results"], every) for each in systems.values())])
    times = (each.get("median_ms") for each in systems.values())
    rows.append(["`print(1)`, whole call, median of 10", *(f"{found} ms" if found else "·" for found in times)])
    return _table(rows)


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
        "comparison.csv": _csv(cases), "comparison-systems.csv": _csv(runs), "comparison-elsewhere.csv": _csv(elsewhere)
    }  # fmt: skip


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


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])
