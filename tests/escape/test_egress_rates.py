"""Rates and budgets of connections, on real calls on a private internet: counted where connections are decided."""

from pathlib import Path

import pytest
from tests.fixtures.brokered import glovebox, profile
from tests.fixtures.call_scenes import write_policy
from tests.fixtures.internet import OTHER, PRIVATE, SITE, Cable, answering, internet, ok, wires

__all__ = ["wires"]

pytestmark = pytest.mark.driver("bubblewrap")
NAME = "docs.example.org"
PAGE = ok(b"<html><body>Hello</body></html>", "Content-Type: text/html")
RATE = '[[roles.everybody.rate]]\nhost = "*.example.org"\nconnections = 2\nevery = "day"\n'
BUDGET = '[[roles.everybody.budget]]\nname = "connections-a-day"\nper = "principal"\nevery = "day"\nconnections = 4'
POLICY = write_policy('tools = ["fetch_url"]', RATE + BUDGET)


async def test_a_host_beyond_its_rate_is_refused_and_another_is_not(wires: Cable, tmp_path: Path) -> None:
    """E11: the third connection is not dialled, and is on record; what was refused spends nothing."""
    (tmp_path / "policy.toml").write_text(POLICY)
    text = profile("fetch_url", "bubblewrap", '{ host = "*.example.org" }', '{ host = "example.net" }')
    async with internet(wires) as net, glovebox(net, tmp_path, text) as box:
        net.zone |= {NAME: [[SITE]], "inside.example.org": [[PRIVATE]], "example.net": [[OTHER]]}
        await net.serve(SITE, 443, answering(PAGE), name=NAME)
        await net.serve(OTHER, 443, answering(PAGE), name="example.net")
        private = await box.call("fetch_url", url="https://inside.example.org/")
        pages = [await box.call("fetch_url", url=f"https://{NAME}/{number}") for number in range(4)]
        others = [await box.call("fetch_url", url="https://example.net/") for _ in range(3)]
    assert private.egress[0][1] == "egress.address"
    assert [each.egress[0][:2] for each in pages] == [
        ("allow", "network.allow[0]"), ("allow", "network.allow[0]"), ("deny", "egress.rate"), ("deny", "egress.rate")
    ]  # fmt: skip
    error = pages[2].fields["error"]
    assert error["kind"] == "egress.rate"
    assert "*.example.org every day 0 of 2 connections are left" in error["message"]
    assert [each.egress[0][0] for each in others[:2]] == ["allow", "allow"]
    # Four connections were made by now: the next call that could make one does not start.
    refused = others[2].fields["refused"]
    assert refused["rule"] == "budget.connections-a-day"
    assert "0 of 4 connections" in refused["reason"]
