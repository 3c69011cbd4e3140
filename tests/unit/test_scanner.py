"""What the scanner finds, what it leaves alone, and that its bounds hold whatever the bytes."""

import io
import json
import tarfile
import zipfile
import zlib
from collections.abc import Mapping

import pytest

from glovebox_server.promotion import scanner
from glovebox_server.promotion.scanner.look import scan
from glovebox_server.tools.run_python import MAX_CODE


def zipped(files: dict[str, bytes]) -> bytes:
    """An archive."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


def tarred(name: str, link: str = "") -> bytes:
    """An archive with one entry."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        entry = tarfile.TarInfo(name)
        if link:
            entry.type, entry.linkname = tarfile.SYMTYPE, link
        archive.addfile(entry)
    return out.getvalue()


def notebook(*cells: Mapping[str, object]) -> bytes:
    """A notebook with these cells."""
    return json.dumps({"nbformat": 4, "cells": cells}).encode()


def streamed(text: bytes) -> bytes:
    """A PDF whose objects are packed."""
    return b"%PDF-1.7\n1 0 obj <<>> stream\n" + zlib.compress(text) + b"\nendstream\n"


def office(name: str, content: bytes, types: bytes = b"<Types/>") -> bytes:
    """An Office document with this part."""
    return zipped({"[Content_Types].xml": types, name: content})


def broken(text: bytes) -> bytes:
    """The same as ``streamed``, with a wrong check sum."""
    packed = bytearray(zlib.compress(text))
    packed[-1] ^= 1
    return b"%PDF-1.7\n1 0 obj <<>> stream\n" + packed + b"\nendstream\n"


