"""Every security claim and what holds it, read from docs/operate/claims.csv and the conformance cases.

``python -m tests.claims`` prints them. A claim has an id (GB-…), the attackers it is against, a severity in gVisor's
terms, and tests: files or functions of the suite, and cases that name it in ``proves``.
"""

import ast
import csv
import io
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.conformance.whole_calls import case as call

from glovebox_sandboxes.conformance import case
from glovebox_sandboxes.conformance.case import ClaimCase as Case
from glovebox_sandboxes.drivers.registry import NAMES

ROOT = Path(__file__).resolve().parent.parent
SEVERITIES = ("Escape", "HostLeak", "Exfil", "Lateral", "HostDoS", "PeerDoS")
"""What would happen if the sentence were false, worst first: docs/operate/threat-model.md says what each word means."""
ATTACKERS = ("program", "model", "content", "peer", "outsider", "local user", "operator's mistake", "all")
SYSTEM_CALLS = "GB-KERN-3"
"""The sentence that the cases of ``sandboxes/glovebox_sandboxes/seccomp`` are about."""

TABLE = ROOT / "docs/operate/claims.csv"
COLUMNS = ["id", "about", "claim", "against", "severity", "held by"]

_ID = re.compile(r"GB-[A-Z]+-[0-9]+")
_TEST = re.compile(r"\b(test_[a-z0-9_]+\.py)(?:::(test_[a-z0-9_]+))?")
_MARK = re.compile(r"<!-- ((?:GB-[A-Z]+-[0-9]+ ?)+)-->")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentence:
    """One claim of the threat model."""

    id: str
    text: str
    attackers: tuple[str, ...]
    severities: tuple[str, ...]
    says_cases: bool
    """Whether its row says that cases hold it."""
    tests: tuple[tuple[str, str], ...]
    """File, and function or nothing."""
    cases: tuple[Case, ...]

    @property
    def drivers(self) -> tuple[str, ...]:
        """Drivers it is tried on: by cases on each without a gap, by tests on those they are marked for.

        None where it is the server's alone.
        """
        found = {name for one in self.cases for name in NAMES if name not in one.gaps and _tried(one, name)}
        for file, _ in self.tests:
            text = modules().get(file, Path()).read_text() if file in modules() else ""
            found |= {name for name in NAMES if f'driver("{name}")' in text}
        return tuple(name for name in NAMES if name in found)


def _tried(one: Case, driver: str) -> bool:
    return not isinstance(one, call.CallCase) or one.tried_on(driver)


@cache
def modules() -> Mapping[str, Path]:
    """Test files by name; names are unique, or pytest could not collect them together."""
    return {path.name: path for path in sorted((ROOT / "tests").rglob("test_*.py"))}


@cache
def functions(file: str) -> frozenset[str]:
    """Names of a test file's tests."""
    tree = ast.parse(modules()[file].read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds) and node.name.startswith("test_"))


def sentences(text: str | None = None, cases: Iterable[Case] | None = None) -> tuple[Sentence, ...]:
    """Return all of them, in the order of the table.

    Args:
        text: of the table; docs/operate/claims.csv unless given.
        cases: the shipped ones unless given.

    Raises:
        ValueError: A row is not of the form that the table has.
    """
    header, *rows = csv.reader(io.StringIO(TABLE.read_text() if text is None else text), strict=True)
    if header != COLUMNS or [row for row in rows if len(row) != len(COLUMNS) or not _ID.fullmatch(row[0])]:
        raise ValueError(f"{TABLE.name}: a row is not {', '.join(COLUMNS)}")
    known: tuple[Case, ...] = (*case.load(), *call.load()) if cases is None else tuple(cases)
    return tuple(
        Sentence(
            id=identity,
            text=words,
            attackers=tuple(against.split(", ")),
            severities=tuple(severity.split(", ")) if severity else (),
            says_cases=tests.startswith("cases"),
            tests=tuple(_TEST.findall(tests)),
            cases=tuple(known_case for known_case in known if identity in known_case.proves),
        )
        for identity, _, words, against, severity, tests in rows
    )


def marks(text: str) -> tuple[str, ...]:
    """Ids that a page names behind its own sentences, as comments a reader does not see."""
    return tuple(identity for group in _MARK.findall(text) for identity in group.split())


def problems(found: Iterable[Sentence], cases: Iterable[Case], escape: Iterable[str], readme: str) -> list[str]:
    """Everything that does not fit together; empty when each sentence has its tests and each attack its sentence.

    Args:
        found: the sentences.
        cases: of the conformance suite.
        escape: names of the files in tests/escape.
        readme: the README's text.
    """
    wrong: list[str] = []
    sentence_list = list(found)
    ids = [each.id for each in sentence_list]
    wrong += [f"{identity}: is given twice" for identity in dict.fromkeys(ids) if ids.count(identity) > 1]
    for each in sentence_list:
        wrong += [f"{each.id}: {problem}" for problem in _of(each)]
    for one in cases:
        wrong += [f"case {one.id}: proves {name}, which is no sentence" for name in one.proves if name not in ids]
    named = {file for each in sentence_list for file, _ in each.tests}
    wrong += [f"tests/escape/{name}: no sentence names it" for name in escape if name not in named]
    marked = marks(readme)
    wrong += [f"README.md: names {name}, which is no sentence" for name in marked if name not in ids]
    for paragraph in readme.partition("## What it does")[2].partition("\n## ")[0].split("\n\n"):
        if paragraph.strip() and not marks(paragraph) and not paragraph.endswith("answered:"):
            wrong.append(f"README.md: no sentence stands behind {paragraph.strip()[:60]!r}")
    return wrong


def _of(each: Sentence) -> list[str]:
    wrong = [f"{name!r} is no attacker" for name in each.attackers if name not in ATTACKERS]
    wrong += [f"{name!r} is no severity" for name in each.severities if name not in SEVERITIES]
    if not each.severities:
        wrong.append("says no severity")
    if each.says_cases != bool(each.cases) and each.id != SYSTEM_CALLS:
        wrong.append("says cases, and none proves it" if each.says_cases else "does not say cases, and some prove it")
    if not each.tests and not each.cases and each.id != SYSTEM_CALLS:
        wrong.append("has no test")
    for file, function in each.tests:
        if file not in modules():
            wrong.append(f"there is no {file}")
        elif function and function not in functions(file):
            wrong.append(f"{file} has no {function}")
    return wrong


def _print() -> None:
    for each in sentences():
        where = ", ".join(each.drivers) or "server"
        sys.stdout.write(
            f"{each.id}  {', '.join(each.attackers)}: {', '.join(each.severities)}  [{where}]\n  {each.text}\n"
        )
        held = [f"{file}::{function}" if function else file for file, function in each.tests]
        sys.stdout.write(f"  {', '.join([*(one.id for one in each.cases), *held])}\n")


if __name__ == "__main__":
    _print()
