"""People at real clients of the era before, who answer when their call has been told to try again already."""

from pathlib import Path
from typing import Any

import anyio
import mcp_types as types
import pytest
from tests.interaction.served import Transport, connected, until
from tests.interaction.test_asking import CODE, kinds, options

from glovebox_server.guards.approvals import approvals

__all__ = ["options"]

pytestmark = [pytest.mark.driver("bubblewrap"), pytest.mark.usefixtures("runtime_dir")]

SECONDS = 30.0


@pytest.mark.parametrize("transport", ["stdio", "http", "sse"])
async def test_a_yes_that_comes_late_is_there_for_the_retry(
    transport: Transport, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked once, answered after the refusal, and run by the same call once; a client may go while a form is open."""
    monkeypatch.setattr(approvals, "WAIT_SECONDS", 0.5)
    asked: list[str] = []
    may_answer = anyio.Event()

    async def ponder(_context: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        asked.append(params.message)
        await may_answer.wait()
        return types.ElicitResult(action="accept", content={"answer": "allow"})

    async with connected(transport, "legacy", options, elicitation_callback=ponder) as client:
        for _ in range(2):
            refused = (await client.call_tool("run_python", {"code": CODE})).structured_content or {}
            assert refused["refused"]["rule"] == "approval.pending"
        assert len(asked) == 1
        assert "approval.answered" not in kinds(tmp_path)
        may_answer.set()
        await until(lambda: "approval.answered" in kinds(tmp_path), SECONDS)
        ran = (await client.call_tool("run_python", {"code": CODE})).structured_content or {}
        assert ran["stdout"]["text"] == "42\n"
        assert len(asked) == 1
        may_answer = anyio.Event()
        refused = (await client.call_tool("run_python", {"code": CODE})).structured_content or {}
        assert refused["refused"]["rule"] == "approval.pending"
        assert len(asked) == 2
    assert kinds(tmp_path).count("call.finished") == 1
    assert kinds(tmp_path).count("approval.answered") == 1
