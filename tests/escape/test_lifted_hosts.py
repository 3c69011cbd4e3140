"""A host that somebody lifts is reached by the same way as any other: resolved, checked, recorded (E1, E8)."""

from pathlib import Path

import pytest
from tests.fixtures.brokered import Called, Glovebox, glovebox, profile
from tests.fixtures.internet import METADATA, OTHER, PRIVATE, SITE, Cable, answering, internet, ok, redirect, wires

from glovebox_profiles.policy.model import Reach
from glovebox_server.guards.approvals import store
from glovebox_server.guards.approvals.approvals import Approvals
from glovebox_server.guards.approvals.question import ApprovalAnswer
from glovebox_server.guards.approvals.store import Standing
from glovebox_server.guards.budgets.spending import read_clocks

__all__ = ["wires"]

pytestmark = pytest.mark.driver("bubblewrap")

LISTED, LIFTED = "docs.example.org", "other.example.net"
HTML = ok(b"<html><body><p>Hello</p></body></html>", "Content-Type: text/html")
RULE = f'{{ host = "{LISTED}" }}'
POLICY = """\
version = 1
default = "reader"
[roles.reader]
tools = ["fetch_url", "run_python"]
"""
EXAMPLE = """
[[example]]
principal = "token:anybody"
call = { tool = "read_workspace_file", arguments = { nothing = 1 } }
expect = "deny"
"""
LIFT = '[[roles.reader.lift]]\nwhat = "host"\n'
TOOL = '[[roles.reader.lift]]\nwhat = "tool"\n'
PROGRAM = f"""\
import urllib.request
try:
    with urllib.request.urlopen('http://{LIFTED}/', timeout=10) as a:
        print(a.status)
except Exception as problem:
    print(problem)
"""


def _pending(box: Glovebox) -> list[Standing]:
    with store.opened(box.app.settings.state_dir) as database:
        return database.query_now(lambda db: store.Questions(db, read_clocks()).standings(("pending",)))


async def _allow(box: Glovebox, reach: Reach = "call", *, lifted: str | None = None) -> str:
    """Say yes to the one question that waits, or to the one that lifts this."""
    (standing,) = [each for each in _pending(box) if lifted in (None, each.question.subject.lifted or "")]
    question, approvals = standing.question, box.app.guards.approvals
    assert isinstance(approvals, Approvals)
    given = ApprovalAnswer(allow=True, by="local:0", channel="operator", reach=reach, digest=question.digest)
    assert (await approvals.answer(question.id, given)).state == "allowed"
    return question.id


def _refused(called: Called) -> str:
    rule: str = called.fields["refused"]["rule"]
    return rule


async def test_a_host_outside_the_list_becomes_a_question_and_the_yes_lifts_it_once(
    wires: Cable, tmp_path: Path
) -> None:
    """For that host and port alone; the grant is on record with the call, and used up by it."""
    (tmp_path / "policy.toml").write_text(POLICY + LIFT + EXAMPLE)
    async with internet(wires) as net, glovebox(net, tmp_path, profile("fetch_url", "bubblewrap", RULE)) as box:
        net.zone |= {LIFTED: [[OTHER]], LISTED: [[SITE]]}
        await net.serve(OTHER, 443, answering(HTML), name=LIFTED)
        asked = await box.call("fetch_url", url=f"https://{LIFTED}/a")
        assert _refused(asked) == "approval.pending"
        assert asked.kinds == ["call.decided"]
        assert f"https://{LIFTED}:443" in asked.text
        assert net.lookups == []
        identifier = await _allow(box)
        other_path = await box.call("fetch_url", url=f"https://{LIFTED}/b")
        assert _refused(other_path) == "approval.pending"
        reached = await box.call("fetch_url", url=f"https://{LIFTED}/a")
        assert reached.egress == [("allow", "network.allow[1]", OTHER)]
        decided = reached.records[0].data
        assert decided["approval"] == identifier
        assert decided["grants"] == [f"host:https://{LIFTED}:443 ({identifier})"]
        assert _refused(await box.call("fetch_url", url=f"https://{LIFTED}/a")) == "approval.pending"


async def test_a_grant_for_the_run_is_for_that_host_and_port_until_it_is_revoked(wires: Cable, tmp_path: Path) -> None:
    """Another path passes; another port, another host, and a redirect elsewhere do not."""
    (tmp_path / "policy.toml").write_text(POLICY + LIFT + EXAMPLE)
    text = profile("fetch_url", "bubblewrap", RULE, max_redirects=2, max_connections=8)
    async with internet(wires) as net, glovebox(net, tmp_path, text) as box:
        net.zone |= {LIFTED: [[OTHER]], "third.example.net": [[SITE]]}
        await net.serve(OTHER, 443, answering(HTML), name=LIFTED)
        await box.call("fetch_url", url=f"https://{LIFTED}/a")
        identifier = await _allow(box, "run")
        for path in ("/a", "/b"):
            called = await box.call("fetch_url", url=f"https://{LIFTED}{path}")
            assert called.egress == [("allow", "network.allow[1]", OTHER)]
            assert called.records[0].data["grants"] == [f"host:https://{LIFTED}:443 ({identifier})"]
            assert called.records[0].data["rule"] == "lift.host"
        for url in (f"https://{LIFTED}:444/a", "https://third.example.net/", f"http://{LIFTED}/a"):
            assert _refused(await box.call("fetch_url", url=url)) == "approval.pending"
        approvals = box.app.guards.approvals
        assert isinstance(approvals, Approvals)
        await approvals.withdraw(identifier, "local:0")
        assert _refused(await box.call("fetch_url", url=f"https://{LIFTED}/a")) == "approval.pending"


