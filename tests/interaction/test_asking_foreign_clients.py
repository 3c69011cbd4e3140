"""Clients by other authors are asked: the TypeScript SDK in both eras; the Inspector's command line cannot be."""

import json
import subprocess  # noqa: TID251 - foreign clients are processes of their own
from pathlib import Path
from typing import Any

import pytest
from tests.interaction import node
from tests.interaction.test_asking import CODE, kinds, options
from tests.interaction.test_real_server import target_of

__all__ = ["options"]

pytestmark = [pytest.mark.driver("bubblewrap"), pytest.mark.usefixtures("runtime_dir")]


@pytest.mark.parametrize("transport", ["stdio", "http", "sse"])
@pytest.mark.parametrize("sdk", ["v1", "v2", "v2-modern"])
def test_a_person_at_the_typescript_sdk_says_yes_and_no(
    sdk: str, transport: str, options: list[str], tmp_path: Path
) -> None:
    """As with the Python client: the whole program is shown, a yes runs it, a no does not."""
    place = node.directory()
    script = str(node.HERE / "typescript" / "client.mjs")
    with target_of(transport, options, tmp_path) as target:
        printed = node.run(place, "node", script, sdk, transport, *target, GLOVEBOX_CODE=CODE, ANSWERS="allow,deny")
    seen: dict[str, Any] = json.loads(printed)
    assert seen["ran"]["structuredContent"]["stdout"]["text"] == "42\n"
    assert seen["denied"]["structuredContent"]["refused"]["rule"] == "approval.denied"
    assert len(seen["asked"]) == 2
    assert all(f"  1 │ {CODE}" in text for text in seen["asked"])
    assert kinds(tmp_path)[:7] == [
        "approval.requested", "approval.answered", "call.decided", "call.finished",
        "approval.requested", "approval.answered", "call.decided",
    ]  # fmt: skip


@pytest.mark.parametrize("transport", ["stdio", "http", "sse"])
def test_at_the_inspectors_command_line_nobody_can_answer(transport: str, options: list[str], tmp_path: Path) -> None:
    """It has no form there."""
    place = node.directory()
    ask = ["--method", "tools/call", "--tool-name", "run_python", "--tool-arg", f"code={CODE}"]
    with target_of(transport, options, tmp_path) as target:
        command = [*target, *ask]
        if transport != "stdio":
            url = f"{target[0]}/{'mcp' if transport == 'http' else 'sse'}"
            command = [url, "--transport", transport, "--header", f"Authorization: Bearer {target[1]}", *ask]
        done = subprocess.run(
            ["mcp-inspector", "--cli", *command], cwd=place, env=node.variables(place), capture_output=True,
            timeout=node.SESSION_SECONDS, check=False,
        )  # fmt: skip
    assert json.loads(done.stdout)["structuredContent"]["refused"]["rule"] == "approval.pending"
