"""What clients see of a stop, from real servers and by the command: a refusal with the reason, and nobody else's."""

import base64
import json
from pathlib import Path
from typing import Any

import anyio
import mcp_types as types
import pytest
from click.testing import CliRunner
from mcp import Client
from mcp.shared.exceptions import MCPDeprecationWarning
from tests.interaction.served import PAIRS, Era, Logs, Transport, connected
from tests.interaction.test_real_server import directories

from glovebox_server.cli.main import main

__all__ = ["directories"]
pytestmark = [pytest.mark.driver("bubblewrap"), pytest.mark.usefixtures("runtime_dir")]
LONG = "import time\nprint('begun', flush=True)\ntime.sleep(600)"


def command(options: list[str], *words: str) -> str:
    """One command of the operator's, from another terminal."""
    found = CliRunner().invoke(main, [*words, *options[2:]])
    assert found.exit_code == 0, found.output
    return found.output


def refusal(result: types.CallToolResult) -> dict[str, Any]:
    """Why it was refused; both forms of the result say it."""
    assert result.is_error
    assert result.structured_content is not None
    found: dict[str, Any] = result.structured_content["refused"]
    (text,) = [block.text for block in result.content if isinstance(block, types.TextContent)]
    assert text.startswith(f"Refused ({found['rule']}): {found['reason']}")
    return found


@pytest.mark.parametrize(("transport", "era"), PAIRS)
async def test_a_stop_ends_the_call_that_runs_and_refuses_the_next(
    transport: Transport, era: Era, directories: list[str], tmp_path: Path
) -> None:
    """As a refusal that both know as one, until it is resumed; the control is before and after."""
    ended: list[types.CallToolResult] = []
    begun = anyio.Event()

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        if message and "begun" in message:
            begun.set()

    async def run(client: Client) -> None:
        ended.append(await client.call_tool("run_python", {"code": LONG}, progress_callback=hear))

    async with connected(transport, era, directories) as client:
        assert not (await client.call_tool("run_python", {"code": "print(1)"})).is_error
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, client)
            with anyio.fail_after(20):
                await begun.wait()
            words = ("stop", "--tool", "run_python", "--because", "It runs in circles")
            said = await anyio.to_thread.run_sync(lambda: command(directories, *words))
        assert f"in {Path(directories[-1])} (1 live server: process " in said
        found = refusal(ended[0])
        assert found["rule"] == "stop"
        assert found["reason"] == "This tool is stopped: It runs in circles."
        assert "nothing you can change lifts it" in found["hint"]
        assert refusal(await client.call_tool("run_python", {"code": "print(1)"})) == found
        assert not (await client.call_tool("list_workspace_files", {})).is_error
        command(directories, "resume", "--all")
        assert not (await client.call_tool("run_python", {"code": "print(1)"})).is_error


async def test_who_is_stopped_by_a_rule_reads_nothing_of_the_rule(directories: list[str], tmp_path: Path) -> None:
    """Not in the result, the next refusal, a notification, a record or a receipt; the operator has it all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOVEBOX_WORKSPACE", directories[1])
        command(directories, "canary", "plant", "--name", "bait.txt")
    logs = Logs()
    async with connected("stdio", "legacy", directories, logging_callback=logs) as client:
        with pytest.warns(MCPDeprecationWarning):
            await client.set_logging_level("debug")
        ended = await client.call_tool("read_workspace_file", {"path": "bait.txt"})
        refused = await client.call_tool("run_python", {"code": "print(1)"})
        assert refusal(ended) == refusal(refused)
        assert refusal(ended)["reason"] == "Stopped by the operator's rules."
        seen = [ended.model_dump_json(), refused.model_dump_json(), *map(str, logs.seen)]
        ids = [str((result.structured_content or {})["call_id"]) for result in (ended, refused)]
        seen += [str(await client.read_resource(f"audit://calls/{call_id}")) for call_id in ids]
        seen.append(str(await client.get_prompt("explain_call", {"call_id": ids[1]})))
        (content,) = (await client.read_resource(f"receipt://{ids[0]}")).contents
        assert isinstance(content, types.TextResourceContents)
        seen.append(base64.b64decode(json.loads(content.text)["payload"]).decode())
    assert len(logs.seen) > 2
    assert not [text for text in seen if "canary" in text.casefold() or "watch" in text.casefold()]
    assert "A watch rule (canary)" in command(directories, "stops", "list", "--json")
    shown = command(directories, "audit", "show", ids[0])
    assert "A watch rule (canary) found what it looks for." in " ".join(shown.split())
    assert "canary in arguments" in " ".join(shown.split())
