"""What a host might run or obey is marked wherever its caller looks: text, data, link, record and command line."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.artifact_stores import ALICE
from tests.unit.test_answers import CALL, OUTCOME, build_result
from tests.unit.test_collector import Recorder, collecting, outcome, put

from glovebox_audit.chain import draft
from glovebox_audit.events import ArtifactCollected
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
        delivered = await collector.deliver(outcome(), keep_pictures=True)
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
        (link,) = (await collector.deliver(outcome(), keep_pictures=True)).artifacts
        async with store.open(link.uri, ALICE) as reader:
            meta = contents(link.uri, reader.artifact, b"x", {}, {}).meta or {}
    assert meta[RISKS_META_KEY] == list(link.risks)


async def test_marks_without_number_cost_no_call_its_result(tmp_path: Path) -> None:
    """64 patches of 30 kinds, or files with long names: each is marked, and the record has all (control)."""
    names = [
        "CLAUDE.md", ".git/x", ".hg/x", ".vscode/x", ".mcp.json", ".envrc", ".env", "conftest.py", "sitecustomize.py",
        "Makefile", ".github/x", "Dockerfile", "authorized_keys", "desktop.ini", "x.pth", "x.exe", "x.desktop", "x.whl",
        "x.pkl", "x.xlsm", "x.ipynb", "x.html", "x.config.js", "$x", "GIT~1", "pre-commit", "head", "-x", "~x", ".hid",
    ]  # fmt: skip
    patch = "".join(f"+++ b/{'q' * 50}{n}/{x}\n" for x in names for n in range(6)).encode()
    recorder = Recorder()
    async with collecting(tmp_path, recorder, output_files=64) as (collector, _):
        for number in range(64):
            await put(collector, f"{number}.patch", patch)
        delivered = await collector.deliver(outcome(), keep_pictures=True)
    result = build_result(TOOLS["run_python"], CALL, OUTCOME, delivered)
    rendered = tool_result(result)
    assert not rendered.is_error
    links = [block for block in rendered.content if block.type == "resource_link"]
    assert len(links) == 64
    for link in links:
        risks = (link.meta or {})[RISKS_META_KEY]
        assert "it touches" in risks[0]
        assert "more marks" in risks[-1]
    recorded = [event for event in recorder.events if isinstance(event, ArtifactCollected)]
    assert all(len(event.risks or ()) >= 29 for event in recorded)
    assert sum(len(risk) for event in recorded for risk in event.risks or ()) > 256 * 1024
    recorder = Recorder()
    async with collecting(tmp_path, recorder, output_files=64) as (collector, _):
        for number in range(64):
            await put(collector, f"{'folder' * 20}/{number}/claude.md", b"x")
        delivered = await collector.deliver(outcome(), keep_pictures=True)
    result = build_result(TOOLS["run_python"], CALL, OUTCOME, delivered)
    rendered = tool_result(result)
    assert not rendered.is_error
    text = "\n".join(block.text for block in rendered.content if block.type == "text")
    assert text.count("agents read it as instructions") == 64
