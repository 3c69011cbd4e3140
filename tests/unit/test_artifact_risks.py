"""What a file holds, by its bytes, and what a host might run or obey: marked wherever its caller looks."""

import io
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.artifact_stores import ALICE, PNG
from tests.fixtures.channels import an_outcome
from tests.unit.test_answers import CALL, OUTCOME, build_result
from tests.unit.test_collector import Recorder, collecting, put

from _glovebox_guest.pictures.header import HEAD_BYTES, size
from glovebox_audit.chain import draft
from glovebox_audit.events import ArtifactCollected
from glovebox_server.artifacts.media import Content, Sniffer
from glovebox_server.calls import CallResult, Text
from glovebox_server.mcp.delivery import RISKS_META_KEY, tool_result
from glovebox_server.mcp.resources import _contents as contents
from glovebox_server.tools import TOOLS

HTML = b"<!doctype html><script>alert(1)</script>"
MARKED = [
    ("claude.md", b"Run curl.", "agents read it as instructions"),
    ("docs/AGENTS.md", b"Run curl.", "agents read it as instructions"),
    (".env", b"PATH=/tmp", "programs take their environment from it"),
    (".envrc", b"curl x", "the shell runs it on entering"),
    (".git/hooks/pre-commit", b"#!/bin/sh", "git runs or obeys what lies there"),
    ("hooks/post-checkout", b"echo", "git runs it as a hook"),
    (".husky/pre-push", b"echo", "git runs or obeys what lies there"),
    (".vscode/tasks.json", b"{}", "editors run tasks and settings from it"),
    (".mcp.json", b"{}", "agents start servers or take orders from it"),
    (".github/workflows/ci.yml", b"on: push", "continuous integration runs it"),
    (".pre-commit-config.yaml", b"repos: []", "git runs it as a hook"),
    ("package.json", b"{}", "build tools run or obey it"),
    ("conftest.py", b"", "test and task runners import it"),
    ("a.pth", b"import os", "Python runs lines of it at start"),
    ("page.html", b"text", "a browser runs scripts in it"),
    ("page.txt", HTML, "it is HTML"),
    ("image.svg", b"<svg/>", "it is SVG"),
    ("setup.msi", b"\xd0\xcf\x11\xe0", "Windows runs it on a double click"),
    ("app.deb", b"!<arch>\n", "it installs or runs code"),
    ("install.run", b"#!/bin/sh", "it is a script"),
    ("tool", b"\x7fELF\2", "it is a program or a library"),
    ("model.bin", b"\x80\x04\x95", "it looks like a Python pickle"),
    ("log.txt", b"\x1b[2J", "terminal control characters"),
    ("lefthook.toml", b"", "it is of a kind that is not known to be harmless"),
    ("data.csv", b"\0\1", "its content is of no kind that is known to be harmless"),
]
HARMLESS = [
    ("results.csv", b"a,b\n1,2\n"),
    ("README.md", b"# Results\n"),
    ("plots/claude.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (64).to_bytes(4, "big") * 2 + b"\x08\x02\0\0\0"),
    ("environment.txt", b"none"),
    ("hooks.csv", b"a\n"),
    ("data.json", b"{}"),
    ("notes.txt", b"see <https://example.org>"),
]


async def shown(directory: Path, name: str, data: bytes) -> tuple[CallResult, ArtifactCollected]:
    recorder = Recorder()
    async with collecting(directory, recorder) as (collector, _):
        await put(collector, name, data)
        delivered = await collector.deliver(an_outcome(), keep_pictures=True)
    result = build_result(TOOLS["run_python"], CALL, OUTCOME, delivered)
    (record,) = [event for event in recorder.events if isinstance(event, ArtifactCollected)]
    return result, record


def told(result: CallResult, record: ArtifactCollected) -> dict[str, Any]:
    rendered = tool_result(result).model_dump(by_alias=True, mode="json", exclude_none=True)
    (link,) = [block for block in rendered["content"] if block["type"] == "resource_link"]
    return {
        "text": "\n".join(item.text for item in result.content if isinstance(item, Text)),
        "data": json.dumps(rendered["structuredContent"]["artifacts"][0]["risks"]),
        "link": json.dumps(link["_meta"].get(RISKS_META_KEY, [])),
        "record": json.dumps(draft(record).data.get("risks", [])),
    }


@pytest.mark.parametrize(("name", "data", "why"), MARKED)
async def test_a_marked_file_is_marked_everywhere(name: str, data: bytes, why: str, tmp_path: Path) -> None:
    for place, text in told(*await shown(tmp_path, name, data)).items():
        assert why in text, place
        assert name in text or place != "text"


@pytest.mark.parametrize(("name", "data"), HARMLESS)
async def test_the_control_a_harmless_file_has_no_mark(name: str, data: bytes, tmp_path: Path) -> None:
    """A mark on everything would be read by nobody."""
    found = told(*await shown(tmp_path, name, data))
    assert "look before" not in found.pop("text")
    assert set(found.values()) == {"[]"}


async def test_reading_an_artifact_gives_its_marks_too(tmp_path: Path) -> None:
    async with collecting(tmp_path, Recorder()) as (collector, store):
        await put(collector, "claude.md", b"x")
        (link,) = (await collector.deliver(an_outcome(), keep_pictures=True)).artifacts
        async with store.open(link.uri, ALICE) as reader:
            meta = contents(link.uri, reader.artifact, b"x", {}, {}).meta or {}
    assert meta[RISKS_META_KEY] == list(link.risks)


async def test_marks_without_number_cost_no_call_its_result(tmp_path: Path) -> None:
    """63 patches of 30 kinds, or files with long names: the record has all, and few marks stay whole (control)."""
    names = [
        "CLAUDE.md", ".git/x", ".hg/x", ".vscode/x", ".mcp.json", ".envrc", ".env", "conftest.py", "sitecustomize.py",
        "Makefile", ".github/x", "Dockerfile", "authorized_keys", "desktop.ini", "x.pth", "x.exe", "x.desktop", "x.whl",
        "x.pkl", "x.xlsm", "x.ipynb", "x.html", "x.config.js", "$x", "GIT~1", "pre-commit", "head", "-x", "~x", ".hid",
    ]  # fmt: skip
    patch = "".join(f"+++ b/{'q' * 50}{n}/{x}\n" for x in names for n in range(6)).encode()
    recorder = Recorder()
    async with collecting(tmp_path, recorder, output_files=64) as (collector, _):
        for number in range(63):
            await put(collector, f"{number}.patch", patch)
        await put(collector, "conftest.py", b"x")
        delivered = await collector.deliver(an_outcome(), keep_pictures=True)
    result = build_result(TOOLS["run_python"], CALL, OUTCOME, delivered)
    rendered = tool_result(result)
    assert not rendered.is_error
    links = [block for block in rendered.content if block.type == "resource_link"]
    assert len(links) == 64
    for link in links:
        risks = (link.meta or {})[RISKS_META_KEY]
        assert ("it touches" in risks[0]) is ("more marks" in risks[-1]) is (link.name != "conftest.py")
    recorded = [event for event in recorder.events if isinstance(event, ArtifactCollected)]
    assert sum(len(event.risks or ()) >= 29 for event in recorded) == 63
    assert sum(len(risk) for event in recorded for risk in event.risks or ()) > 256 * 1024
    recorder = Recorder()
    async with collecting(tmp_path, recorder, output_files=64) as (collector, _):
        for number in range(64):
            await put(collector, f"{'folder' * 20}/{number}/claude.md", b"x")
        delivered = await collector.deliver(an_outcome(), keep_pictures=True)
    result = build_result(TOOLS["run_python"], CALL, OUTCOME, delivered)
    rendered = tool_result(result)
    assert not rendered.is_error
    text = "\n".join(block.text for block in rendered.content if block.type == "text")
    assert text.count("agents read it as instructions") == 64


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
        (PNG, "image/png"),
        (JPEG, "image/jpeg"),
        (GIF, "image/gif"),
        (WEBP, "image/webp"),
        (WEBP_LOSSY, "image/webp"),
        (WEBP_LOSSLESS, "image/webp"),
    ],
)
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
