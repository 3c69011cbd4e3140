"""What a linter cannot say: sizes, reasons, headers, and words that have no place here."""

import ast
import io
import re
import statistics
import tokenize
from collections.abc import Iterator

from tests.repo.files import ROOT, committed, python_files, texts
from tests.unit.test_watch_markers import NEEDLES

from glovebox_server.guards.redaction.detector import Detector
from glovebox_server.guards.redaction.patterns import find_secrets

MAX_LINES = 500
MEDIAN_LINES = 200


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Line and words of every comment."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def test_modules_are_small() -> None:
    """No module is over 500 lines, and the median of the source is far below."""
    lengths = {name: len(text.splitlines()) for name, text in python_files()}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}
    source = [length for name, length in lengths.items() if not name.startswith(("tests/", "scripts/"))]
    assert statistics.median(source) <= MEDIAN_LINES


def test_every_module_says_what_lives_in_it() -> None:
    """The first lines of every module that holds code are a docstring."""
    assert [name for name, text in python_files() if text.strip() and not ast.get_docstring(ast.parse(text))] == []


def test_every_silenced_warning_names_its_code_and_its_reason() -> None:
    """`noqa` and `type: ignore` carry the code they silence and, but in tests, why."""
    wrong = []
    for name, text in python_files():
        for line, comment in comments(text):
            for found in re.finditer(r"(noqa|type:\s*ignore)(.*)", comment):
                kind, rest = found.groups()
                code = re.match(r"\s*:\s*[A-Z]+[0-9]+(,\s*[A-Z]+[0-9]+)*" if kind == "noqa" else r"\[[a-z, -]+\]", rest)
                reason = code and re.search(r"\w{3,}", rest[code.end() :])
                if not code or not (reason or name.startswith("tests/")):
                    wrong.append(f"{name}:{line}: {comment}")
    assert not wrong


def test_every_skip_has_a_reason() -> None:
    """A test is only skipped with words that say why."""
    wrong = []
    for name, text in python_files("tests"):
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called in {"pytest.skip", "pytest.fail"} and not (node.args or node.keywords):
                wrong.append(f"{name}:{node.lineno}")
            if called in {"pytest.mark.skip", "pytest.mark.skipif", "pytest.mark.xfail"} and not any(
                keyword.arg == "reason" for keyword in node.keywords
            ):
                wrong.append(f"{name}:{node.lineno}")
    assert not wrong


def test_nothing_names_the_machine_it_was_written_on() -> None:
    """No path of a developer's machine and no address of a package index's files is in the repository."""
    # Put together from halves, or this file would name them.
    halves = (("/wo", "rk/"), ("/tm", "p/probe"), ("../sha", "red"), ("files.python", "hosted.org"), ("/opt/py", "pi"))
    words = ["".join(pair) for pair in halves]
    wrong = [
        f"{name}: {word}"
        for name, text in texts()
        for word in words
        if re.search(rf"(?<![\w.]){re.escape(word)}", text)
    ]
    assert not wrong


def test_package_indexes_are_named_only_as_places_a_tool_may_fetch_from() -> None:
    """Locks and scripts use whatever index the machine is set up for; profiles, their docs and tests may name hosts."""
    host = re.compile(r"\b(pypi\.org|registry\.npmjs\.org|deb\.debian\.org)\b")
    may = (
        "profiles/",
        "docs/",
        "tests/",
        "README.md",
        "server/glovebox_server/tools/",
        "server/glovebox_server/egress/",
        "scripts/demo.py",
    )
    assert [name for name, text in texts() if host.search(text) and not name.startswith(may)] == []
    locks = [name for name, text in texts() if name.endswith((".lock", "lock.json")) and host.search(text)]
    assert locks == []


def test_no_text_holds_what_looks_like_a_secret_or_a_canary_s_marker() -> None:
    """Some megabytes of what people and programs write; what tests make up is made up of parts."""
    files = [path for path in map(ROOT.joinpath, committed()) if path.stat().st_size < 4 << 20]
    assert len(files) > 300
    for path in files:
        data = path.read_bytes()
        assert path.name == "test_watch_markers.py" or Detector(NEEDLES).feed(data) is None
        assert list(find_secrets(data)) == [], path
