"""Web pages as text: what is kept, what is dropped, in which encoding, and what that costs on hostile pages."""

from typing import Any

import pytest

from _glovebox_guest.web import page, readable


def shown(
    body: bytes | str, content_type: str = "text/html; charset=utf-8", *, most: int = 20_000, raw: bool = False
) -> Any:
    """The value of the page job."""
    return page.describe(
        {
            "url": "https://docs.example.org/guide/page.html",
            "status": 200,
            "headers": {"Content-Type": content_type} if content_type else {},
            "body": body.encode() if isinstance(body, str) else body,
            "max_chars": most,
            "raw": raw,
        }
    )


def text(html: str) -> str:
    """The text of a page."""
    found = shown(html)["text"]
    assert isinstance(found, str)
    return found


def test_a_page_becomes_markdown() -> None:
    """Headings, paragraphs, nested lists, quotes, code, tables, links and pictures' descriptions."""
    found = shown(
        """<!doctype html><title> A &amp; B </title><h1>Head<a class=headerlink href="#head">¶</a></h1>
        <p>Some <b>bold</b>   text<br>and <code>f(x)</code>, see <a href="../c?d=1&amp;e=(2)">the <i>other</i></a>.
        <ul><li>one<li>two<ol><li>first<li>second</ol></ul><blockquote>said<p>again</blockquote>
        <pre><code>def f():\n    return "`"</code></pre>
        <table><tr><th>A<th>B<tr><td>1<td>2 <p>x</table><img src=cat.png alt="a cat">"""
    )
    assert found["title"] == "A & B"
    assert found["text"] == (
        "# Head\n\nSome bold text\nand `f(x)`, see [the other](https://docs.example.org/c?d=1&e=%282%29).\n\n"
        "- one\n- two\n  1. first\n  2. second\n\n> said\n\n> again\n\n"
        '```\ndef f():\n    return "`"\n```\n\n| A | B |\n|---|---|\n| 1 | 2 x |\n\n[image: a cat]'
    )
    assert (found["media_type"], found["truncated"]) == ("text/html", None)


@pytest.mark.parametrize(
    "hidden",
    [
        "<script>no</script>", "<style>no</style>", "<nav>no</nav>", "<footer>no</footer>", "<div hidden>no</div>",
        '<p style="display: none">no</p>', '<span aria-hidden="true">no</span>', "<template>no</template>",
        "<!-- no -->", "<script>'</p>no'</script >", "<svg><text>no</text></svg>", "<select><option>no</select>",
        "<div hidden><div>no</div>no</div>", "<noscript>no</noscript>", "<SCRIPT>no</Script>",
        "<textarea>no</textarea>",
    ],
)  # fmt: skip
def test_what_a_reader_does_not_see_is_dropped(hidden: str) -> None:
    """And only that: what stands before and after it stays."""
    assert text(f"<p>before</p>{hidden}<p>after</p>") == "before\n\nafter"


def test_the_main_part_of_a_page_is_preferred() -> None:
    """Main before article before everything, if something is in it; an unclosed nav makes no page empty."""
    main = "<p>" + "content " * 40 + "</p>"
    assert "menu" not in text(f"<div>menu</div><main>{main}</main><div>menu</div>")
    assert "menu" not in text(f"<div>menu</div><article>{main}</article>")
    assert text("<div>all there is</div><main>Loading…</main>") == "all there is\n\nLoading…"
    assert text("<nav><p>one<p>two") == "one\n\ntwo"


def test_links_lead_to_web_pages_or_are_text() -> None:
    """Relative to the page or its base; scripts, data, fragments and over-long addresses are left out."""
    assert text('<base href="https://other.example/x/"><a href="y">a</a>') == "[a](https://other.example/x/y)"
    for href in ("javascript:alert(1)", "data:text/html,x", "#here", "mailto:a@b.c", "http://[::1", "x" * 400, ""):
        assert text(f'<p>go <a href="{href}">there</a> now') == "go there now"
    many = "".join(f'<a href="/{number}">{number}</a> ' for number in range(readable.MAX_LINKS + 5))
    assert shown(many)["text"].count("](") == readable.MAX_LINKS


def test_controls_do_not_reach_the_reader_and_content_ends_no_block() -> None:
    """Escapes are gone, written directly or as references; tabs and line feeds in code stay."""
    assert text("<pre>```\nnot out</pre>") == "````\n```\nnot out\n````"
    found = text("<title>\x1b]0;x\x07</title><p>a\x1b[31mb&#27;[0m\x9bc&#1;&#127;</p><pre>a\tb\nc\x08</pre>")
    assert found == "a[31mb[0mc\n\n```\na\tb\nc\n```"


