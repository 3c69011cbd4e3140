"""HTML to Markdown a model can read: headings, paragraphs, lists, tables, code, links. Pure: it has no job.

One pass over the tags with counters instead of a tree, so nesting costs nothing and nothing recurses.

``html.parser`` takes quadratic time on pages made for it (100 kB of ``<a `` cost it over a minute). Here is the part of
the standard's tokenizer that matters for text; it reads every byte a fixed number of times.
https://html.spec.whatwg.org/multipage/parsing.html#tokenization
"""

from __future__ import annotations

import html
import re
from urllib.parse import urljoin

from _glovebox_guest.stdlib import Iterator, TypeAlias
from _glovebox_guest.wording import printable

Token: TypeAlias = tuple[str, str, str]
"""Kind, then: ``text``, the text, "" / ``start``, the tag's name, its attributes unparsed / ``end``, name, ""."""

# A quote counts only after an equals sign, and only if it is closed. Repetition is possessive, or looks for one end, so
# a tag that does not end costs one look at the rest of the page, which is dropped with it. A group that looks ahead is
# not repeated possessively: Python 3.11 passes over the end of one.
_TOKEN = re.compile(
    r"""<!--(?:-?>|.*?(?:--!?>|\Z))"""
    r"""|<(?P<end>/?+)(?P<name>[a-zA-Z][^\s/>]*+)(?P<attributes>(?:[^>=]++|=\s*+(?:"[^"]*+"|'[^']*+'|))*+)>"""
    r"""|</?[a-zA-Z].*+|<[!?/][^>]*+>?|(?P<text><|[^<]++)""",
    re.DOTALL,
)
_ATTRIBUTE = re.compile(r"""([^\s"'>/=]++)(?:\s*+=\s*+(?:"([^"]*+)"|'([^']*+)'|([^\s>]*+)))?+""")

_RAW = frozenset(("script", "style", "textarea", "title", "xmp", "iframe", "noembed", "noframes"))
"""Elements whose content is text up to their own end tag."""
_DECODED = ("title", "textarea")
"""Raw elements in which character references still count."""


def tokens(page: str) -> Iterator[Token]:
    """Yield the page's tags and text in order; text has its character references decoded, names are lower case.

    A tag or comment that the page's end cuts off is dropped with the rest, as browsers do.
    """
    at = 0
    while found := _TOKEN.match(page, at):
        at = found.end()
        if found["text"]:
            yield "text", html.unescape(found["text"]), ""
        elif found["end"]:
            yield "end", found["name"].lower(), ""
        elif found["name"]:
            name = found["name"].lower()
            yield "start", name, found["attributes"]
            if name in _RAW:
                end = re.compile(rf"</{name}(?=[\s/>])", re.IGNORECASE).search(page, at)
                text, at = (page[at : end.start()], end.start()) if end else (page[at:], len(page))
                yield "text", html.unescape(text) if name in _DECODED else text, ""


def attributes(unparsed: str) -> dict[str, str]:
    """Return a start tag's attributes, names in lower case; the first of a name counts."""
    found: dict[str, str] = {}
    for match in _ATTRIBUTE.finditer(unparsed):  # one at a time: a hostile tag repeats a name millions of times
        found.setdefault(match[1].lower(), html.unescape(match[2] or match[3] or match[4] or ""))
    return found


MAX_LINKS = 400
"""Links with an address; further ones keep their text alone."""
MAX_URL = 300
"""Characters of a link's address: longer ones are trackers and inlined data."""
MAX_TITLE = 300
MAX_TOKENS = 400_000
"""Tags and texts read, about a second's work; a real page of 5 MiB has fewer than half as many."""
MAX_LEVELS = 8
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


def readable(page: str, url: str, most: int) -> tuple[str, str, bool]:
    """Return title and text of a hostile HTML page, and whether there may be more text.

    Reading may stop after the first ``most`` characters. Relative links start from ``url``.
    """
    page = printable(page)  # afterwards no _BREAK but ours is left
    reader = _PageReader(page, url, most, whole=False)
    if not reader.blocks and not reader.gave_up:
        # Everything was in nav or hidden, or an unclosed nav swallowed it: better too much than nothing.
        reader = _PageReader(page, url, most, whole=True)
    return " ".join(reader.title.split())[:MAX_TITLE], *reader.content()


