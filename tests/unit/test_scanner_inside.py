"""What the scanner finds inside of files: archives in each other, streams, patches, pictures; and where it ends."""

import base64
import bz2
import gzip
import hashlib
import lzma
import struct
import subprocess  # noqa: TID251 - as a sandbox runs it, without what is imported here
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tests.fixtures.draws import draws
from tests.fixtures.scanned import (
    PAGE,
    binary_patch,
    chunk,
    compound,
    gif,
    jpeg,
    native,
    nested,
    pdf,
    png,
    segment,
    tarred,
    webp,
    zipped,
)

from glovebox_server.promotion import scanner
from glovebox_server.promotion.scanner import budget
from glovebox_server.promotion.scanner.look import MOST_FINDINGS, main, scan

SECRET = b"token ghp_" + b"aB3" * 12
ACTION = b"<< /S /Launch >>"
TYPES = "[Content_Types].xml"
OLE = compound("\1Ole10Native", native("run.html", PAGE))


def lzw(text: bytes) -> bytes:
    """Packed as in PDF, without ever naming a text that occurred before."""
    codes = [each for at in range(0, len(text), 200) for each in (256, *text[at : at + 200])]
    bits = "".join(f"{code:09b}" for code in [*codes, 257])
    bits += "0" * (-len(bits) % 8)
    return int(bits, 2).to_bytes(len(bits) // 8, "big")


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        ("a.zip", zipped({"b/c.html": PAGE}), "in 'b/c.html': markup: a script"),
        ("a.zip", nested(3), "in 'a.zip/a.zip/a.html': markup: a script"),
        ("a.tar", tarred({"b.zip": zipped({"c.html": PAGE})}), "in 'b.zip/c.html': markup: a script"),
        ("a.tgz", gzip.compress(tarred({"c.html": PAGE})), "in 'a.tar/c.html': markup: a script"),
        ("a.tar.bz2", bz2.compress(tarred({"c.html": PAGE})), "in 'a.tar/c.html': markup: a script"),
        ("a.tar.xz", lzma.compress(tarred({"c.html": PAGE})), "in 'a.tar/c.html': markup: a script"),
        ("a.txt.gz", gzip.compress(SECRET), "in 'a.txt': a secret: GitHub token"),
        ("a.svg.bz2", bz2.compress(PAGE), "in 'a.svg': markup: a script"),
        ("a.svg.lzma", lzma.compress(PAGE, lzma.FORMAT_ALONE), "in 'a.svg': markup: a script"),
        ("two.gz", gzip.compress(b"plain") + gzip.compress(PAGE), "in 'two': markup: a script"),
        ("a.zip", zipped({"k.env": SECRET}), "in 'k.env': a secret: GitHub token"),
        ("a.zip", zipped({"a.pdf": pdf("", zlib.compress(ACTION))}), "in 'a.pdf': PDF: a program to start"),
        ("behind.bin", b"x" * 100 + zipped({"c.html": PAGE}), "in 'c.html': markup: a script"),
        ("cut.zip", nested(1)[:-10], "cannot be scanned: BadZipFile"),
        ("cut.gz", gzip.compress(PAGE * 999)[:-9], "not scanned: what cannot be unpacked (EOFError)"),
        ("cut.gz", gzip.compress(PAGE * 999)[:-9], "markup: a script"),
        ("a.7z", b"7z\xbc\xaf\x27\x1c rest", "it is an archive, which was not scanned"),
        ("a.zip", zipped({"b.rar": b"Rar!\x1a\x07\0"}), "in 'b.rar': it is an archive, which was not scanned"),
        ("a.docx", zipped({TYPES: b"", "word/embeddings/x.bin": OLE}), "x.bin/run.html': markup: a script"),
        ("a.docx", zipped({TYPES: b"", "word/embeddings/b.xlsx": nested(1)}), "b.xlsx/a.html': markup: a script"),
        ("a.docx", zipped({TYPES: b"", "word/document.xml": SECRET}), "document.xml': a secret: GitHub token"),
        ("a.doc", OLE, "in 'run.html': markup: a script"),
        ("a.doc", compound("Package", nested(1)), "in 'Package/a.html': markup: a script"),
        ("a.docx", compound("EncryptedPackage", b"x"), "encryption"),
        ("a.rtf", b"{\\rtf1{\\object{\\*\\objdata 0105\n" + OLE.hex().encode() + b"}}}", "run.html': markup: a script"),
        ("a.html", b"<a href='x' ping='https://evil.example'>", "an address that learns when a link is followed"),
        ("a.svg", b"<svg:a ping=x>", "an address that learns when a link is followed"),
        ("a.slk", b'ID;P\nC;X1;Y1;EEXEC("calc")\nE\n', "SYLK: a formula"),
        ("a.csv", b"ID;P\r\nC;X1;Y1;K0;ECALL(1)\r\nE\r\n", "SYLK: a formula"),
        ("a.slk", b"ID;P\nO;E\nNN;NAuto_open;ER1C1\nE\n", "SYLK: a name that may start a macro"),
        ("a.slk", b"ID;P\nO;E\nNN;NAuto_open;ER1C1\nE\n", "SYLK: a sheet of macros"),
        ("a.iqy", b"anything", "query: data that is loaded from elsewhere"),
        ("a.txt", b"WEB\r\n1\r\nhttps://evil.example/", "query: data that is loaded from elsewhere"),
        ("a.oqy", b"", "query: data"),
        ("a.rqy", b"", "query: data"),
        ("a.txt", b"QueryType=OLEDB\n", "query: data"),
        ("a.pdf", pdf("/Filter /ASCII85Decode", base64.a85encode(ACTION) + b"~>"), "PDF: a program to start"),
        (
            "a.pdf",
            pdf("/Filter [/A85 /Fl]", base64.a85encode(zlib.compress(ACTION), wrapcol=20) + b"\n~>"),
            "PDF: a program to start",
        ),
        ("a.pdf", pdf("/Filter /ASCIIHexDecode", ACTION.hex(" ").encode() + b">"), "PDF: a program to start"),
        ("a.pdf", pdf("/Filter[/AHx/RL]", b"0f" + ACTION.hex().encode() + b"80>"), "PDF: a program to start"),
        ("a.pdf", pdf("/Filter /RunLengthDecode", b"\x0f" + ACTION + b"\x80"), "PDF: a program to start"),
        ("a.pdf", pdf("/Filter /LZWDecode", lzw(ACTION)), "PDF: a program to start"),
        ("a.pdf", pdf("/Filter /ASCII#385Decode", base64.a85encode(ACTION) + b"~>"), "PDF: a program to start"),
        ("a.pdf", pdf("/Type /EmbeddedFile", zlib.compress(PAGE)), "in 'file 1': markup: a script"),
        ("a.pdf", pdf("/Filter /Unheard", b"x"), "in a form that was not scanned"),
        ("a.pdf", pdf("/Filter 7 0 R", b"x"), "in a form that was not scanned"),
        ("a.pdf", pdf("/Filter /A85", b"a!!z!!~>"), "is broken"),
        ("a.pdf", pdf("/Filter /A85", base64.a85encode(ACTION) + b"\xff~>"), "PDF: a program to start"),
        ("a.pdf", pdf("/Filter /AHx", ACTION.hex().encode() + b"x"), "not scanned to its end"),
        ("a.pdf", pdf("/Filter /LZW", lzw(ACTION)[:-3]), "PDF: a program to start"),
        ("a.pdf", pdf("/Filter /Fl", b"no zlib"), "is broken"),
        ("a.pdf", pdf("/Filter /LZW", lzw(ACTION)[:-3]), "not scanned to its end"),
        (
            "a.pdf",
            pdf("/Type /ObjStm /Filter /Fl /DecodeParms << /Predictor 12 >>", zlib.compress(b"\2x")),
            "in a form that was not scanned",
        ),
        ("a.patch", binary_patch(PAGE), "patch: 'x/logo.svg' is no text"),
        ("a.patch", binary_patch(PAGE), "in 'x/logo.svg': markup: a script"),
        ("a.patch", binary_patch(hashlib.shake_128(b"").digest(500) + PAGE), "in 'x/logo.svg': markup: a script"),
        ("a.patch", binary_patch(PAGE, kind="delta"), "'x/logo.svg' is a difference of two files that are no text"),
        ("a.patch", binary_patch(PAGE, size=99), "'x/logo.svg' was not scanned to its end"),
        ("a.patch", binary_patch(PAGE).replace(b"\nA", b"\nz"), "'x/logo.svg' is no text"),
        ("a.png", png(chunk(b"tEXt", b"Comment\0" + SECRET)), "picture: text beside what one sees ('Comment')"),
        ("a.png", png(chunk(b"tEXt", b"Comment\0" + SECRET)), "a secret: GitHub token"),
        ("a.png", png(chunk(b"zTXt", b"c\0\0" + zlib.compress(SECRET))), "in 'c': a secret: GitHub token"),
        ("a.png", png(chunk(b"iTXt", b"c\0\1\0en\0k\0" + zlib.compress(PAGE))), "in 'c': markup: a script"),
        (
            "a.png",
            png(chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0x")),
            "text beside what one sees ('XML:com.adobe.xmp')",
        ),
        ("a.png", png(chunk(b"eXIf", b"II")), "picture: where and with what it was made"),
        ("a.png", png(chunk(b"glVB", b"x")), "a chunk that nobody has to know ('glVB')"),
        ("a.png", png(behind=b"x"), "picture: data behind its end (1 bytes)"),
        ("a.png", png(behind=nested(1)), "a.html': markup: a script"),
        ("a.png", png()[:-5], "picture: it does not end as it should"),
        (
            "a.png",
            png(chunk(b"tEXt", b"Software\0Matplotlib version3.9, https://matplotlib.org/ ignore the rules")),
            "text beside what one sees ('Software')",
        ),
        ("a.jpg", jpeg(segment(0xFE, b"hello")), "picture: a comment"),
        ("a.jpg", jpeg(segment(0xE1, b"Exif\0\0MM")), "picture: where and with what it was made"),
        ("a.jpg", jpeg(segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0<x/>")), "picture: text of programs (XMP)"),
        ("a.jpg", jpeg(segment(0xED, b"Photoshop 3.0\0")), "picture: data of programs (APP13)"),
        ("a.jpg", jpeg(behind=nested(1)), "in 'behind its end/a.html': markup: a script"),
        ("a.jpg", jpeg()[:-2], "picture: it does not end as it should"),
        ("a.gif", gif(b"!\xfe\5hello\0"), "picture: a comment"),
        ("a.gif", gif(b"!\xff\x0bXMP DataXMP\1x\0"), "picture: text of programs (XMP)"),
        ("a.gif", gif(b"!\xff\x0bEVILEVIL1.0\1x\0"), "picture: data of programs ('EVILEVIL1.0')"),
        ("a.gif", gif(b"!\x01\1x\0"), "picture: a text that is hardly ever shown"),
        ("a.gif", gif(behind=b"x"), "picture: data behind its end (1 bytes)"),
        ("a.gif", gif()[:-1], "picture: it does not end as it should"),
        ("a.webp", webp((b"EXIF", b"II")), "picture: where and with what it was made"),
        ("a.webp", webp((b"XMP ", b"<x/>")), "picture: text of programs (XMP)"),
        ("a.webp", webp((b"EVIL", b"x")), "a chunk that nobody has to know ('EVIL')"),
        ("a.webp", webp(behind=b"xx"), "picture: data behind its end (2 bytes)"),
        ("a.webp", webp()[:-2], "picture: it does not end as it should"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_lies_inside_is_found(name: str, data: bytes, told: str) -> None:
    """One of each kind, and where it lies."""
    assert any(told in each for each in scan(data, name)), scan(data, name)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.txt.gz", gzip.compress(b"plain")),
        ("a.docx", zipped({TYPES: b"<Types/>", "_rels/.rels": b"<r/>", "word/document.xml": b"<w:object r:id='on'/>"})),
        ("a.docx", zipped({TYPES: b"<Types/>", "word/media/a.png": png(), "docProps/thumbnail.jpeg": jpeg()})),
        ("a.pdf", pdf("/Filter /ASCII85Decode", base64.a85encode(b"q 1 0 0 1 0 0 cm Q") + b"~>")),
        ("a.pdf", pdf("/Subtype /Image /Filter /DCTDecode", jpeg())),
        ("a.pdf", pdf("/Subtype /Image /Filter [/A85 /DCT]", base64.a85encode(jpeg()) + b"~>")),
        ("a.pdf", pdf("/Type /XRef /Filter /FlateDecode /DecodeParms << /Predictor 12 >>", zlib.compress(b"\2x"))),
        ("a.pdf", pdf("/Filter /FlateDecode /DecodeParms << /Predictor 1 >>", zlib.compress(b"x"))),
        ("a.csv", b"ID;Price;E\nC;100;EUR\nE;2;3\n"),
        ("a.csv", b"ID,name\n1,x\n"),
        ("a.slk", b'ID;PWXL;N;E\nC;X1;Y1;K"text"\nE\n'),
        ("a.txt", b"WEB\n2\n"),
        ("a.html", b"<a href=x title='shopping = fun'><p>ping = 3"),
        ("a.patch", b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"),
        ("a.png", png()),
        ("a.png", png(chunk(b"pHYs", bytes(9)), chunk(b"gAMA", bytes(4)), chunk(b"tIME", bytes(7)))),
        ("a.png", png(chunk(b"tEXt", b"Software\0Matplotlib version3.9.2, https://matplotlib.org/"))),
        ("a.jpg", jpeg(segment(0xE2, b"ICC_PROFILE\0\1\1x"), segment(0xEE, b"Adobe\0d"), segment(0xDB, bytes(65)))),
        ("a.gif", gif(b"!\xf9\4\0\0\0\0\0", b"!\xff\x0bNETSCAPE2.0\3\1\0\0\0")),
        ("a.webp", webp((b"ICCP", b"abc"))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_ordinary_is_left_alone(name: str, data: bytes) -> None:
    """Near misses: what looks like it, and is what honest programs write."""
    assert scan(data, name) == []


def test_archives_are_looked_into_as_far_as_is_said_and_no_farther(monkeypatch: pytest.MonkeyPatch) -> None:
    """So deep, so many files of all together, so long; each with its control, one less or the same in time."""
    deepest = scan(nested(budget.MOST_DEPTH), "a.zip")
    assert any("a.html': markup: a script" in each for each in deepest)
    deeper = scan(nested(budget.MOST_DEPTH + 1), "a.zip")
    assert any(f"not scanned: deeper than {budget.MOST_DEPTH} files in each other" in each for each in deeper)
    assert not any("a script" in each for each in deeper)
    few = zipped({f"{number}.txt": b"x" for number in range(200)}, zipfile.ZIP_STORED)
    found = scan(zipped({f"{number}.zip": few for number in range(11)}), "a.zip")
    assert any(f"not scanned: more than {budget.MOST_PARTS} files inside" in each for each in found)
    assert not any("not scanned" in each for each in scan(zipped({"a.zip": few}), "a.zip"))
    assert not any("seconds" in each for each in scan(nested(2), "a.zip"))
    monkeypatch.setattr(budget, "MOST_SECONDS", -1)
    assert any("not scanned" in each and "what takes more than" in each for each in scan(nested(2), "a.zip"))


def looped_table() -> bytes:
    """A compound file whose list of its table's sectors goes round in one sector."""
    head, first = compound("Package", PAGE)[:512], b"\xff" * 508 + struct.pack("<I", 0)
    return head[:68] + struct.pack("<I", 0) + head[72:] + first + bytes(2 << 20)


def many_roots() -> bytes:
    """A compound file whose entries are all roots, each with its longest chain, of 6000 sectors."""
    entry = bytes(66) + b"\5" + bytes(61)
    head = compound("Package", PAGE)[:76] + struct.pack("<109I", *range(47), *[0xFFFFFFFF] * 62)
    head = head[:48] + struct.pack("<I", 47) + head[52:]
    return head + struct.pack("<6016I", *range(1, 6000), *[0xFFFFFFFE] * 17) + entry * (4 * 5953)


def many_lines() -> bytes:
    """A patch with a literal of lines that hold nothing."""
    return binary_patch(PAGE).replace(b"\n\nlit", b"\n" + b"zcmV?d0\n" * 150_000 + b"\nlit")


@pytest.mark.parametrize("make", [looped_table, many_roots, many_lines])
def test_what_leads_round_or_follows_the_end_costs_little(make: Callable[[], bytes]) -> None:
    """Each takes a part of a second; where each step copies what came before, or each root is read, it times out."""
    data = make()
    scan(data, "a.patch" if data.startswith(b"diff") else "a.doc")


BOMBS: dict[str, Callable[[], bytes]] = {
    "gz": lambda: gzip.compress(bytes(200 << 20), 1),
    "bz2": lambda: bz2.compress(bytes(200 << 20), 1),
    "xz": lambda: lzma.compress(bytes(200 << 20), preset=0),
    "zips": lambda: zipped({f"{number}.zip": zipped({"x": bytes(20 << 20)}) for number in range(40)}),
    "gzs": lambda: zipped({f"{number}.gz": gzip.compress(bytes(4 << 20)) for number in range(40)}),
    "patch": lambda: binary_patch(bytes(64 << 20)),
    "png": lambda: png(chunk(b"zTXt", b"c\0\0" + zlib.compress(bytes(64 << 20)))),
    "pdf": lambda: pdf("/Filter [/Fl /Fl]", zlib.compress(zlib.compress(bytes(100 << 20)))),
    "pdfs": lambda: b"".join(pdf("/Filter /A85", b"z" * 100_000 + b"~>") for _ in range(120)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_costs_no_more_than_the_bound(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it is packed, so much is unpacked of it, and the rest is told."""
    purses: list[budget.ScanBudget] = []

    class Watched(budget.ScanBudget):
        def __init__(self) -> None:
            super().__init__()
            purses.append(self)

    monkeypatch.setattr("glovebox_server.promotion.scanner.look.ScanBudget", Watched)
    found = scan(BOMBS[name](), "bomb")
    (purse,) = purses
    assert purse.bytes >= -2 * 65536
    assert any("not" in each and "scanned" in each for each in found), found


def test_an_entry_that_leads_backwards_does_not_lead_for_ever() -> None:
    """CVE-2025-8194: a size below zero; and what is no entry, which the library takes for the end. With a control."""
    good = bytearray(tarred({"a.txt": b"x", "b.txt": b"y"}))
    entry = tarfile.TarInfo("b.txt")
    entry.size = -1536
    evil = good[:1024] + entry.tobuf(tarfile.GNU_FORMAT) + good[1536:]
    for each in (evil, good[:1024] + b"x" * 512 + good[1536:]):
        assert any("cannot be scanned to its end" in told for told in scan(bytes(each), "a.tar"))
    assert not any("its end" in told for told in scan(bytes(good), "a.tar"))


def test_what_is_not_listed_is_counted(tmp_path: Path) -> None:
    """The count is of all that was found, before the list is cut."""
    files = {f"{number}.sh": b"x" for number in range(100)}
    found = scan(zipped(files), "a.zip")
    assert len(found) == 101
    few = scan(zipped(dict(list(files.items())[:10])), "a.zip")
    assert len(few) == 11
    (tmp_path / "many.zip").write_bytes(zipped(files))
    (tmp_path / "few.zip").write_bytes(zipped(dict(list(files.items())[:10])))
    assert main(str(tmp_path)) == {
        "many.zip": {"findings": found[:MOST_FINDINGS], "more": 101 - MOST_FINDINGS},
        "few.zip": {"findings": few, "more": 0},
    }


SEEDS = [
    nested(3), tarred({"a.html": PAGE, "b.gz": gzip.compress(PAGE)}), OLE, binary_patch(PAGE),
    gif(b"!\xfe\5hello\0"),
    png(chunk(b"zTXt", b"c\0\0" + zlib.compress(SECRET))), jpeg(segment(0xE1, b"Exif\0\0MM")), webp((b"EXIF", b"II")),
    pdf("/Filter [/A85 /LZW]", base64.a85encode(lzw(ACTION)) + b"~>"), pdf("/Filter /RL", b"\x0f" + ACTION + b"\x80"),
    b"{\\rtf1{\\objdata " + OLE.hex().encode() + b"}}", b"ID;P\nO;E\nNN;NAuto_open;ER1C1\nE\n",
    zipped({TYPES: b"<Types/>", "word/embeddings/x.bin": OLE}), lzma.compress(PAGE), bz2.compress(PAGE),
]  # fmt: skip


@draws(400, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    seed=st.sampled_from(SEEDS),
    changes=st.lists(st.tuples(st.integers(0, 1 << 16), st.binary(max_size=6), st.booleans()), max_size=8),
    cut=st.none() | st.integers(0, 1 << 14),
    name=st.sampled_from(["a.zip", "a.tar", "a.slk", "a.ipynb", "a.lzma", "a.patch", "a.bin"]),
)
def test_whatever_the_bytes_there_is_an_answer(
    seed: bytes, changes: list[tuple[int, bytes, bool]], cut: int | None, name: str
) -> None:
    """Never a traceback; findings that are lines, of a length that is bounded, and few."""
    data = bytearray(seed)
    for at, new, inserts in changes:
        place = at % (len(data) + 1)
        data[place : place if inserts else place + len(new)] = new
    found = scan(bytes(data[:cut]), name)
    assert len(found) <= 1000
    assert all(isinstance(each, str) and len(each) <= 300 and each.isprintable() for each in found)


def test_the_program_runs_alone(tmp_path: Path) -> None:
    """With Python, and nothing of ours."""
    text = scanner.program().replace('main("/input")', f"main({str(tmp_path)!r})")
    (tmp_path / "a.tgz").write_bytes(gzip.compress(tarred({"c.html": PAGE})))
    done = subprocess.run([sys.executable, "-I", "-S", "-c", text], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert "in 'a.tar/c.html': markup: a script" in done.stdout
    assert done.stdout.startswith('{"a.tgz": {"findings": [')