@pytest.mark.parametrize(
    ("body", "content_type", "charset"),
    [
        ("é".encode(), "text/plain; charset=UTF-8", "utf-8"),
        ("é".encode("latin-1"), "text/plain; charset=iso-8859-1", "windows-1252"),
        ("é".encode("utf-16"), "text/plain", "utf-16-le"),
        (b"\xef\xbb\xbf" + "é".encode(), "text/plain; charset=latin1", "utf-8"),
        ("é".encode("cp1252"), 'text/plain; charset="windows-1252"', "windows-1252"),
        (b'<meta charset="windows-1252">' + "é".encode("cp1252"), "text/html", "windows-1252"),
        (b"<meta http-equiv=x content='text/html; charset=koi8-r'>\xa3", "text/html", "koi8-r"),
        (b'<?xml version="1.0" encoding="iso-8859-15"?>\xe9', "application/xml", "iso-8859-15"),
        ("é".encode(), "text/plain; charset=punycode", "utf-8"),
        ("é".encode(), "text/plain; charset=unicode_escape", "utf-8"),
        ("é".encode(), "", "utf-8"),
    ],
)
def test_the_encoding_is_found(body: bytes, content_type: str, charset: str) -> None:
    """Mark, header, document, UTF-8, in this order; what is no encoding of the web is not tried."""
    found = shown(body, content_type)
    assert found["charset"] == charset
    assert found["text"][-1] in "éё"


def test_every_known_encoding_exists() -> None:
    """No label that is accepted can make decoding fail."""
    labels = "windows-874 windows-1250 windows-1258 iso-8859-2 iso-8859-16 koi8-u macintosh shift_jis sjis euc-jp "
    labels += "iso-2022-jp gbk gb2312 gb18030 big5 euc-kr utf-16 utf-16le utf-16be latin1 us-ascii"
    for label in labels.split():
        assert shown(b"abcd", f"text/plain; charset={label}")["charset"] != "utf-8"


def test_what_is_no_html_or_long_or_deep_is_shown() -> None:
    """JSON and text unchanged, HTML too if asked for raw; HEAD's headers; cut at what is asked for and fits."""
    for content_type in ("application/json", "application/rss+xml", "text/plain", "text/markdown", ""):
        assert shown('{"a": "<b>"}\n', content_type)["text"] == '{"a": "<b>"}\n'
    assert shown("<p>x", raw=True)["text"] == "<p>x"
    assert shown("<!DOCTYPE html><p>x", "")["text"] == "x"
    assert shown(b"", "image/png")["text"] == "Content-Type: image/png"
    found = shown("<p>" + "x" * 1000, most=100)
    assert (len(found["text"]), found["truncated"]) == (100, "first 100 characters")
    assert shown("<p>" + "x" * 100, most=100)["truncated"] is None
    assert len(shown("<p>" + "漢" * 100_000, most=50_000)["text"]) * 6 <= 100 * 1024
    depth = 100_000
    body = "".join(f"<{tag}>" * (depth // 5) for tag in ("div", "ul", "blockquote", "table", "span")) + "<p>bottom"
    assert shown(body)["text"].endswith("bottom")


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"\x89PNG\r\n\x1a\n", "image/png"), (b"%PDF-1.7", "application/pdf"), (b"PK\x03\x04", ""),
        (b"a\0b", "text/html"), (b"%PDF-1.7", "text/plain"), (b"x", "video/mp4"),
    ],
)  # fmt: skip
def test_what_is_not_text_is_refused(body: bytes, content_type: str) -> None:
    """By what it is, whatever it is said to be."""
    error = shown(body, content_type)["error"]
    assert error["rule"] == "page.binary"
    assert "not text" in error["reason"]


MEBIBYTE = 1 << 20
FLOODS = [
    b"<", b"<!--", b"<a ", b"<!", b"&amp;", b"&#x110000;", b'<a href="', b"<a b='", b"<a =", b"</", b"<?", b"<div>",
    b"<ul><li>", b"<blockquote>x", b"<table><tr><td>", b"<code>x", b"<a href=/y>x", b"<nav>", b"<p hidden>", b"<pre>",
    b"</div></ul></main>", b"<svg/>x", b"<title>", b"<script>", b"<script></scrip", b"<main>x<article>", b"\xff",
    b"<![CDATA[", b"<p a=b c=d\t", b"<br>", b"<title></title>", b"<a/b=>", b"<x y=\"'\" z='\"'>", b"`<code>`</code>",
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("piece", FLOODS)
def test_no_flood_of_tags_takes_long(piece: bytes) -> None:
    """A second at most for a mebibyte of anything; at this size quadratic time is minutes, which time out."""
    # The control is ``html.parser``, which needs over a minute for a tenth of the flood of ``<a ``.
    assert len(shown(piece * (MEBIBYTE // len(piece)))["text"]) <= 20_000
