"""A backup while a server serves calls: the log in it verifies, and is a beginning of the server's own."""

import json
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from click.testing import CliRunner
from tests.fixtures.audit_logs import log_lines
from tests.interaction.served import Served, until
from tests.interaction.test_real_server import directories, over_http

from glovebox_audit.chain import parse
from glovebox_server.cli.main import main

__all__ = ["directories"]
pytestmark = [pytest.mark.driver("bubblewrap"), pytest.mark.usefixtures("runtime_dir")]
KEPT = "open('/output/a.txt', 'w').write('kept'); print(1)"


async def run(*words: object) -> tuple[int, dict[str, Any]]:
    """Call a command that prints JSON."""
    done = await anyio.to_thread.run_sync(CliRunner().invoke, main, [*map(str, words), "--json"])
    return done.exit_code, json.loads(done.stdout)


async def test_a_backup_of_a_server_that_serves_calls_verifies(directories: list[str], tmp_path: Path) -> None:
    """Each of several, with every artifact that its log has and is visible; the control has one changed byte."""
    state, log = tmp_path / "state", tmp_path / "state" / "audit"
    with over_http(directories, tmp_path) as (url, token):
        server = Served(app=None, tasks=None, url=url, tokens={"default": token})  # type: ignore[arg-type]
        async with server.client("http", "modern", "default") as one, server.client("http", "legacy", "default") as two:
            calls, over = 0, False

            async def work(client: Any) -> None:
                nonlocal calls
                while not over:
                    result = await client.call_tool("run_python", {"code": KEPT})
                    assert not result.is_error
                    calls += 1

            async with anyio.create_task_group() as tasks:
                for client in (one, one, two):
                    tasks.start_soon(work, client)
                for number in range(4):
                    before = calls
                    await until(lambda before=before: calls > before + 1, 60)  # type: ignore[misc]
                    code, told = await run("backup", tmp_path / f"file{number}", "--state-dir", state)
                    assert code == 0
                over = True
            assert (await run("restore", tmp_path / "file0", "--state-dir", state))[0] == 4  # it is live
    whole = b"".join(log_lines(log))
    for number in range(4):
        target = tmp_path / f"restored{number}"
        code, told = await run("restore", tmp_path / f"file{number}", "--state-dir", target)
        assert code == 0
        code, report = await run("audit", "verify", "--anchor", told["head"], "--state-dir", target)
        assert (code, report["ok"], report["gaps"]) == (0, True, 0)
        records = [parse(line) for line in log_lines(target / "audit")]
        end = next(n for n, each in enumerate(records) if f"{each.seq}:{each.hash}" == told["head"]) + 1
        assert whole.startswith(b"".join(each.line for each in records[:end]))
        kinds = [each.kind for each in records[end:]]
        assert kinds == ["call.lost"] * (len(kinds) - 1) + ["state.restored"]
        listed = (await run("artifact", "list", "--state-dir", target))[1]["artifacts"]
        recorded = {each.data["uri"] for each in records if each.kind == "artifact.collected"}
        assert {each["uri"] for each in listed} <= recorded
        assert listed
    bad = tmp_path / "bad"
    content = bytearray((tmp_path / "file0").read_bytes())
    content[content.index(b'"call.decided"') + 3] ^= 1
    bad.write_bytes(content)
    code, told = await run("restore", bad, "--state-dir", tmp_path / "none")
    assert (code, "is not as its manifest says" in told["error"]["message"]) == (4, True)
    assert not [*(tmp_path / "none").glob("*/*.jsonl")]
