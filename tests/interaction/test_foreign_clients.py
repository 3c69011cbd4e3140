"""Clients by other authors: the TypeScript SDK (both major versions, both eras), the Inspector, the official runner."""

import json
import subprocess  # noqa: TID251 - servers for foreign clients are processes of their own
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.interaction import node


@contextmanager
def _started(*command: str) -> Iterator[str]:
    """Run a server process; give the first line it prints."""
    with subprocess.Popen(command, cwd=node.ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline()
        finally:
            process.terminate()


@contextmanager
def _target(transport: str, directory: Path) -> Iterator[list[str]]:
    if transport == "stdio":
        yield node.fake_server("stdio", directory)
        return
    with _started(*node.fake_server("http", directory, "alice")) as line:
        found = json.loads(line)
        yield [found["url"], found["tokens"]["alice"]]


@pytest.mark.parametrize("transport", ["stdio", "http", "sse"])
@pytest.mark.parametrize("sdk", ["v1", "v2", "v2-modern"])
def test_the_typescript_sdk_gets_what_ours_gets(sdk: str, transport: str, tmp_path: Path) -> None:
    """List, call with progress, read the artifact, be refused twice, cancel: as with the Python client."""
    place = node.directory()
    with _target(transport, tmp_path) as target:
        script = str(node.HERE / "typescript" / "client.mjs")
        printed = node.run(place, "node", script, sdk, transport, *target, GLOVEBOX_WAITING_CODE="wait")
    seen: dict[str, Any] = json.loads(printed)
    if seen["protocol"] is not None:  # the first SDK does not tell it over stdio
        assert seen["protocol"] == ("2026-07-28" if sdk == "v2-modern" else "2025-11-25")
    assert seen["tools"] == ["run_python"]
    assert seen["progress"][0] == "sandbox started"
    assert [block["type"] for block in seen["ran"]["content"]] == ["text", "image", "resource_link"]
    assert seen["ran"]["structuredContent"]["stdout"] == "echo plot"
    assert seen["resource"]["text"] == "made for "
    assert seen["invalid"]["isError"] is True
    assert "sandbox_config: unknown argument" in seen["invalid"]["content"][0]["text"]
    assert seen["unknown"]["code"] == -32602
    assert seen["cancelled"] < 2000


@pytest.mark.parametrize("transport", ["stdio", "http", "sse"])
def test_the_inspector_calls_a_tool(transport: str, tmp_path: Path) -> None:
    """The Inspector's command line lists tools and calls one."""
    place = node.directory()
    ask = ["--method", "tools/call", "--tool-name", "run_python", "--tool-arg", "code=plot", "tag=inspected"]
    with _target(transport, tmp_path) as target:
        if transport == "stdio":
            command = [*target, *ask]
        else:
            url, token = target
            path = "mcp" if transport == "http" else "sse"
            command = [f"{url}/{path}", "--transport", transport, "--header", f"Authorization: Bearer {token}", *ask]
        printed = node.run(place, "mcp-inspector", "--cli", *command)
    result = json.loads(printed)
    assert result["structuredContent"]["tag"] == "inspected"
    assert result["content"][0]["text"] == "echo plot"


@pytest.mark.parametrize("way", ["token", "oauth"])
@pytest.mark.parametrize("revision", ["2025-11-25", "2026-07-28"])
@pytest.mark.timeout(300)
def test_the_official_conformance_runner_finds_nothing_missing(revision: str, way: str, tmp_path: Path) -> None:
    """Every scenario that a revision requires passes, whatever lets the runner in; no failure is expected.

    What the runner runs besides and does not score fails where Glovebox has nothing: tools as tasks (an extension),
    and two scenarios that the runner itself calls pending.
    """
    place = node.directory()
    with _started(sys.executable, "-m", "tests.interaction.conformance_server", str(tmp_path), way) as line:
        command = ["conformance", "server", "--url", line.strip(), "--requirements", revision]
        printed = node.run(place, *command, "-o", str(tmp_path / "results"), seconds=node.CONFORMANCE_SECONDS)
    summary = printed.partition("=== SUMMARY ===")[2].partition("Not scored")[0]
    assert summary.count("✓") >= 30
