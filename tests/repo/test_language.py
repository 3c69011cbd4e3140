"""The field's English: banned phrases (language.toml), and titles of commits. Pages have none; code has ceilings."""

import ast
import re
import subprocess  # noqa: TID251 - asks git; nothing here comes from a sandbox
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.repo.files import ROOT, python_files
from tests.repo.pages import pages, prose

PHRASES = tomllib.loads(Path(__file__).with_name("language.toml").read_text())["phrase"]
FIRST = "11a23de"
MAX_TITLE = 72
MAX_PAGE_WORDS, MAX_DECISION_WORDS = 2000, 220

_CODE = re.compile(r"`[^`]*`")
_TITLE = re.compile(r"[a-z][a-z0-9,_/.-]*: (?P<verb>[a-z]+)[^.]*(?:\.[^.]+)*")
_PARTICIPLE = re.compile(r".*(?:ing|[^e]ed|[^s]s)")
_VERBS = {"bring", "embed", "need", "address", "bypass", "focus", "discuss"}


def split_strings(text: str) -> tuple[list[str], list[str]]:
    """Return the docstrings of a module, fields' included, and its other strings."""
    tree = list(ast.walk(ast.parse(text)))
    documented = {id(node.value) for node in tree if isinstance(node, ast.Expr)}
    constants = [node for node in tree if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    docstrings = [str(node.value) for node in constants if id(node) in documented]
    return docstrings, [str(node.value) for node in constants if id(node) not in documented]


def count_phrases(texts: Iterable[str]) -> Counter[str]:
    """Count each banned phrase by what to write instead."""
    joined = [" ".join(text.split()) for text in texts]
    patterns = [(phrase["write"], re.compile(phrase["pattern"], re.IGNORECASE)) for phrase in PHRASES]
    return +Counter({write: sum(len(pattern.findall(text)) for text in joined) for write, pattern in patterns})


def test_pages_have_no_banned_phrase() -> None:
    """Neither the README nor any page for people; their code is not read."""
    counts = {page: count_phrases([_CODE.sub("", prose(text))]) for page, text in pages().items()}
    assert {page: dict(count) for page, count in counts.items() if count - Counter(["an imperative"])} == {}


@pytest.mark.parametrize(("kind", "which"), [("docstrings", 0), ("texts", 1)])
def test_code_has_no_more_banned_phrases_than_before(kind: str, which: int) -> None:
    """In the product's docstrings, and in its other strings: help, refusals, notes, errors."""
    counts = count_phrases(
        text for _, source in python_files("server", "sandboxes", "profiles") for text in split_strings(source)[which]
    )
    ceilings = {phrase["write"]: phrase[kind] for phrase in PHRASES if kind in phrase}
    assert {write: counts[write] for write, ceiling in ceilings.items() if counts[write] > ceiling} == {}


def test_a_banned_phrase_is_found() -> None:
    """The control: over a line's end, in other case, in a docstring and in another string."""
    docstrings, texts = split_strings('"""It goes\n  on."""\ndef f():\n    """What GOES on."""\n    return "a yes"\n')
    assert count_phrases(docstrings) == {"continues": 2, "an imperative": 1}
    assert count_phrases(texts) == {"approval": 1}


def test_pages_are_short() -> None:
    """One that is much longer than 900 words is two; decisions have a bound of their own."""
    lengths = {page: len(text.split()) for page, text in pages().items() if not page.startswith("tests/")}
    limits = {page: MAX_DECISION_WORDS if "/decisions/0" in page else MAX_PAGE_WORDS for page in lengths}
    assert {page: words for page, words in lengths.items() if words > limits[page]} == {}


def problem_of(title: str) -> str:
    """Return what is wrong with a commit's title; empty if nothing is."""
    if title.startswith(('Revert "', "fixup! ")):
        return ""
    found = _TITLE.fullmatch(title)
    if len(title) > MAX_TITLE or not found:
        return f"not `area: imperative` of at most {MAX_TITLE} characters, without a full stop"
    verb = found["verb"]
    return f"{verb!r} is no imperative" if _PARTICIPLE.fullmatch(verb) and verb not in _VERBS else ""


def test_titles_of_commits_have_the_form() -> None:
    """Since the redesign, merges aside; a shallow clone, or a copy without history, has none to check."""
    git = ("git", "-c", f"safe.directory={ROOT}", "log", "--no-merges", "--format=%s", f"{FIRST}..HEAD")
    log = subprocess.run(git, cwd=ROOT, capture_output=True, check=False, text=True)
    if log.returncode:
        pytest.skip(f"history does not reach {FIRST}")
    assert {title: problem for title in log.stdout.splitlines() if (problem := problem_of(title))} == {}


def test_a_wrong_title_is_found() -> None:
    """The control: length, area without blanks, tense, case, full stop."""
    right = ["core: put calls through a chain", "tests: pass the clock", "docs: start at v1.2", 'Revert "It."']
    words = ("a" * 72, "removed it", "removes it", "Do it", "do it.")
    wrong = ["A scan finds it", "docs, tests: do it", *(f"core: {each}" for each in words)]
    assert [bool(problem_of(title)) for title in (*right, *wrong)] == [False] * len(right) + [True] * len(wrong)