class _PageReader:
    """The methods ``_start_NAME`` and ``_end_NAME`` take the tags of one element."""

    def __init__(self, page: str, url: str, most: int, *, whole: bool) -> None:
        self._base = url
        self._most = most + 1  # each block counts with a line feed, the last one too
        self._skipped_names = _DROPPED if whole else _DROPPED | _AROUND
        self._whole = whole
        self._wanted = MAIN if _HAS_CONTENT_TAG.search(page) else ALL
        self._sizes = [0, 0, 0]
        self.blocks: list[tuple[str, bool, int]] = []
        """Text, whether it stands together with its like (rows of a table, items of a list), and zone."""
        self.gave_up = False
        self.title = ""
        self._inline: list[str] = []
        self._skipping = ""
        self._skip_depth = 0
        self._within = dict.fromkeys(("article", "blockquote", "main", "pre", "table", "title"), 0)
        self._heading = ""
        self._lists: list[int] = []  # next number, 0 for bullets
        self._marker = ""
        self._link: tuple[int, str] | None = None
        self._links = 0
        self._code: list[int] = []
        self._row: list[str] | None = None
        self._rows = 0
        self._read(page)

    def content(self) -> tuple[str, bool]:
        """Return the text of the innermost content zone, and whether there may be more of it."""
        wanted = next((zone for zone in (MAIN, ARTICLE) if self._sizes[zone] >= _ENOUGH), ALL)
        pieces: list[str] = []
        previous = False
        for text, tight, zone in self.blocks:
            if zone >= wanted:
                pieces += ["\n" if tight and previous else "\n\n", text]
                previous = tight
        return "".join(pieces[1:]), self.gave_up or self._sizes[wanted] > self._most

    def _read(self, page: str) -> None:
        for count, (kind, first, second) in enumerate(tokens(page)):
            if kind == "text":
                if self._within["title"]:
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
        self._end_a()
        self._end_tr()
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
        self._heading = _HEADINGS.get(name, self._heading)
        if handler := getattr(self, f"_start_{name}", None):
            handler(unparsed)
        if name in self._within:
            self._within[name] += 1

    def _end(self, name: str) -> None:
        if self._skipping:
            self._skip_depth -= name == self._skipping
            if self._skip_depth == 0:
                self._skipping = ""
            return
        if name in _BLOCKS and name != "pre":
            self._flush()
        if name in _HEADINGS:
            self._heading = ""
        if handler := getattr(self, f"_end_{name}", None):
            handler()
        if self._within.get(name):
            self._within[name] -= 1

    def _start_base(self, unparsed: str) -> None:
        self._base = self._address(attributes(unparsed).get("href", "")) or self._base

    def _start_ul(self, _unparsed: str) -> None:
        self._lists.append(0)

    def _start_ol(self, _unparsed: str) -> None:
        self._lists.append(1)

    def _end_ul(self) -> None:
        del self._lists[-1:]
        self._marker = ""

    _end_ol = _end_ul

    def _start_li(self, _unparsed: str) -> None:
        number = self._lists[-1] if self._lists else 0
        self._marker = f"{number}. " if number else "- "
        if number:
            self._lists[-1] += 1

    def _end_li(self) -> None:
        self._marker = ""

    def _start_code(self, _unparsed: str) -> None:
        if not self._within["pre"] and len(self._code) < MAX_LEVELS:
            self._code.append(len(self._inline))

    def _end_code(self) -> None:
        if self._code:
            start = self._code.pop()
            if text := "".join(self._inline[start:]).strip():
                self._inline[start:] = [f"`{text}`"]

    def _start_br(self, _unparsed: str) -> None:
        self._inline.append("\n" if self._within["pre"] else _BREAK)

    def _start_hr(self, _unparsed: str) -> None:
        self._add("---")

    def _start_img(self, unparsed: str) -> None:
        if alternative := attributes(unparsed).get("alt", "").strip():
            self._inline.append(f"[image: {alternative}]")

    def _start_pre(self, _unparsed: str) -> None:
        self._end_tr()  # a table around code only numbers its lines

    def _end_pre(self) -> None:
        if self._within["pre"] != 1 or self._row is not None:
            return
        code = "".join(self._inline).strip("\n").rstrip()
        self._inline = []
        if code:
            runs = max((len(run) for run in re.findall("`+", code)), default=0)
            fence = "`" * max(3, runs + 1)
            self._add(f"{fence}\n{code}\n{fence}", tight=False)

    def _start_table(self, _unparsed: str) -> None:
        self._rows = 0

    def _start_tr(self, _unparsed: str) -> None:
        self._end_tr()
        self._row = []

    def _start_td(self, _unparsed: str) -> None:
        self._end_td()
        self._row = [] if self._row is None and self._within["table"] else self._row

    def _end_td(self) -> None:
        if self._row is not None:
            cell = _collapsed(self._inline).replace("\n", " ")
            self._inline = []
            self._code.clear()
            self._link = None
            if cell or self._row:
                self._row.append(cell)

    def _end_tr(self) -> None:
        if self._row is None:
            return
        self._end_td()
        row, self._row = self._row, None
        if any(row):
            self._add("| " + " | ".join(row) + " |")
            self._rows += 1
            if self._rows == 1:
                self._add("|" + "---|" * len(row))

    _start_th, _end_th, _end_table = _start_td, _end_td, _end_tr

    def _start_a(self, unparsed: str) -> None:
        self._end_a()
        self._link = (len(self._inline), attributes(unparsed).get("href", ""))

    def _end_a(self) -> None:
        if self._link is None:
            return
        start, href = self._link
        self._link = None
        text = " ".join("".join(self._inline[start:]).split())
        if href.startswith("#") and text in ("¶", "#", "§", "🔗", ""):
            # The permanent link of a heading, which documentation generators add.
            del self._inline[start:]
        elif text and not self._within["pre"] and self._links < MAX_LINKS and (address := self._address(href)):
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
        elif not self._within["pre"]:
            self._flush_text()
        elif self._inline and not self._inline[-1].endswith("\n"):
            self._inline.append("\n")

    def _flush_text(self) -> None:
        pieces, self._inline = self._inline, []
        self._code.clear()
        if self._link is not None:
            self._link = (0, self._link[1])
        if text := _collapsed(pieces):
            self._add(text if self._marker else self._heading + text)

    def _add(self, text: str, *, tight: bool = True) -> None:
        zone = MAIN if self._within["main"] else ARTICLE if self._within["article"] else ALL
        if self._sizes[zone] > self._most:
            return
        depth = min(len(self._lists), MAX_LEVELS)
        indent = "  " * (depth - 1) if self._marker else "  " * depth
        lead = "> " * min(self._within["blockquote"], MAX_LEVELS)
        text = self._marker + text
        if lead or indent:
            text = "\n".join(lead + indent + line for line in text.split("\n"))
        self.blocks.append((text, tight and (bool(self._lists) or text.startswith("|")), zone))
        self._marker = ""
        for wider in range(zone + 1):
            self._sizes[wider] += len(text) + 1


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