async def test_a_redirect_from_a_lifted_host_is_decided_anew(wires: Cable, tmp_path: Path) -> None:
    """The grant goes no further than its host."""
    (tmp_path / "policy.toml").write_text(POLICY + LIFT + EXAMPLE)
    text = profile("fetch_url", "bubblewrap", RULE, max_redirects=2, max_connections=8)
    async with internet(wires) as net, glovebox(net, tmp_path, text) as box:
        net.zone |= {LIFTED: [[OTHER]], "third.example.net": [[SITE]]}
        await net.serve(OTHER, 443, answering(redirect("https://third.example.net/")), name=LIFTED)
        await box.call("fetch_url", url=f"https://{LIFTED}/a")
        await _allow(box)
        called = await box.call("fetch_url", url=f"https://{LIFTED}/a")
        assert called.fields["error"]["kind"] == "egress.host"


@pytest.mark.parametrize("address", [PRIVATE, METADATA])
async def test_an_address_that_is_not_public_stays_refused_whoever_says_yes(
    address: str, wires: Cable, tmp_path: Path
) -> None:
    """By name only the gate can see it, and does; by number nobody is even asked. The control is the test above."""
    (tmp_path / "policy.toml").write_text(POLICY + LIFT + EXAMPLE)
    async with internet(wires) as net, glovebox(net, tmp_path, profile("fetch_url", "bubblewrap", RULE)) as box:
        net.zone |= {LIFTED: [[address]]}
        await box.call("fetch_url", url=f"https://{LIFTED}/a")
        await _allow(box, "run")
        called = await box.call("fetch_url", url=f"https://{LIFTED}/a")
        assert called.fields["error"]["kind"] == "egress.address"
        assert called.egress == [("deny", "egress.address", address)]
        for url in (f"http://{address}/", f"https://{address}/"):
            assert _refused(await box.call("fetch_url", url=url)) == "network.allow"
        assert _pending(box) == []


async def test_what_the_policy_does_not_lift_stays_a_refusal(wires: Cable, tmp_path: Path) -> None:
    """A host, a method, a path and a tool; nobody is asked."""
    (tmp_path / "policy.toml").write_text(POLICY.replace(', "run_python"', "") + EXAMPLE)
    async with internet(wires) as net, glovebox(net, tmp_path, profile("fetch_url", "bubblewrap", RULE)) as box:
        assert _refused(await box.call("fetch_url", url=f"https://{LIFTED}/a")) == "network.allow"
        assert _refused(await box.call("run_python", code="print(1)")) == "role.tools"
        assert not store.path(box.app.settings.state_dir).exists()


async def test_only_the_host_is_lifted_of_what_a_rule_refuses(wires: Cable, tmp_path: Path) -> None:
    """A path that the host's own rule refuses is no question, nor is an address that cannot be read."""
    (tmp_path / "policy.toml").write_text(POLICY + LIFT + EXAMPLE)
    rule = f'{{ host = "{LISTED}", paths = ["/open/*"] }}'
    async with internet(wires) as net, glovebox(net, tmp_path, profile("fetch_url", "bubblewrap", rule)) as box:
        for url in (f"https://{LISTED}/closed", f"https://{LISTED}:444/open/a", "https://0x7f000001/", "ftp://a.b/"):
            assert _refused(await box.call("fetch_url", url=url)) == "network.allow"
        assert _pending(box) == []


async def test_a_tool_outside_the_role_becomes_a_question(wires: Cable, tmp_path: Path) -> None:
    """A yes lets this program run, once; another is another question."""
    (tmp_path / "policy.toml").write_text(POLICY.replace(', "run_python"', "") + TOOL + EXAMPLE)
    async with internet(wires) as net, glovebox(net, tmp_path, profile("run_python", "bubblewrap")) as box:
        assert _refused(await box.call("run_python", code="print(1)")) == "approval.pending"
        identifier = await _allow(box)
        assert _refused(await box.call("run_python", code="print(2)")) == "approval.pending"
        ran = await box.call("run_python", code="print(1)")
        assert ran.stdout == "1\n"
        assert ran.records[0].data["grants"] == [f"tool:run_python ({identifier})"]
        assert _refused(await box.call("run_python", code="print(1)")) == "approval.pending"


