"""Two tenants on one HTTP server: one runs away, spends its budget and is refused; the other notices nothing."""

import json
from pathlib import Path
from typing import Any

import anyio
import mcp_types as types
import pytest
from mcp import Client
from tests.fixtures.call_scenes import write_policy
from tests.interaction.served import whole_server

pytestmark = [pytest.mark.driver("bubblewrap"), pytest.mark.usefixtures("runtime_dir")]

A_DAY = '[[roles.everybody.budget]]\nname = "calls-a-day"\nper = "principal"\nevery = "day"\ncalls = 20\n'
A_RUN = '[[roles.everybody.budget]]\nname = "calls-of-a-run"\nper = "run"\nevery = "run"\ncalls = 18'
POLICY = write_policy('tools = ["run_python"]', A_DAY + A_RUN)


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """Return the options for a server with that policy."""
    tmp_path.chmod(0o755)
    (tmp_path / "policy.toml").write_text(POLICY)
    return ["--state-dir", str(tmp_path / "state"), "--policy", str(tmp_path / "policy.toml")]


async def _left(client: Client) -> dict[str, float]:
    (content,) = (await client.read_resource("glovebox://budget")).contents
    assert isinstance(content, types.TextResourceContents)
    return {each["budget"]: each["left"] for each in json.loads(content.text)["left"]}


async def _call(client: Client) -> dict[str, Any]:
    result = await client.call_tool("run_python", {"code": "print(1)"})
    found: dict[str, Any] = result.structured_content or {}
    return found


async def test_one_runs_away_and_is_refused_and_the_other_is_served(options: list[str]) -> None:
    """Sixty-four at once for a budget of eighteen; meanwhile the other's calls come through, and stay its own."""
    answers: list[dict[str, Any]] = []
    async with (
        whole_server(options, "http") as server,
        server.client("http", "legacy", "alice") as runaway,
        server.client("http", "legacy", "bob") as other,
        server.client("http", "legacy", "alice") as again,
    ):

        async def run_away() -> None:
            answers.append(await _call(runaway))

        async with anyio.create_task_group() as tasks:
            for _ in range(64):
                tasks.start_soon(run_away)
            for _ in range(10):
                assert not (await _call(other)).get("refused")
        refusals = [each["refused"] for each in answers if each.get("refused")]
        assert len(refusals) == 64 - 18
        assert {each["rule"] for each in refusals} == {"budget.calls-of-a-run"}
        assert "Left of the others: calls-a-day" in refusals[-1]["hint"]
        assert await _left(runaway) == {"calls-a-day": 2, "calls-of-a-run": 0}
        assert await _left(other) == {"calls-a-day": 10, "calls-of-a-run": 8}
        # A new session is a new run, and has nothing of its principal's budget anew.
        assert await _left(again) == {"calls-a-day": 2, "calls-of-a-run": 18}
        rules = [(found := (await _call(again)).get("refused")) and found["rule"] for _ in range(3)]
        assert rules == [None, None, "budget.calls-a-day"]