CODE = {"cell_type": "code", "source": "1", "outputs": [{"data": {"text/html": "<script>1</script>"}}]}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        ("a.html", b"<p><SCRIPT>1", "a script"),
        ("a.html", b"<img src='x' onerror = go()>", "a handler"),
        ("a.html", b"<a href='java\nscript:go()'>", "a javascript: address"),
        ("a.html", b"<img src=//evil.example>", "loaded from elsewhere"),
        ("a.svg", b"<svg><foreignObject/></svg>", "other markup inside"),
        ("a.svg", b"<svg:script/>", "a script"),
        ("a.pdf", b"%PDF-1.4 /OpenAction 1 0 R", "an action when it is opened"),
        ("a.pdf", b"%PDF-1.4 /J#61vaScript", "PDF: a script"),
        ("a.pdf", streamed(b"/Launch"), "a program to start"),
        ("a.docm", zipped({"[Content_Types].xml": b"", "word/vbaProject.bin": b""}), "macros"),
        ("a.docx", zipped({"[Content_Types].xml": b"", "word/d.xml": b"<w>DDEAUTO c:\\</w>"}), "starts programs (DDE)"),
        ("a.docx", zipped({"[Content_Types].xml": b"", "w/a.rels": b'TargetMode="External"'}), "loaded from elsewhere"),
        ("a.xls", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + "_VBA_PROJECT".encode("utf-16-le"), "macros"),
        ("a.ipynb", notebook(CODE), "a script"),
        ("a.ipynb", notebook(CODE), "1 cells of code"),
        ("a.zip", zipped({"../x": b""}), "unpacks outside"),
        ("a.zip", zipped({"a/.git/config": b""}), "may be run or obeyed"),
        ("a.zip", zipped({"b.zip": b""}), "which was not scanned"),
        ("a.zip", zipped({"x": b"\0" * 20_000_000}), "unpacks to more than"),
        ("a.tgz", tarred("/etc/x"), "unpacks outside"),
        ("a.tgz", tarred("x", "/etc/passwd"), "is a link"),
        ("a.txt", b"token ghp_" + b"aB3" * 12, "a secret: GitHub token"),
        ("a.zip", b"PK\x03\x04 and then nothing of the kind", "cannot be scanned: BadZipFile"),
        ("a.ipynb", b"[" * 100_000, "cannot be scanned"),
        # What a browser takes for a page, whatever else it is.
        ("zero.html", b"<p>\0</p><script>1", "a script"),
        ("utf16.html", b"\xff\xfe" + "<script>1".encode("utf-16-le"), "a script"),
        ("pdf.html", b"<!-- %PDF-1.4 --><script>1", "a script"),
        ("json.html", json.dumps({"nbformat": 4, "cells": [], "x": "<script>1"}).encode(), "a script"),
        ("zip.html", b"PK<script>1" + office("word/document.xml", b"<w/>"), "a script"),
        ("slash.svg", b"<svg/onload=go()>", "a handler"),
        ("quote.html", b"<img src='x'onerror=go()>", "a handler"),
        ("inside.html", b"<img title='>' onerror=go()>", "a handler"),
        ("far.html", b"<img title='" + b"x" * 5000 + b"' onerror=go()>", "a handler"),
        ("reference.html", b"<a href='&#106;ava&Tab;script:go()'>", "a javascript: address"),
        ("prefix.svg", b"<a-b:script xmlns:a-b='http://www.w3.org/2000/svg'>1</a-b:script>", "a script"),
        ("prefix.svg", "<é:script xmlns:é='http://www.w3.org/2000/svg'>1</é:script>".encode(), "a script"),
        ("shift.html", b"<meta charset=iso-2022-jp><scr\x1b(Bipt>1", "a script"),
        ("long.html", b"<p style='' oncontentvisibilityautostatechange=go()>", "a handler"),
        ("prefix.html", b"<h:iframe xmlns:h='http://www.w3.org/1999/xhtml' srcdoc='x'/>", "a frame"),
        ("fenced.html", b"<fencedframe src=x>", "a frame"),
        ("far.html", b"<meta name='" + b"a" * 301 + b"' http-equiv=refresh content='0;url=//e'>", "leads elsewhere by"),
        ("inside.html", b"<meta name='>' http-equiv='refresh' content='0;url=x'>", "leads elsewhere by"),
        ("inside.html", b"<meta name='<' content='0;url=x' http-equiv=\n' refresh '>", "leads elsewhere by"),
        ("far.html", b"<link rel=stylesheet title='" + b"a" * 301 + b"' href=//e.example>", "loaded from elsewhere"),
        ("inside.html", b"<link title='<' rel=stylesheet href=//e.example>", "loaded from elsewhere"),
        ("prefix.svg", b"<s:image xlink:href='https://e.example/x'/>", "loaded from elsewhere"),
        ("filter.svg", b"<feImage href='https://e.example/x'/>", "loaded from elsewhere"),
        ("back.html", b"<img src='\\\\e.example/x'>", "loaded from elsewhere"),
        ("back.html", b"<img src='https:\\\\e.example/x'>", "loaded from elsewhere"),
        ("none.html", b"<img src='https:e.example/x'>", "loaded from elsewhere"),
        ("line.html", b"<img src='ht\ntps://e.example/x'>", "loaded from elsewhere"),
        ("set.html", b"<img srcset='a.png 1x, https://e.example/x 2x'>", "loaded from elsewhere"),
        ("set.html", b"<link rel=preload as=image imagesrcset='//e.example/x'>", "loaded from elsewhere"),
        ("style.html", b"<p style='background:u\\72l(https://e.example)'>", "loaded from elsewhere"),
        ("style.html", b"<style>@\\69 mport 'x'</style>", "loaded from elsewhere"),
        ("style.html", b"<p style='background:image-set(\"https://e.example\" 1x)'>", "loaded from elsewhere"),
        ("form.html", b"<button form=f formaction=https://e.example>", "a form that sends"),
        ("a.xml", b"<?xml-stylesheet href='x.xsl'?><a/>", "a style sheet"),
        ("svg.ipynb", notebook({"outputs": [{"data": {"image/svg+xml": ["<svg>", "<script>"]}}]}), "a script"),
        ("raw.ipynb", notebook({"source": "<script>"}).replace(b"<", b"\\u003c"), "a script"),
        # What lies behind a bound, or cannot be read, is said.
        ("sum.pdf", broken(b"/Launch"), "a program to start"),
        ("far.pdf", streamed(b" " * (2 << 20) + b"/Launch"), "a program to start"),
        ("farther.pdf", streamed(b" " * (33 << 20) + b"/Launch"), "not scanned to its end"),
        ("cut.pdf", streamed(b"/Launch")[:-20], "not scanned to its end"),
        ("blank.pdf", streamed(b"/Launch").replace(b"stream\n", b"stream \n", 1), "a program to start"),
        ("form.pdf", b"%PDF-1.7 /Filter /Unheard stream\nx", "in a form that was not scanned"),
        (
            "named.docm",
            office("word/x", b"", b"<Override ContentType='application/vnd.ms-office.vbaProject'/>"),
            "macros",
        ),
        ("cut.docx", office("word/d.xml", b"<t>DD</t><t>EAUTO c:</t>"), "starts programs (DDE)"),
        ("far.docx", office("word/d.xml", b" " * (2 << 20) + b"DDEAUTO c:"), "starts programs (DDE)"),
        ("utf16.docx", office("w/a.rels", 'TargetMode="External"'.encode("utf-16")), "loaded from elsewhere"),
        ("reference.docx", office("w/a.rels", b'TargetMode="&#69;xternal"'), "loaded from elsewhere"),
        ("a.rtf", b"{\\rtf1{\\object\\objupdate}}", "was not scanned"),
        ("upper.zip", zipped({"a.HTM": b"<script>1"}), "a script"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_acts_is_found(name: str, data: bytes, told: str) -> None:
    """One of each kind; what cannot be read says so."""
    assert any(told in each for each in scan(data, name))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.csv", b"a,b\n1,2\n"),
        ("a.txt", b"if a < b and on = 1"),
        ("a.html", b"<h1>On scripts</h1><p style='color: red'>description: x</p><img src='data:image/png;base64,AA'>"),
        ("a.html", b"<meta charset=utf-8> refresh <a href='https://e.example'>x</a><img srcset='a.png 1x, b.png 2x'>"),
        ("a.svg", b"<svg xmlns='http://www.w3.org/2000/svg'><path d='m1 1'/></svg>"),
        ("a.pdf", b"%PDF-1.4 /Type /Page /JSON"),
        ("a.docx", zipped({"[Content_Types].xml": b"<Types/>", "word/document.xml": b"<w>ADDED</w>"})),
        ("a.ipynb", notebook({"cell_type": "markdown", "source": ["# x < y"]})),
        ("a.txt", b"ghp_example"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_act_is_left_alone(name: str, data: bytes) -> None:
    """Near misses."""
    assert scan(data, name) == []


@pytest.mark.long
@pytest.mark.parametrize(
    "data",
    [
        b"<" * 1_000_000,
        b"<a " * 300_000,
        b"%PDF-" + b"stream\n" * 300_000,
        streamed(b"\0" * 50_000_000),
        b"j a v a s " * 100_000,
        b"url(" * 300_000,
    ],
    ids=range(6),
)
def test_no_file_keeps_it_busy(data: bytes) -> None:
    """It ends within the test's limit; a call's own limits end it, too."""
    scan(data, "x")


def test_the_program_is_one_that_a_call_takes() -> None:
    """It compiles, alone, and is as long as a call may be."""
    assert len(scanner.program()) < MAX_CODE
    compile(scanner.program(), "scanner", "exec")
