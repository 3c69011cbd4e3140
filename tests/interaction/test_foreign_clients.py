"""Clients by other authors: the TypeScript SDK (both major versions, both eras), the Inspector, the official runner."""

import json
import subprocess  # noqa: TID251 - foreign clients, and servers for them, are processes of their own
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.audit_logs import log_lines
from tests.interaction import node
from tests.interaction.served import until
from tests.interaction.test_real_server import GLOVEBOX, over_http

from glovebox_profiles.load.loader import SHIPPED

SHOWN = "import matplotlib.pyplot as plt"
CODE = f"{SHOWN}\nplt.plot([1, 2])\nprint('hi')\nopen('/output/a.txt', 'w').write('kept')\n6 * 7"


@dataclass(frozen=True, slots=True)
class Asking:
    """A server that asks before it runs a program, and what a client is told of it: its command, or address and key."""

    directory: Path
    transport: str
    target: list[str]

    def kinds(self) -> list[str]:
        """Kinds of the records of calls, in order."""
        audit = self.directory / "state" / "audit"
        found: list[str] = [json.loads(line)["kind"] for line in (log_lines(audit) if audit.exists() else [])]
        return [kind for kind in found if kind.startswith(("approval.", "call."))]


@pytest.fixture(scope="module", params=["stdio", "http", "sse"])
def asking(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asking]:
    """One with a workspace of one file; over HTTP it is one for all clients, else each starts its own."""
    place = tmp_path_factory.mktemp("asking")
    place.chmod(0o755)
    for name in ("workspace", "profiles"):
        (place / name).mkdir(mode=0o755)
    (place / "workspace" / "data.csv").write_text("a,b\n1,2\n")
    text = (SHIPPED / "run_python.toml").read_text().partition("[[example]]")[0]
    (place / "profiles" / "run_python.toml").write_text(text.replace('approval = "none"', 'approval = "ask"'))
    options = [f"--workspace={place}/workspace", f"--profiles-dir={place}/profiles", f"--state-dir={place}/state"]
    if request.param == "stdio":
        yield Asking(place, "stdio", [GLOVEBOX, "serve", *options])
        return
    with over_http(options, place) as found:
        yield Asking(place, request.param, [*found])


@pytest.mark.driver("bubblewrap")
@pytest.mark.parametrize("sdk", ["v1", "v2", "v2-modern"])
async def test_a_person_at_the_typescript_sdk(sdk: str, asking: Asking) -> None:
    """As at ours: asked; a yes runs, a no does not; artifacts, prompts, two refusals; what it gives up is cancelled."""
    before = len(asking.kinds())
    script = str(node.HERE / "typescript" / "client.mjs")
    printed = node.run(node.directory(), "node", script, sdk, asking.transport, *asking.target, CODE=CODE)
    seen: dict[str, Any] = json.loads(printed)
    if seen["protocol"] is not None:  # the first SDK does not tell it over stdio
        assert seen["protocol"] == ("2026-07-28" if sdk == "v2-modern" else "2025-11-25")
    assert len(seen["tools"]) == 5
    assert seen["progress"]
    assert {block["type"] for block in seen["ran"]["content"]} == {"text", "image", "resource_link"}
    assert seen["ran"]["structuredContent"]["stdout"]["text"] == "hi\n"
    assert seen["ran"]["structuredContent"]["value"] == "42"
    assert seen["denied"]["structuredContent"]["refused"]["rule"] == "approval.denied"
    assert len(seen["asked"]) == 3
    assert all(f"  1 │ {SHOWN}" in text for text in seen["asked"][:2])
    assert seen["resource"]["text"] == "kept"
    assert seen["part"]["text"] == "ept"
    assert [prompt["name"] for prompt in seen["prompts"]] == ["analyse_file", "compare_files", "explain_call"]
    assert seen["completed"]["values"] == ["data.csv"]
    assert seen["invalid"]["isError"] is True
    assert "sandbox_config: unknown argument" in seen["invalid"]["content"][0]["text"]
    assert seen["unknown"]["code"] == -32602
    assert seen["cancelled"] == "given up"
    asked = ["approval.requested", "approval.answered", "call.decided"]
    await until(lambda: asking.kinds()[before:][-4:] == [*asked, "call.cancelled"])
    assert asking.kinds()[before:][:7] == [*asked, "call.finished", *asked]


@pytest.mark.driver("bubblewrap")
def test_the_inspector_calls_tools(asking: Asking) -> None:
    """Its command line gets a result; it has no form, so what would have to be asked there is pending."""
    target = asking.target
    if asking.transport != "stdio":
        url, token = target
        path = "mcp" if asking.transport == "http" else "sse"
        target = [f"{url}/{path}", "--transport", asking.transport, "--header", f"Authorization: Bearer {token}"]
    place = node.directory()

    def call(tool: str, argument: str) -> dict[str, Any]:
        ask = ["--method", "tools/call", "--tool-name", tool, "--tool-arg", argument]
        done = subprocess.run(
            ["mcp-inspector", "--cli", *target, *ask], cwd=place, env=node.variables(place), capture_output=True,
            timeout=node.SESSION_SECONDS, check=False,
        )  # fmt: skip
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    assert "1,2" in str(call("read_workspace_file", "path=data.csv")["content"])
    assert call("run_python", "code=6*7")["structuredContent"]["refused"]["rule"] == "approval.pending"


@contextmanager
def _started(*command: str) -> Iterator[str]:
    """Run a server process; give the first line it prints."""
    with subprocess.Popen(command, cwd=node.ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline()
        finally:
            process.terminate()


@pytest.mark.parametrize(("revision", "way"), [("2025-11-25", "oauth"), ("2026-07-28", "token")])
@pytest.mark.timeout(300)
def test_the_official_conformance_runner_finds_nothing_missing(revision: str, way: str, tmp_path: Path) -> None:
    """Every scenario that a revision requires passes, and either way to be let in; no failure is expected.

    What the runner runs besides and does not score fails where Glovebox has nothing: tools as tasks (an extension),
    and two scenarios that the runner itself calls pending.
    """
    place = node.directory()
    with _started(sys.executable, "-m", "tests.interaction.conformance_server", str(tmp_path), way) as line:
        command = ["conformance", "server", "--url", line.strip(), "--requirements", revision]
        printed = node.run(place, *command, "-o", str(tmp_path / "results"), seconds=node.CONFORMANCE_SECONDS)
    summary = printed.partition("=== SUMMARY ===")[2].partition("Not scored")[0]
    assert summary.count("✓") >= 30
