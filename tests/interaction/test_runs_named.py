"""Every record, receipt, artifact, result and refusal of a call names its run: with real clients, in every era."""

import base64
import json
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from tests.fixtures.audit_logs import log_lines
from tests.interaction.served import PAIRS, Era, Transport, connected

from glovebox_server.mcp.delivery import CALL_META_KEY
from glovebox_server.mcp.server import RUN_META_KEY

pytestmark = [pytest.mark.driver("bubblewrap"), pytest.mark.usefixtures("runtime_dir")]

WHOSE = ("principal", "client", "run", "workflow")


def of(data: Any) -> dict[str, Any]:
    """Whose something says that it is."""
    return {name: data[name] for name in WHOSE}


@pytest.mark.parametrize(("transport", "era"), PAIRS)
async def test_all_that_is_said_of_a_call_names_its_run(transport: Transport, era: Era, tmp_path: Path) -> None:
    """One connection is one run, and the server's workflow is all its calls'."""
    tmp_path.chmod(0o755)
    (tmp_path / "workspace").mkdir()
    options = ["--workspace", str(tmp_path / "workspace"), "--state-dir", str(tmp_path / "state"),
               "--workflow", "release"]  # fmt: skip
    async with connected(transport, era, options) as client:
        ran = await client.call_tool("run_python", {"code": "open('/output/a.txt', 'w').write('kept')"})
        handle = (ran.meta or {}).get(RUN_META_KEY)
        assert (handle is not None) == (transport != "stdio" and era == "modern")
        meta: Any = None if handle is None else {RUN_META_KEY: handle}
        refused = await client.call_tool("fetch_url", {"url": "http://169.254.169.254/"}, meta=meta)
        wrong = await client.call_tool("run_python", {"code": 7}, meta=meta)
        (link,) = [block for block in ran.content if isinstance(block, types.ResourceLink)]
        artifact = (await client.read_resource(link.uri)).contents[0]
        call_id = (ran.structured_content or {})["call_id"]
        receipt = (await client.read_resource(f"receipt://{call_id}")).contents[0]
    assert isinstance(receipt, types.TextResourceContents)
    statement = json.loads(base64.b64decode(json.loads(receipt.text)["payload"]))
    whose = of((ran.meta or {})[CALL_META_KEY])
    assert whose["run"].startswith("r_")
    assert whose["workflow"] == "release"
    assert handle is None or handle.partition(".")[0] == whose["run"]
    for said in (refused.meta, wrong.meta, artifact.meta):
        assert of((said or {})[CALL_META_KEY]) == whose
    assert of(statement["predicate"]["call"]) == whose
    records = [json.loads(line) for line in log_lines(tmp_path / "state" / "audit")]
    of_calls = [each for each in records if each.get("call_id")]
    assert {each["kind"] for each in of_calls} >= {"call.decided", "artifact.collected", "receipt.signed"}
    assert all(of(each["data"]) == whose for each in of_calls)
    # The last counts of requests that became no call are written before the server's own last record.
    kinds = [each["kind"] for each in records]
    assert kinds.index("requests.refused") < kinds.index("server.stopped")
    counts = [row for each in records if each["kind"] == "requests.refused" for row in each["data"]["refused"]]
    assert counts == [{"principal": whose["principal"], "rule": "arguments", "count": 1}]
    (stored,) = (tmp_path / "state" / "artifacts" / "items").rglob("*.json")
    assert json.loads(stored.read_text())["run"] == whose["run"]
