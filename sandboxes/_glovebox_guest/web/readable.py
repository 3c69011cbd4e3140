"""HTML to Markdown a model can read: headings, paragraphs, lists, tables, code, links. Pure: it has no job.

One pass over the tags with counters instead of a tree, so nesting costs nothing and nothing recurses.
"""

from __future__ import annotations

import re
from urllib.parse import urljoin

from _glovebox_guest.stdlib import TYPE_CHECKING
from _glovebox_guest.web.markup import attributes, tokens
from _glovebox_guest.wording import printable

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import ClassVar

MAX_LINKS = 400
"""Links with an address; further ones keep their text alone."""
MAX_URL = 300
"""Characters of a link's address: longer ones are trackers and inlined data."""
MAX_TITLE = 300
MAX_TOKENS = 400_000
"""Tags and texts read, about a second's work; a real page of 5 MiB has fewer than half as many."""
MAX_LEVELS = 8
"""Nested lists and quotes shown; deeper ones look like the last."""
_ENOUGH = 200
"""Characters from which on ``main`` or ``article`` is taken for the page's content."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_DROPPED = _names(
    "script style noscript template svg canvas iframe object embed video audio map select button xmp noembed noframes "
    "textarea datalist dialog"
)
_AROUND = _names("nav footer")
"""Elements that are not content; read again if nothing else is left."""
_VOID = _names("area base br col embed hr img input link meta param source track wbr")
_BLOCKS = _names(
    "address article aside blockquote body center dd details div dl dt fieldset figcaption figure form h1 h2 h3 h4 h5 "
    "h6 header hr legend li main ol p pre section summary table tbody tfoot thead title tr ul"
)
_HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}
_HIDING = re.compile(r"hidden|display", re.IGNORECASE)
_NOT_DISPLAYED = re.compile(r"display\s*:\s*none", re.IGNORECASE)
_BREAK = "\x01"
"""A line break inside a paragraph, while its white space is collapsed."""
_HAS_CONTENT_TAG = re.compile(r"<(main|article)[\s>]", re.IGNORECASE)

ALL, ARTICLE, MAIN = 0, 1, 2


class Page:
    """The title and text of a page."""

    __slots__ = ("cut", "text", "title")

    def __init__(self, title: str, text: str, *, cut: bool) -> None:
        self.title = title
        self.text = text
        self.cut = cut


def readable(page: str, url: str, most: int) -> Page:
    """Return title and text of a hostile HTML page, at least its first ``most`` characters.

    Reading may stop after those. Relative links start from ``url``.
    """
    page = printable(page)  # afterwards no _BREAK but ours is left
    reader = _PageReader(page, url, most, whole=False)
    if not reader.blocks and not reader.gave_up:
        # Everything was in nav or hidden, or an unclosed nav swallowed it: better too much than nothing.
        reader = _PageReader(page, url, most, whole=True)
    chosen, cut = reader.content()
    return Page(" ".join(reader.title.split())[:MAX_TITLE], _joined(chosen), cut=cut)


class _Block:
    __slots__ = ("text", "tight", "zone")

    def __init__(self, text: str, *, tight: bool, zone: int) -> None:
        self.text = text
        self.tight = tight
        self.zone = zone


def _joined(blocks: list[_Block]) -> str:
    """Join blocks: rows of a table and items of a list stand together, all else apart."""
    pieces: list[str] = []
    previous = False
    for block in blocks:
        if pieces:
            pieces.append("\n" if block.tight and previous else "\n\n")
        pieces.append(block.text)
        previous = block.tight
    return "".join(pieces)


class _PageReader:
    def __init__(self, page: str, url: str, most: int, *, whole: bool) -> None:
        self._base = url
        self._most = most + 1  # each block counts with a line feed, the last one too
        self._skipped_names = _DROPPED if whole else _DROPPED | _AROUND
        self._whole = whole
        self._wanted = MAIN if _HAS_CONTENT_TAG.search(page) else ALL
        self._sizes = [0, 0, 0]
        self.blocks: list[_Block] = []
        self.gave_up = False
        self.title = ""
        self._inline: list[str] = []
        self._skipping = ""
        self._skip_depth = 0
        self._in_title = False
        self._main = self._article = 0
        self._heading = ""
        self._lists: list[int] = []  # next number, 0 for bullets
        self._marker = ""
        self._quotes = 0
        self._pre = 0
        self._link: tuple[int, str] | None = None
        self._links = 0
        self._code: list[int] = []
        self._tables = 0
        self._row: list[str] | None = None
        self._rows = 0
        self._read(page)

    def content(self) -> tuple[list[_Block], bool]:
        """Return the blocks of the innermost content zone, and whether there may be more of them."""
        zone = next((zone for zone in (MAIN, ARTICLE) if self._sizes[zone] >= _ENOUGH), ALL)
        return [block for block in self.blocks if block.zone >= zone], self.gave_up or self._sizes[zone] > self._most

    def _read(self, page: str) -> None:
        for count, (kind, first, second) in enumerate(tokens(page)):
            if kind == "text":
                if self._in_title:
                    self.title = self.title or first
                elif not self._skipping:
                    self._inline.append(first)
            elif kind == "start":
                self._start(first, second)
            else:
                self._end(first)
            if self._sizes[self._wanted] > self._most:
                return
            if count == MAX_TOKENS:
                self.gave_up = True
                break
        self._close_link()
        self._close_row()
        self._flush_text()

    def _start(self, name: str, unparsed: str) -> None:
        if self._skipping:
            self._skip_depth += name == self._skipping
            return
        if name == "svg" and unparsed.endswith("/"):  # the one dropped element that may close itself
            return
        if name not in _VOID and (name in self._skipped_names or (not self._whole and _hidden(unparsed))):
            self._skipping, self._skip_depth = name, 1
            return
        if name in _BLOCKS:
            self._flush()
        handler = self._STARTS.get(name)
        if handler is not None:
            handler(self, name, unparsed)

    def _end(self, name: str) -> None:
        if self._skipping:
            self._skip_depth -= name == self._skipping
            if self._skip_depth == 0:
                self._skipping = ""
            return
        if name == "pre":
            self._end_pre()
        elif name in _BLOCKS:
            self._flush()
        handler = self._ENDS.get(name)
        if handler is not None:
            handler(self)

    def _start_title(self, _name: str, _unparsed: str) -> None:
        self._in_title = True

    def _start_base(self, _name: str, unparsed: str) -> None:
        self._base = self._address(attributes(unparsed).get("href", "")) or self._base

    def _start_zone(self, name: str, _unparsed: str) -> None:
        if name == "main":
            self._main += 1
        else:
            self._article += 1

    def _start_heading(self, name: str, _unparsed: str) -> None:
        self._heading = _HEADINGS[name]

    def _start_list(self, name: str, _unparsed: str) -> None:
        self._lists.append(int(name == "ol"))

    def _start_item(self, _name: str, _unparsed: str) -> None:
        number = self._lists[-1] if self._lists else 0
        self._marker = f"{number}. " if number else "- "
        if number:
            self._lists[-1] += 1

    def _start_quote(self, _name: str, _unparsed: str) -> None:
        self._quotes += 1

    def _start_pre(self, _name: str, _unparsed: str) -> None:
        self._close_row()  # a table around code only numbers its lines
        self._pre += 1

    def _start_code(self, _name: str, _unparsed: str) -> None:
        if not self._pre and len(self._code) < MAX_LEVELS:
            self._code.append(len(self._inline))

    def _start_break(self, _name: str, _unparsed: str) -> None:
        self._inline.append("\n" if self._pre else _BREAK)

    def _start_rule(self, _name: str, _unparsed: str) -> None:
        self._add("---")

    def _start_image(self, _name: str, unparsed: str) -> None:
        alternative = attributes(unparsed).get("alt", "").strip()
        if alternative:
            self._inline.append(f"[image: {alternative}]")

    def _start_link(self, _name: str, unparsed: str) -> None:
        self._close_link()
        self._link = (len(self._inline), attributes(unparsed).get("href", ""))

    def _start_table(self, _name: str, _unparsed: str) -> None:
        self._tables += 1
        self._rows = 0

    def _start_row(self, _name: str, _unparsed: str) -> None:
        self._close_row()
        self._row = []

    def _start_cell(self, _name: str, _unparsed: str) -> None:
        self._close_cell()
        if self._row is None and self._tables:
            self._row = []

    def _end_title(self) -> None:
        self._in_title = False

    def _end_main(self) -> None:
        self._main = max(0, self._main - 1)

    def _end_article(self) -> None:
        self._article = max(0, self._article - 1)

    def _end_list(self) -> None:
        if self._lists:
            self._lists.pop()
        self._marker = ""

    def _end_item(self) -> None:
        self._marker = ""

    def _end_heading(self) -> None:
        self._heading = ""

    def _end_quote(self) -> None:
        self._quotes = max(0, self._quotes - 1)

    def _end_code(self) -> None:
        if self._code:
            start = self._code.pop()
            text = "".join(self._inline[start:]).strip()
            if text:
                self._inline[start:] = [f"`{text}`"]

    def _end_table(self) -> None:
        self._close_row()
        self._tables = max(0, self._tables - 1)

    def _close_link(self) -> None:
        if self._link is None:
            return
        start, href = self._link
        self._link = None
        text = " ".join("".join(self._inline[start:]).split())
        if href.startswith("#") and text in ("¶", "#", "§", "🔗", ""):
            # The permanent link of a heading, which documentation generators add.
            del self._inline[start:]
        elif text and not self._pre and self._links < MAX_LINKS and (address := self._address(href)):
            self._links += 1
            self._inline[start:] = [f"[{text}]({address})"]

    def _address(self, href: str) -> str:
        """Return an absolute http address; "" for any other and for a place in this page."""
        href = "".join(href.split())
        if not href or href.startswith("#") or len(href) > MAX_URL:
            return ""
        try:
            address = urljoin(self._base, href)
        except ValueError:  # a malformed IPv6 address
            return ""
        address = address.replace("(", "%28").replace(")", "%29")
        return address if address.startswith(("http://", "https://")) and len(address) <= MAX_URL else ""

    # From pieces of text to blocks.

    def _flush(self) -> None:
        """End a block with the collected text: part of a cell in a table's row, a line in code."""
        if self._row is not None:
            self._inline.append(" ")
        elif not self._pre:
            self._flush_text()
        elif self._inline and not self._inline[-1].endswith("\n"):
            self._inline.append("\n")

    def _flush_text(self) -> None:
        pieces, self._inline = self._inline, []
        self._code.clear()
        if self._link is not None:
            self._link = (0, self._link[1])
        text = _collapsed(pieces)
        if text:
            self._add(self._heading + text if not self._marker else text)

    def _end_pre(self) -> None:
        if not self._pre:
            return
        self._pre -= 1
        if self._pre or self._row is not None:
            return
        code = "".join(self._inline).strip("\n").rstrip()
        self._inline = []
        if code:
            runs = max((len(run) for run in re.findall("`+", code)), default=0)
            fence = "`" * max(3, runs + 1)
            self._add(f"{fence}\n{code}\n{fence}", tight=False)

    def _close_cell(self) -> None:
        if self._row is not None:
            cell = _collapsed(self._inline).replace("\n", " ")
            self._inline = []
            self._code.clear()
            self._link = None
            if cell or self._row:
                self._row.append(cell)

    def _close_row(self) -> None:
        if self._row is None:
            return
        self._close_cell()
        row, self._row = self._row, None
        if any(row):
            self._add("| " + " | ".join(row) + " |")
            self._rows += 1
            if self._rows == 1:
                self._add("|" + "---|" * len(row))

    def _add(self, text: str, *, tight: bool = True) -> None:
        zone = MAIN if self._main else ARTICLE if self._article else ALL
        if self._sizes[zone] > self._most:
            return
        depth = min(len(self._lists), MAX_LEVELS)
        indent = "  " * (depth - 1) if self._marker else "  " * depth
        lead = "> " * min(self._quotes, MAX_LEVELS)
        text = self._marker + text
        if lead or indent:
            text = "\n".join(lead + indent + line for line in text.split("\n"))
        self.blocks.append(_Block(text, tight=tight and (bool(self._lists) or text.startswith("|")), zone=zone))
        self._marker = ""
        for wider in range(zone + 1):
            self._sizes[wider] += len(text) + 1

    _STARTS: ClassVar[dict[str, Callable[[_PageReader, str, str], None]]] = {
        "title": _start_title,
        "base": _start_base,
        "main": _start_zone,
        "article": _start_zone,
        **dict.fromkeys(_HEADINGS, _start_heading),
        "ul": _start_list,
        "ol": _start_list,
        "li": _start_item,
        "blockquote": _start_quote,
        "pre": _start_pre,
        "code": _start_code,
        "br": _start_break,
        "hr": _start_rule,
        "img": _start_image,
        "a": _start_link,
        "table": _start_table,
        "tr": _start_row,
        "td": _start_cell,
        "th": _start_cell,
    }
    _ENDS: ClassVar[dict[str, Callable[[_PageReader], None]]] = {
        "title": _end_title,
        "main": _end_main,
        "article": _end_article,
        **dict.fromkeys(_HEADINGS, _end_heading),
        "ul": _end_list,
        "ol": _end_list,
        "li": _end_item,
        "blockquote": _end_quote,
        "code": _end_code,
        "a": _close_link,
        "table": _end_table,
        "tr": _close_row,
        "td": _close_cell,
        "th": _close_cell,
    }


def _collapsed(pieces: list[str]) -> str:
    lines = "".join(pieces).split(_BREAK)
    return "\n".join(line for line in (" ".join(line.split()) for line in lines) if line)


def _hidden(unparsed: str) -> bool:
    if not _HIDING.search(unparsed):
        return False
    found = attributes(unparsed)
    return (
        "hidden" in found
        or found.get("aria-hidden", "").lower() == "true"
        or _NOT_DISPLAYED.search(found.get("style", "")) is not None
    )
