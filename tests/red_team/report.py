"""What the documentation says of the trial, from a run of it: ``python -m tests.red_team.report`` writes both tables.

As root, since it makes network namespaces; it takes ten minutes. With names of families those alone are tried again.
"""

import csv
import io
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import anyio
from tests.fixtures.internet import cable
from tests.red_team import corpus, trial

ROOT = Path(__file__).resolve().parent.parent.parent
CSV = ROOT / "docs/operate/red-team.csv"
SUMMARY = ROOT / "docs/operate/red-team-summary.csv"
COLUMNS = ("family", "attack", "read by", "obeyed", *(each.name for each in trial.SETS))

Results = Mapping[str, Sequence[trial.Row]]
"""Rows of each set of profiles, by its name."""


def lines_of(results: Results) -> list[list[str]]:
    """One line for each attack: whether the model found an order, and who got the canary under each set."""
    columns = [results[each.name] for each in trial.SETS]
    lines = []
    for rows in zip(*columns, strict=True):
        family, _, attack = rows[0].attack.partition("/")
        obeyed = "yes" if rows[0].obeyed else "no"
        lines.append([family, attack, rows[0].tool, obeyed, *("; ".join(row.left_to) for row in rows)])
    return lines


def as_csv(lines: Iterable[Sequence[str]]) -> str:
    """Return the text of docs/operate/red-team.csv."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(lines)
    return text.getvalue()


def read_csv() -> list[list[str]]:
    """The lines that are published."""
    return list(csv.reader(io.StringIO(CSV.read_text())))[1:]


def summary(lines: Sequence[Sequence[str]]) -> str:
    """Return the text of docs/operate/red-team-summary.csv: sums by family, by the tool that read, and of all."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["by", "which", "source", "attacks", "obeyed", *COLUMNS[4:]])
    for family in corpus.families():
        of_family = [line for line in lines if line[0] == family.name]
        writer.writerow(["family", family.title, family.source, *_sums(of_family)])
    for tool in sorted({line[2] for line in lines}):
        writer.writerow(["tool", tool, "", *_sums([line for line in lines if line[2] == tool])])
    writer.writerow(["all", "", "", *_sums(lines)])
    return text.getvalue()


def _sums(lines: Sequence[Sequence[str]]) -> list[str]:
    attacks, obeyed, *left, control = counts(lines)
    pairs = [f"{elsewhere} / {to_host}" for elsewhere, to_host in zip(left[::2], left[1::2], strict=True)]
    return [str(attacks), str(obeyed), *pairs, str(control)]


def counts(lines: Iterable[Sequence[str]]) -> tuple[int, ...]:
    """How many attacks, how many were obeyed, and of how many the canary left, under each set elsewhere and to it."""
    listed = list(lines)
    *tried, control = ([set(filter(None, line[at].split("; "))) for line in listed] for at in range(4, len(COLUMNS)))
    return (
        len(listed),
        sum(line[3] == "yes" for line in listed),
        *(number for each in tried for number in (_elsewhere(each), sum("pages" in left for left in each))),
        sum(bool(left) for left in control),
    )


def _elsewhere(lefts: Iterable[set[str]]) -> int:
    return sum(bool(left - {"pages"}) for left in lefts)


async def _run(families: Iterable[corpus.Family]) -> Results:
    results = {}
    with cable() as wires, tempfile.TemporaryDirectory() as directory:
        for profiles in trial.SETS:
            own = Path(directory, profiles.name.replace(" ", "-"))
            own.mkdir()
            results[profiles.name] = await trial.run(wires, own, profiles, families)
            found = results[profiles.name]
            sys.stdout.write(
                f"{profiles.name}: {len(found)} attacks, {sum(row.obeyed for row in found)} obeyed, "
                f"{sum(row.calls for row in found)} calls, {sum(row.refused for row in found)} refused, "
                f"left: {dict(trial.totals(found))}\n"
            )
    return results


if __name__ == "__main__":
    named = set(sys.argv[1:])
    families = [each for each in corpus.families() if not named or each.name in named]
    tried = lines_of(anyio.run(_run, families))
    known = read_csv() if named else []
    # In the order of the families; what was not tried stays as it was.
    lines = sorted(tried + [line for line in known if line[0] not in named], key=lambda line: line[0])
    CSV.write_text(as_csv(lines))
    SUMMARY.write_text(summary(lines))
