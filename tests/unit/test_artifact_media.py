"""What a file holds, judged by its bytes, and when its name says something else."""

import io
import sys
import zipfile

import pytest
from tests.fixtures.artifact_stores import PNG

from _glovebox_guest.pictures.header import HEAD_BYTES, size
from glovebox_server.artifacts.media import Content, Sniffer

SIZES = (480).to_bytes(2) + (640).to_bytes(2)
JPEG = b"\xff\xd8\xff\xe0\0\x10JFIF\0\1\1\0\0\1\0\1\0\0\xff\xc0\0\x11\x08" + SIZES + b"\3"
GIF = b"GIF89a" + (640).to_bytes(2, "little") + (480).to_bytes(2, "little") + b"\0\0\0"
WEBP = b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + (639).to_bytes(3, "little") + (479).to_bytes(3, "little")
WEBP_LOSSY = b"RIFF\0\0\0\0WEBPVP8 \0\0\0\0\x30\x01\0\x9d\x01\x2a" + (640).to_bytes(2, "little") + b"\xe0\x01"
WEBP_LOSSLESS = b"RIFF\0\0\0\0WEBPVP8L\0\0\0\0\x2f" + (639 | 479 << 14).to_bytes(4, "little")


def office(first: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(first, "x")
    return file.getvalue()


def array(descr: str, shape: str = "(3,)", *, version: int = 1, blanks: int = 20) -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}{' ' * blanks}\n".encode()
    return b"\x93NUMPY" + bytes([version, 0]) + len(header).to_bytes(2 if version == 1 else 4, "little") + header


def judge(name: str, *chunks: bytes) -> Content:
    sniffer = Sniffer()
    for chunk in chunks:
        sniffer.feed(chunk)
    return sniffer.finish(name)


@pytest.mark.parametrize(
    ("name", "data", "media_type"),
    [
        ("a.png", PNG, "image/png"),
        ("a", PNG, "image/png"),
        ("a.JPG", JPEG, "image/jpeg"),
        ("a.gif", GIF, "image/gif"),
        ("a.webp", WEBP, "image/webp"),
        ("a.pdf", b"%PDF-1.7\n%\xe2\xe3", "application/pdf"),
        ("a.pdf", b"%PDF-1.4\nplain\n", "application/pdf"),
        ("a.parquet", b"PAR1\x15\x04\0", "application/vnd.apache.parquet"),
        ("a.zip", office("x.txt"), "application/zip"),
        ("a.npz", office("x.npy"), "application/zip"),
        ("a.xlsx", office("xl/workbook.xml"), "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"),
        ("a.docx", office("_rels/.rels"), "application/vnd.openxmlformats-officedocument.wordprocessingml.document"),
        ("a.gz", b"\x1f\x8b\x08\0", "application/gzip"),
        ("a.npy", array("'<f8'"), "application/x-npy"),
        ("a.npy", array("'|b1'", version=2), "application/x-npy"),
        ("a.npy", array("'<M8[ns]'", "(3, 4)"), "application/x-npy"),
        ("a.npy", array("[('a', '<i4'), ('b', '<f8', (2, 3))]", "()"), "application/x-npy"),
        ("a.csv", b"a,b\n1,2\n", "text/csv"),
        ("a.tsv", b"a\tb\n", "text/tab-separated-values"),
        ("a.json", b'\xef\xbb\xbf {"a": 1}', "application/json"),
        ("a.txt", "grün\r\n".encode(), "text/plain"),
        ("a.csv", b"a,b\r\n1,2\r\n", "text/csv"),
        ("a", b"a,b\n1,2\n", "text/plain"),
        ("empty.txt", b"", "text/plain"),
        ("a.txt", "👍 naïve \u200d \U000f0000".encode(), "text/plain"),
        ("a.md", b"# Title\n<b>x</b>", "text/plain"),
    ],
)
def test_the_type_comes_from_the_bytes(name: str, data: bytes, media_type: str) -> None:
    whole = judge(name, data)
    assert whole == Content(media_type=media_type, risks=())
    assert judge(name, *(data[at : at + 1] for at in range(len(data)))) == whole


