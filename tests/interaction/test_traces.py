"""The trace context that a client sends stands in the record of its call, whatever way it came."""

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.fixtures.audit_logs import log_lines
from tests.interaction.served import PAIRS, Era, Transport, served
from tests.interaction.test_refused_requests import post


@pytest.mark.parametrize(("transport", "era"), PAIRS)
async def test_the_trace_that_a_client_names_is_recorded(transport: Transport, era: Era, tmp_path: Path) -> None:
    """In ``_meta``; of one that is none nothing is."""
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    async with served(tmp_path, transport) as server, server.client(transport, era) as client:
        for said in ({"traceparent": parent, "tracestate": "a=b"}, {"traceparent": f"{parent}\n"}):
            meta: Any = said
            await client.call_tool("run_python", {"code": "1"}, meta=meta)
    decided = [json.loads(line)["data"] for line in log_lines(tmp_path / "audit")]
    decided = [each for each in decided if "effect" in each]
    assert (decided[0]["traceparent"], decided[0]["tracestate"]) == (parent, "a=b")
    assert "traceparent" not in decided[1]


async def test_a_trace_in_headers_is_recorded_too_and_two_of_them_are_none(tmp_path: Path) -> None:
    """What stands in ``_meta`` comes first."""
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    header, other = ("traceparent", parent), ("traceparent", parent.replace("4b", "5c"))
    async with served(tmp_path, "http") as server, httpx2.AsyncClient() as http:
        await post(server, http, "alice", {}, header, ("tracestate", "a=b"), ("tracestate", "c=d"))
        await post(server, http, "alice", {}, header, other)
        await post(server, http, "alice", {"traceparent": parent}, other)
    decided = [json.loads(line)["data"] for line in log_lines(tmp_path / "audit")]
    found = [(each.get("traceparent"), each.get("tracestate")) for each in decided if "effect" in each]
    assert found == [(parent, "a=b,c=d"), (None, None), (parent, None)]
