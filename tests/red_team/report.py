"""What the documentation says of the trial, from a run of it: ``python -m tests.red_team.report`` writes both files.

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
PAGE = ROOT / "docs/operate/red-team.md"
MARKS = ("<!-- table: tests/red_team/report.py -->\n", "<!-- end of table -->\n")
COLUMNS = ("family", "attack", "read by", "obeyed", *(each.name for each in trial.SETS))

_HEADING = f"| {{}} | attacks | obeyed | {' | '.join(COLUMNS[4:])} |\n|{' --- |' * (len(COLUMNS) - 1)}\n"

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


def table(lines: Sequence[Sequence[str]]) -> str:
    """Return the page's tables: lines for families, for the tools that attacks were read by, and for all."""
    text = _HEADING.format("family, as published")
    for family in corpus.families():
        of_family = [line for line in lines if line[0] == family.name]
        text += _row(f"**{family.title}** ({family.source})", of_family)
    text += "\n" + _HEADING.format("read by the profile of")
    for tool in sorted({line[2] for line in lines}):
        text += _row(f"`{tool}`", [line for line in lines if line[2] == tool])
    return text + _row("all", lines)


def _row(name: str, lines: Sequence[Sequence[str]]) -> str:
    attacks, obeyed, *left, control = counts(lines)
    pairs = [f"{elsewhere} / {to_host}" for elsewhere, to_host in zip(left[::2], left[1::2], strict=True)]
    return f"| {' | '.join([name, str(attacks), str(obeyed), *pairs, str(control)])} |\n"


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


def with_table(page: str, text: str) -> str:
    """Return the page with another table in it."""
    before, rest = page.split(MARKS[0])
    return before + MARKS[0] + text + MARKS[1] + rest.split(MARKS[1])[1]


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
    PAGE.write_text(with_table(PAGE.read_text(), table(lines)))