async def test_a_program_reaches_a_host_that_was_granted_to_its_run(wires: Cable, tmp_path: Path) -> None:
    """Its own way out is widened by that host alone; before it is refused there."""
    (tmp_path / "policy.toml").write_text(POLICY + LIFT + EXAMPLE)
    text = profile("run_python", "bubblewrap", f'{{ host = "{LISTED}", schemes = ["http"] }}')
    async with internet(wires) as net, glovebox(net, tmp_path, text) as box:
        net.zone |= {LIFTED: [[OTHER]]}
        await net.serve(OTHER, 80, answering(HTML))
        refused = await box.call("run_python", code=PROGRAM)
        assert refused.egress == [("deny", "egress.host", None)]
        assert f"http://{LIFTED}:80" in refused.text
        await _allow(box)
        reached = await box.call("run_python", code=PROGRAM)
        assert reached.stdout == "200\n"
        assert reached.egress == [("allow", "network.allow[1]", OTHER)]
        again = await box.call("run_python", code=PROGRAM)
        assert again.egress == [("deny", "egress.host", None)]


async def test_a_host_of_inspected_tls_is_asked_about_and_not_one_of_a_tunnel(wires: Cable, tmp_path: Path) -> None:
    """The grant is for requests, which the broker makes; without inspected TLS nobody is asked (control)."""
    (tmp_path / "policy.toml").write_text(POLICY + LIFT + EXAMPLE)
    program = PROGRAM.replace("http://", "https://")
    text = profile("run_python", "bubblewrap", RULE, tls="inspect")
    async with internet(wires) as net, glovebox(net, tmp_path, text) as box:
        net.zone |= {LIFTED: [[OTHER]]}
        await net.serve(OTHER, 443, answering(HTML), name=LIFTED)
        refused = await box.call("run_python", code=program)
        assert refused.egress == [("deny", "egress.host", None)]
        assert f"https://{LIFTED}:443" in refused.text
        await _allow(box)
        reached = await box.call("run_python", code=program)
        assert reached.stdout == "200\n"
        assert [each.data["method"] for each in reached.records if each.kind == "egress.decided"] == ["GET"]
    own = tmp_path / "own"
    own.mkdir()
    (own / "policy.toml").write_text(POLICY + LIFT + EXAMPLE)
    async with internet(wires) as net, glovebox(net, own, profile("run_python", "bubblewrap", RULE)) as box:
        refused = await box.call("run_python", code=program)
        assert refused.egress == [("deny", "egress.host", None)]
        assert _pending(box) == []


@pytest.mark.parametrize("host_first", [True, False])
@pytest.mark.parametrize("reach", ["call", "run"])
async def test_a_program_that_is_asked_about_reaches_the_host_that_was_granted(
    reach: Reach, wires: Cable, tmp_path: Path, *, host_first: bool
) -> None:
    """In whichever order both were allowed; the control is the same program with its own yes alone, before and after.

    A grant for one call is used up by it, and one for the run stays until it is revoked.
    """
    rule = '[[roles.reader.approval]]\nname = "programs"\ntool = "run_python"\nby = "operator"\n'
    (tmp_path / "policy.toml").write_text(POLICY + LIFT + rule + EXAMPLE)
    text = profile("run_python", "bubblewrap", f'{{ host = "{LISTED}", schemes = ["http"] }}')
    async with internet(wires) as net, glovebox(net, tmp_path, text) as box:
        net.zone |= {LIFTED: [[OTHER]]}
        await net.serve(OTHER, 80, answering(HTML))
        assert _refused(await box.call("run_python", code=PROGRAM)) == "approval.pending"
        await _allow(box)
        control = await box.call("run_python", code=PROGRAM)
        assert control.egress == [("deny", "egress.host", None)]
        if host_first:
            grant = await _allow(box, reach)
            assert _refused(await box.call("run_python", code=PROGRAM)) == "approval.pending"
            (asked,) = _pending(box)
            assert LIFTED in asked.question.profile
            yes = await _allow(box)
        else:
            assert _refused(await box.call("run_python", code=PROGRAM)) == "approval.pending"
            (waiting,) = [each for each in _pending(box) if each.question.subject.lifted is None]
            assert LIFTED not in waiting.question.profile
            yes = await _allow(box, lifted="")
            grant = await _allow(box, reach, lifted="host")
        reached = await box.call("run_python", code=PROGRAM)
        assert (reached.stdout, reached.egress) == ("200\n", [("allow", "network.allow[1]", OTHER)])
        decided = reached.records[0].data
        assert (decided["rule"], decided["approval"]) == ("approval.programs", yes)
        assert decided["grants"] == [f"host:http://{LIFTED}:80 ({grant})"]
        await box.call("run_python", code=PROGRAM)
        await _allow(box)
        once_more = await box.call("run_python", code=PROGRAM)
        assert once_more.stdout.startswith("200" if reach == "run" else "HTTP Error 403")