@pytest.mark.parametrize(
    ("name", "data", "media_type", "risk"),
    [
        ("a.png", b"<html><script>", "text/plain", "HTML"),
        ("a.html", b"<!DOCTYPE html><script>'\x1a\x01'", "text/plain", "HTML"),
        ("a.html", b"<html><script>'\x1a\x01'", "text/plain", "holds control characters"),
        ("a.html", b"<html><script>'\0'", "application/octet-stream", "no kind that is known"),
        ("a.txt", b"see <html>\x1a", "application/octet-stream", "no kind that is known"),
        ("a.txt", b"a\x01b", "application/octet-stream", "no kind that is known"),
        ("a.png", b"hello", "text/plain", "named .png but holds text/plain"),
        ("a.csv", PNG, "image/png", "named .csv but holds image/png"),
        ("a.txt", b"\x80\x04\x95", "application/octet-stream", "pickle"),
        ("a.csv", b"a,b\xff\n", "application/octet-stream", "named .csv but holds application/octet-stream"),
        ("a.json", b"<x/>", "text/plain", "named .json but holds text/plain"),
        ("a.png", b"", "text/plain", "holds nothing"),
        ("a.xlsx", office("x.txt"), "application/zip", "named .xlsx but holds application/zip"),
        ("a", b"  <!DOCTYPE html>", "text/plain", "HTML"),
        ("a", b"<?xml version='1.0'?><svg:svg xmlns:svg='x'>", "text/plain", "SVG"),
        ("a.svg", b"<svg onload='x()'>", "text/plain", "SVG"),
        ("a", b"#!/bin/sh\n", "text/plain", "interpreter"),
        ("a", b"\x7fELF\2\1\1\0", "application/octet-stream", "program or a library"),
        ("a.npy", b"\x93NUMPY\1\0v\0{'descr': '<f8', }", "application/x-npy", "pickled objects"),
        ("a.npy", array("'|O'"), "application/x-npy", "pickled objects"),
        ("a.npy", array('"|O"'), "application/x-npy", "pickled objects"),
        ("a.npy", array("'object'"), "application/x-npy", "pickled objects"),
        ("a.npy", array("[('a', 'O')]"), "application/x-npy", "pickled objects"),
        ("a.npy", array("'<f8'", blanks=300).replace(b"'descr'", b"'x': 1, 'descr'"), "application/x-npy", "pickled"),
        ("a.npy", array("'<f8'")[:8] + b"\1\2" + array("'<f8'")[10:], "application/x-npy", "pickled objects"),
        ("a.bin", b"\0\1\2", "application/octet-stream", "no kind that is known"),
        ("a.bin", b"cos\nsystem\nq\0(X\2\0\0\0idq\1tq\2Rq\3.", "application/octet-stream", "no kind that is known"),
        ("a.txt", b"<html>\xe9<script>", "application/octet-stream", "no kind that is known"),
        ("a.txt", "<html><script>".encode("utf-16"), "application/octet-stream", "no kind that is known"),
        ("run", b"#!/bin/sh\n:\0\n", "application/octet-stream", "no kind that is known"),
        ("run", b"\xef\xbb\xbf#!/bin/sh\n", "text/plain", "interpreter"),
        ("a.xml", b"<?xml version='1.0'?><gpx/>", "text/plain", "it is markup"),
        ("a.txt", b"<video src=x onerror=alert(1)>", "text/plain", "it is markup"),
        ("a.txt", b"<!--" + b"x" * HEAD_BYTES + b"--><script>", "text/plain", "it is markup"),
        ("a.txt", b" " * HEAD_BYTES + b"<script>", "text/plain", "too many blanks"),
        ("a.md", "hello \U000e0049\U000e0067".encode(), "text/plain", "nobody sees"),
        ("a.md", "hel\u200blo".encode(), "text/plain", "nobody sees"),
        ("a.log", b"x\x1b]0;owned\x07", "text/plain", "terminal control"),
        ("a.log", b"x\xc2\x9b2J", "text/plain", "terminal control"),
        ("a.txt", "x\u202ey".encode(), "text/plain", "reorder"),
        ("a.txt", b"# check\x0cexit 1\n", "text/plain", "only some programs end a line"),
        ("a.txt", b"# check\x0bexit 1\n", "text/plain", "only some programs end a line"),
        ("a.txt", b"# check\rexit 1\r\n", "text/plain", "only some programs end a line"),
        ("a.txt", b"# check\r\r\n", "text/plain", "only some programs end a line"),
        ("a.txt", b"a\r\nb\r", "text/plain", "only some programs end a line"),
        ("a.txt", "# check\u2028exit 1\n".encode(), "text/plain", "only some programs end a line"),
        ("a.txt", "# check\u2029exit 1\n".encode(), "text/plain", "only some programs end a line"),
        ("a.png", PNG[:16] + b"\0\1\0\0\0\1\0\0", "image/png", "more than 64000000"),
        ("a.png", PNG[:12] + b"tEXt", "image/png", "not where they should be"),
    ],
)
def test_what_may_harm_whoever_opens_it_is_reported(name: str, data: bytes, media_type: str, risk: str) -> None:
    """F6: scripts, programs, picture bombs, terminal escapes and contradictions are said, also across chunk borders."""
    for found in (judge(name, data), judge(name, *(data[at : at + 1] for at in range(len(data))))):
        assert found.media_type == media_type
        assert any(risk in each for each in found.risks), found.risks


