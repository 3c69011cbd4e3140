"""HTML as a stream of tags and text, in one pass. Standard library only; pure.

``html.parser`` takes quadratic time on pages made for it (100 kB of ``<a `` cost it over a minute), and these pages
come from strangers. This is the part of the HTML standard's tokenizer that matters for text; it reads every byte a
fixed number of times. https://html.spec.whatwg.org/multipage/parsing.html#tokenization
"""

from __future__ import annotations

import html
import re

from _glovebox_guest.stdlib import Iterator, TypeAlias

Token: TypeAlias = tuple[str, str, str]
"""Kind, then: ``text``, the text, "" / ``start``, the tag's name, its attributes unparsed / ``end``, name, ""."""

# A quote counts only after an equals sign, and only if it is closed. No alternative begins like another and all
# repetition is possessive, so a tag that does not end costs one look at the rest of the page.
_TAG = re.compile(r"""<(/?+)([a-zA-Z][^\s/>]*+)((?:[^>=]++|=\s*+(?:"[^"]*+"|'[^']*+'|))*+)>""")
_TAG_BEGINS = re.compile("</?[a-zA-Z]")
_ATTRIBUTE = re.compile(r"""([^\s"'>/=]++)(?:\s*+=\s*+(?:"([^"]*+)"|'([^']*+)'|([^\s>]*+)))?+""")
_COMMENT_END = re.compile(r"--!?>")

#: What stands in these is text up to their own end tag, whatever it looks like.
_RAW = {
    name: re.compile(rf"</{name}(?=[\s/>])", re.IGNORECASE)
    for name in ("script", "style", "textarea", "title", "xmp", "iframe", "noembed", "noframes")
}
_DECODED = ("title", "textarea")
"""Raw elements in which character references still count."""


def tokens(page: str) -> Iterator[Token]:
    """Yield the page's tags and text in order; text has its character references decoded, names are lower case.

    A tag or comment that the page's end cuts off is dropped with the rest, as browsers do.
    """
    at = 0
    while at < len(page):
        start = page.find("<", at)
        if start < 0:
            yield "text", html.unescape(page[at:]), ""
            return
        if start > at:
            yield "text", html.unescape(page[at:start]), ""
        if _TAG_BEGINS.match(page, start):
            tag = _TAG.match(page, start)
            if tag is None:
                return
            at = tag.end()
            name = tag[2].lower()
            if tag[1]:
                yield "end", name, ""
                continue
            yield "start", name, tag[3]
            if name in _RAW:
                end = _RAW[name].search(page, at)
                stop = end.start() if end else len(page)
                yield "text", html.unescape(page[at:stop]) if name in _DECODED else page[at:stop], ""
                at = stop
        elif page.startswith(("!", "?", "/"), start + 1):
            at = _after_comment(page, start)
        else:
            yield "text", "<", ""
            at = start + 1


def _after_comment(page: str, start: int) -> int:
    """Return where a comment, a declaration or what counts as one ends; the page's end if nothing closes it."""
    if page.startswith("<!--", start):
        if page.startswith((">", "->"), start + 4):  # <!--> and <!---> are comments too
            return page.index(">", start) + 1
        end = _COMMENT_END.search(page, start + 4)
        return end.end() if end else len(page)
    end_of_declaration = page.find(">", start)
    return len(page) if end_of_declaration < 0 else end_of_declaration + 1


def attributes(unparsed: str) -> dict[str, str]:
    """Return a start tag's attributes, names in lower case; the first of a name counts."""
    found: dict[str, str] = {}
    for match in _ATTRIBUTE.finditer(unparsed):
        value = match[2] or match[3] or match[4] or ""
        found.setdefault(match[1].lower(), html.unescape(value))
    return found
