"""What the pages for people hold: their blocks of commands, their links, and what a link can point at.

A block for typing is tagged ``sh``, or ``console`` where it shows the output too: there a command begins with ``$ ``,
and ``…`` stands for anything. Above each stands ``<!-- run -->`` or ``<!-- not run: why -->``.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.repo.files import ROOT, committed

TYPED = ("sh", "console")

_FENCE = re.compile(r"^(?P<indent> *)```(?P<tag>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- (?P<kind>run|not run)(?:: (?P<why>[^>]+?))? -->\n+ *$")
_LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(?P<words>.+?) *$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    tag: str
    text: str
    run: bool | None
    """What the comment above it says; nothing where there is none, or where it gives no reason for not running it."""

    def __str__(self) -> str:
        """Where it stands."""
        return f"{self.page}:{self.line}"


def pages() -> dict[str, str]:
    """Path and text of every page for people, the changelog apart: it tells of what was."""
    names = [name for name in committed() if name.endswith(".md") and name != "CHANGELOG.md"]
    return {name: (ROOT / name).read_text() for name in names}


def blocks(page: str, text: str) -> Iterator[Block]:
    """Every fenced block of a page, in order."""
    for found in _FENCE.finditer(text):
        mark = _MARK.search(text[: found.start()])
        reason = mark and (mark["kind"] == "run" or mark["why"])
        yield Block(
            page=page,
            line=text.count("\n", 0, found.start()) + 1,
            tag=found["tag"],
            text=re.sub(f"^{found['indent']}", "", found["text"], flags=re.MULTILINE),
            run=mark["kind"] == "run" if mark and reason else None,
        )


def prose(text: str) -> str:
    """A page without its blocks."""
    return _FENCE.sub("", text)


def links(text: str) -> Iterator[str]:
    """Targets of a page's links and pictures."""
    yield from (found["target"] for found in _LINK.finditer(prose(text)))


def anchors(text: str) -> set[str]:
    """What a link can point at inside a page: its headings, spelt as GitHub does."""
    found: list[str] = []
    for heading in _HEADING.finditer(prose(text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading["words"]).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found.append(f"{anchor}-{found.count(anchor)}" if anchor in found else anchor)
    return set(found)


def says(printed: str, expected: str) -> bool:
    """Whether that is what was printed: ``…`` stands for anything, and lines may break elsewhere."""
    parts = [re.escape(" ".join(part.split())) for part in expected.split("…")]
    return re.fullmatch(r"\s*.*\s*".join(parts), " ".join(printed.split())) is not None


def shown(block: Block) -> Iterator[tuple[str, str]]:
    """Each command of a ``console`` block, and what it is shown to print."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output
