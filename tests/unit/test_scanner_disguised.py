"""What is written so that a scanner passes over it is found, or said not to have been scanned; with near misses."""

import base64
import json
import zlib

import pytest
from tests.fixtures.scanned import pdf, zipped

from glovebox_server.promotion.scanner import documents
from glovebox_server.promotion.scanner.look import scan

TYPES = "[Content_Types].xml"
ACTION = b"<< /S /Launch >>"
HEX = ACTION.hex().encode() + b">"
TOKEN = b"ghp_" + b"aB3" * 12
FOUND = "a secret: GitHub token"
MAIL = b"From: a@b.example\r\nMIME-Version: 1.0\r\nContent-Type: text/html\r\n"
BASE64 = b"Content-Transfer-Encoding: base64\r\n\r\n"
OPEN = b"<o:x xmlns:o='urn:oasis:names:tc:opendocument:xmlns:office:1.0'>"
FLAT = b"<p:package xmlns:p='http://schemas.microsoft.com/office/2006/xmlPackage'>"
WORD = b"<w:wordDocument xmlns:w='http://schemas.microsoft.com/office/word/2003/wordml' "
PREDICTED = "/Filter /Fl /DecodeParms << /Predictor 12 >>"


def between(hidden: bytes, archive: bytes) -> bytes:
    """The archive with these entries before its directory, which does not name them."""
    directory, end = archive.index(b"PK\1\2"), archive.index(b"PK\5\6")
    entries = hidden[: hidden.index(b"PK\1\2")]
    moved = (directory + len(entries)).to_bytes(4, "little")
    return archive[:directory] + entries + archive[directory : end + 16] + moved + archive[end + 20 :]


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        # PDF: how a stream is packed, said where one does not look for it.
        ("a.pdf", pdf("/Filter /AHx" + " " * 3000, HEX), "PDF: a program to start"),
        ("a.pdf", pdf("/Filter /AHx /P << /Filter /DCTDecode >>", HEX), "PDF: a program to start"),
        ("a.pdf", pdf("/Filter %\n/AHx", HEX), "PDF: a program to start"),
        ("a.pdf", pdf("/Filter /AHx /P (1 0 obj)", HEX), "PDF: a program to start"),
        ("a.pdf", pdf("/Filter /AHx /P (endstream)", HEX), "PDF: a program to start"),
        ("a.pdf", pdf("".join(f"/Filter /A{n}" for n in range(9)), b"x"), "in a form that was not scanned"),
        ("a.pdf", pdf(f"/Type /ObjStm {PREDICTED} /X /Image", zlib.compress(b"\2x")), "in a form that was not"),
        ("a.pdf", pdf(f"/First 9 {PREDICTED} /X /XRef", zlib.compress(b"\2x")), "in a form that was not"),
        ("a.pdf", b"%PDF-1.4 << /S /Sound >>", "PDF: film or sound"),
        ("a.pdf", b"%PDF-1.4 << /S /Rendition >>", "PDF: film or sound"),
        ("a.pdf", b"%PDF-1.4 << /Subtype /3D >>", "PDF: film or sound"),
        ("a.pdf", pdf("", zlib.compress(b"app.launch('" + TOKEN + b"')")), FOUND),
        # Office: what a part is says a link, not its name.
        ("a.docx", zipped({TYPES: b"<Types/>", "word/d.foo": b" " * 9999 + b"<w>DDEAUTO c:</w>"}), "(DDE)"),
        ("a.docx", zipped({TYPES.upper(): b"<Types/>", "word/d.xml": b"<w>DDEAUTO c:</w>"}), "(DDE)"),
        ("a.docx", zipped({TYPES: b"", "word/webextensions/w.xml": b"<w/>"}), "a control that runs code"),
        ("a.docx", zipped({TYPES: b"", "d.xml": b"<t>" + TOKEN[:9] + b"</t><t>" + TOKEN[9:] + b"</t>"}), FOUND),
        ("a.zip", zipped({TYPES: b"", "a.xml": b"<x xmlns='http://www.w3.org/2000/svg'><script/>"}), "a script"),
        ("a.zip", zipped({TYPES: b"", "a.xml": b"<x xmlns='http://www.w3&#46;org/1999/xhtml'><script/>"}), "a script"),
        ("a.zip", zipped({TYPES: b"", "a.xml": b"<!ENTITY x '<script/>'>"}), "a script"),
        ("a.xml", FLAT + b"<p:part p:name='/word/vbaProject.bin'/>", "Office document: macros"),
        ("a.doc", FLAT + b"<w>DDEAUTO c:</w>", "(DDE)"),
        ("a.xml", (FLAT + b"<r TargetMode='External'/>").decode().encode("utf-16"), "loaded from elsewhere"),
        ("a.xml", WORD + b"w:macrosPresent='yes'>", "Office document: macros"),
        ("a.xml", WORD + b"><w:binData>", "Office document: a file inside"),
        ("a.odt", zipped({"content.xml": OPEN + b"<s:event-listener/>"}), "OpenDocument: a handler of events"),
        ("a.odt", zipped({"content.xml": OPEN + b"<a x='vnd.sun.star.script:y'>"}), "OpenDocument: a macro's address"),
        ("a.odt", zipped({"content.xml": OPEN + b"<o:dde-source/>"}), "(DDE)"),
        ("a.odt", zipped({"content.xml": OPEN + b"<d:plugin/>"}), "OpenDocument: a control that runs code"),
        ("a.odt", zipped({"content.xml": OPEN + b"<s l:href='https://e.example/x'>"}), "loaded from elsewhere"),
        ("a.fodt", OPEN + b"<s l:href='//e.example/x'>", "OpenDocument: what is loaded from elsewhere"),
        # Mails and web archives: packed parts.
        ("a.eml", MAIL + BASE64 + base64.b64encode(b"<script>1</script>"), "in 'part 1': markup: a script"),
        ("a.doc", MAIL + BASE64 + base64.b64encode(b"ActiveMime"), "mail: macros of an Office document"),
        ("a", MAIL + b"Content-Transfer-Encoding: quoted-printable\r\n\r\n<=73cript>", "markup: a script"),
        ("a.mht", BASE64 + base64.b64encode(TOKEN), FOUND),
        ("a.eml", MAIL + BASE64 + b"A" * documents.MAX_MAIL_BYTES, "mail: behind its first 2097152 bytes"),
        ("a.ipynb", json.dumps({"nbformat": 4, "cells": [], "metadata": {"x": "<script>"}}).replace("<", "\\u003c")
         .encode(), "a script"),
        # Archives: entries that a reader from the beginning finds, and kinds that nothing here reads.
        ("a.zip", between(zipped({"a.html": b"<script>"}), zipped({"a.txt": b"x"})), "its directory does not name"),
        ("a.zip", zipped({"b.sh": b"x"}) + zipped({"a.txt": b"x"}), "its directory does not name"),
        ("a.bin", b"\xed\xab\xee\xdb\3\0", "an archive, which was not scanned"),
        ("a.bin", b"070701" + b"0" * 104, "an archive, which was not scanned"),
        ("a.bin", b"\x1f\x9d\x90", "an archive, which was not scanned"),
        ("a.bin", b"LZIP\1", "an archive, which was not scanned"),
        ("a.bin", b"\x20\0-lh5-", "an archive, which was not scanned"),
        ("a.txt", ("token " + TOKEN.decode()).encode("utf-16"), FOUND),
        ("a.txt", ("token " + TOKEN.decode()).encode("utf-16-be"), FOUND),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_disguised_is_found(name: str, data: bytes, told: str) -> None:
    """Or said not to have been scanned."""
    assert any(told in each for each in scan(data, name)), scan(data, name)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.pdf", b"%PDF-1.7 /Filter /Adobe.PPKLite\nendobj\n" + pdf("", zlib.compress(b"q Q"))),
        ("a.pdf", pdf("/Filter /Fl", zlib.compress(b"q Q")) + b"endobj\n<< /Filter /Standard >>" + pdf("", b"x")),
        ("a.pdf", pdf(f"/Subtype /Image {PREDICTED}", zlib.compress(b"\2x"))),
        ("a.docx", zipped({TYPES: b"<Types/>", "word/media/a.bin2": b"\0\1 DDE \2"})),
        ("a.docx", zipped({TYPES: b"<Types/>", "word/d.xml": b"<t>gh</t><t>p_and so on</t>"})),
        ("a.xml", WORD + b"w:macrosPresent='no'>"),
        ("a.fodt", OPEN + b"<s l:href='Pictures/x.png'>"),
        ("a.eml", MAIL + BASE64 + base64.b64encode(b"<p>Hello</p>")),
        (
            "a.patch",
            b"From 0123 Mon Sep 17\nMIME-Version: 1.0\nContent-Transfer-Encoding: 8bit\n\ndiff --git a/x b/x\n",
        ),
        ("a.csv", b"0707012345,Anna\n0707023456,Bo\n"),
        ("a.txt", b"LZIP is a program"),
        ("a.txt", "ghp_example".encode("utf-16")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_only_looks_like_it_is_left_alone(name: str, data: bytes) -> None:
    """Near misses."""
    assert scan(data, name) == []


@pytest.mark.parametrize("inner", [zipped({"b.txt": b"x"}), b"PK\3\4"])
def test_an_archive_in_an_archive_is_no_hidden_entry(inner: bytes) -> None:
    """Stored as it is, its bytes stand within those of an entry that the directory names."""
    assert not any("does not name" in each for each in scan(zipped({"a.zip": inner, "c.txt": b"x"}, 0), "a.zip"))