def test_text_is_promised_for_the_whole_file_and_not_only_its_head() -> None:
    text = b"a,b\n" * 250_000
    assert judge("a.csv", text).media_type == "text/csv"
    assert judge("a.csv", text, b"\xff").media_type == "application/octet-stream"
    assert judge("a.csv", text, "ü".encode()[:1]).media_type == "application/octet-stream"
    assert judge("a.csv", text, b"\0").media_type == "application/octet-stream"


@pytest.mark.parametrize(
    ("data", "media_type"),
    [
        (PNG, "image/png"), (JPEG, "image/jpeg"), (GIF, "image/gif"), (WEBP, "image/webp"), (WEBP_LOSSY, "image/webp"),
        (WEBP_LOSSLESS, "image/webp"),
    ],
)  # fmt: skip
def test_an_image_is_measured_without_decoding_it(data: bytes, media_type: str) -> None:
    assert size(data, media_type) == (640, 480)
    assert all(size(data[:end], media_type) in {None, (640, 480)} for end in range(len(data)))


def test_a_jpeg_whose_segments_lie_about_their_length_ends() -> None:
    assert size(b"\xff\xd8" + b"\xff\xe0\0\0" * 4000, "image/jpeg") is None
    assert size(b"\xff" * 16_000, "image/jpeg") is None


@pytest.mark.parametrize(("text", "risks"), [("€", 0), ("é€\U000f0000a", 0), ("\x07\u200b\u202a\u2028", 4)])
def test_each_chunk_is_searched_once_for_all_risks(text: str, risks: int) -> None:
    """The server's processor does it: each search took as long as one for all of them."""
    searches = 0

    def count(_frame: object, event: str, called: object) -> None:
        nonlocal searches
        searches += event == "c_call" and getattr(called, "__name__", "") == "search"

    chunks = 50
    sniffer, chunk = Sniffer(), text.encode() * 100
    sys.setprofile(count)
    try:
        for _ in range(chunks):
            sniffer.feed(chunk)
    finally:
        sys.setprofile(None)
    assert len(sniffer.finish("a.txt").risks) == risks
    assert 0 < searches <= chunks + risks
