"""Whatever a server sends, the page job answers: one value, bounded, JSON, without control characters."""

import html
import json
import re
from html.parser import HTMLParser
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.fixtures.draws import draws

from _glovebox_guest.web import page, readable

PIECES = [
    "<", ">", "/", "!", "--", "<!--", "-->", "<!>", "</", "<?", "&amp;", "&#0;", "&#x1b;", "&", '"', "'", "=", " ",
    "\n",
    "<p>", "</p>", "<div hidden>", "</div>", "<ul>", "<ol>", "<li>", "</ul>", "<table>", "<tr>", "<td>", "</table>",
    "<pre>", "</pre>", "<code>", "</code>", '<a href="/x">', "<a href=javascript:1>", "</a>", "<h1>", "</h1>", "<main>",
    "</main>", "<article>", "<nav>", "</nav>", "<script>", "</script>", "<title>", "</title>", "<base href='http://[x'>",
    "<br>", "<img alt=x>", "<svg/>", "<blockquote>", "</blockquote>", "text", "```", "|", "\x01", "\x1b", "\u202e", "é",
]  # fmt: skip
pages = st.lists(st.sampled_from(PIECES), max_size=60).map("".join)
types = st.sampled_from(["text/html", "text/html; charset=utf-16", "text/plain", "", "application/json"]) | st.text(
    max_size=30
)
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def run(body: bytes, content_type: str, most: int = 1000, url: str = "https://a.example/b/") -> Any:
    """The value of the page job."""
    headers = {"content-type": content_type}
    return page.describe({"url": url, "status": 200, "headers": headers, "body": body, "max_chars": most, "raw": False})


def sound(value: Any, most: int) -> None:
    """Fits a message, is JSON, and does nothing to a terminal."""
    json.dumps(value, ensure_ascii=False).encode()
    if "error" not in value:
        assert len(value["text"]) <= most
        assert len(json.dumps(value["text"])) <= 100 * 1024
        assert not CONTROL.search(value["text"])


@given(body=pages, most=st.integers(1, 300))
@draws(500)
def test_any_markup_gives_bounded_text(body: str, most: int) -> None:
    """Tags in any order, closed or not."""
    sound(run(body.encode(), "text/html", most), most)


@given(body=st.binary(max_size=500), content_type=types, url=st.text(max_size=30))
@draws(400)
def test_any_bytes_of_any_type_get_an_answer(body: bytes, content_type: str, url: str) -> None:
    """Text or a refusal, never an exception."""
    sound(run(body, content_type, 1000, url), 1000)


@given(body=st.binary(max_size=300), label=st.text(st.sampled_from("utf-816leb isohx2057gk_"), max_size=12))
@draws(300)
def test_any_label_of_an_encoding_decodes(body: bytes, label: str) -> None:
    """A label that is none is passed over; the text can be encoded again."""
    text, name = page.decoded(body, f"text/html; charset={label}")
    text.encode("utf-8")
    assert name


@given(words=st.lists(st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=8), max_size=20))
@draws(200)
def test_text_without_markup_comes_through_whole(words: list[str]) -> None:
    """What is escaped as HTML is there word by word."""
    found = run(f"<p>{html.escape(' '.join(words))}".encode(), "text/html; charset=utf-8", 5000)
    assert found["text"] == " ".join(words)


class _Standard(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002 - its signature
        self.found.append(("start", tag))

    def handle_endtag(self, tag: str) -> None:
        self.found.append(("end", tag))

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][0] == "text":
            data = self.found.pop()[1] + data
        self.found.append(("text", data))


ORDINARY = [
    "<p>", "</p>", '<a href="x>y">', "<a b='\"'>", "</a >", "text ", "1 < 2 ", "&amp;", "<!-- <p> -->",
    "<!doctype html>",
    "<br/>", "<B>", "<script>if (a<b) '</p>'</script>", "<style>p > a</style>", "<input disabled>", "\n",
]  # fmt: skip


@given(pieces=st.lists(st.sampled_from(ORDINARY), max_size=20))
@draws(300)
def test_ordinary_markup_is_read_as_the_standard_library_reads_it(pieces: list[str]) -> None:
    """On markup that is not made to hurt it, html.parser is the oracle."""
    body = "".join(pieces) + "<end>"
    oracle = _Standard()
    oracle.feed(body)
    oracle.close()
    ours: list[tuple[str, str]] = []
    for kind, first, _ in readable.tokens(body):
        if kind == "text" and not first:
            continue
        if kind == "text" and ours and ours[-1][0] == "text":
            ours[-1] = ("text", ours[-1][1] + first)
        else:
            ours.append((kind, first))
    # A tag that closes itself is a start to HTML; html.parser makes it a start and an end.
    assert ours == [each for each in oracle.found if each != ("end", "br")]


@given(
    names=st.dictionaries(
        st.sampled_from(["a", "href", "data-x", "hidden"]), st.text(max_size=10).filter(lambda v: "\0" not in v)
    )
)
@draws(200)
def test_attributes_come_back_as_they_were_written(names: dict[str, str]) -> None:
    """Quoted and escaped as a careful author does."""
    written = " ".join(f'{name.upper()}="{html.escape(value)}"' for name, value in names.items())
    assert readable.attributes(written) == {name: html.unescape(html.escape(value)) for name, value in names.items()}
