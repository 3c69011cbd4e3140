"""No page has a command that nobody runs, or a link that leads nowhere."""

import re
from pathlib import PurePosixPath

from tests.repo.files import ROOT
from tests.repo.pages import TYPED, anchors, blocks, links, pages

_TYPED = re.compile(r"^(\$ |glovebox |make |\.venv/bin/)", re.MULTILINE)
_PLACE = re.compile(r"^\| [A-Z][^|]+\? \| `([^`]+)` \| `([^`]+)` \|$", re.MULTILINE)
_TARGET = re.compile(r"(?:^|`)make ([a-z-]+)", re.MULTILINE)


def test_every_block_of_commands_is_run_or_says_why_not() -> None:
    """`<!-- run -->` or `<!-- not run: why -->` stands above it; CONTRIBUTING.md says how they are run."""
    found = [block for page, text in pages().items() for block in blocks(page, text)]
    assert [str(block) for block in found if block.tag in TYPED and block.run is None] == []
    assert [
        f"{block}: tag it sh, console or text" for block in found if not block.tag and _TYPED.search(block.text)
    ] == []


def test_a_block_without_a_mark_or_a_reason_is_found() -> None:
    """The control."""
    block = "```sh\nglovebox doctor\n```\n"
    texts = [block, f"<!-- not run -->\n{block}", f"<!-- not run: it waits -->\n{block}", f"<!-- run -->\n\n{block}"]
    assert [next(blocks("page.md", text)).run for text in texts] == [None, None, False, True]


def test_every_make_target_in_a_page_exists() -> None:
    """Lines with `make` are not run by tests."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {(page, target) for page, text in pages().items() for target in _TARGET.findall(text)}
    assert {target for _, target in named} >= {"demo", "test"}
    assert {(page, target) for page, target in named if target not in targets} == set()


def test_the_map_of_the_code_names_what_exists() -> None:
    """Each row of "Where to look" has a file and a function or class that is defined there, in Python or C."""
    rows = _PLACE.findall((ROOT / "docs/internals/design.md").read_text())
    assert len(rows) >= 10
    definition = r"(?:def|class) {0}\b|^static [a-z ]+ {0}\("
    texts = {path: (ROOT / path).read_text() for path, _ in rows}
    defined = {(path, name) for path, name in rows if re.search(definition.format(name), texts[path], re.MULTILINE)}
    assert set(rows) - defined == set()


def test_every_link_leads_somewhere() -> None:
    """Each file exists, and each anchor is a heading of it."""
    texts = pages()
    wrong = []
    for page, text in texts.items():
        for link in links(text):
            path, _, anchor = link.partition("#")
            if "://" in link or path.startswith("mailto:"):
                continue
            target = ROOT / PurePosixPath(page).parent / path if path else ROOT / page
            if not target.exists():
                wrong.append(f"{page}: {link}")
            elif anchor and anchor not in anchors(target.read_text()):
                wrong.append(f"{page}: {link}, which has no such heading")
    assert wrong == []
