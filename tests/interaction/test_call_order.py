"""Hold the order in which policy acts on a call, by its result, log and files.

These tests name no part between ``app.broker.submit`` and the sandbox, so that those parts can be replaced. Each
docstring begins with the numbers of the rows that it holds:

 1 Output is watched before it is masked.            7 A proposal is scanned, asked about, and made whole.
 2 Secrets are masked wherever they would be kept.   8 Hosts refused during a run become questions after it.
 3 A call has one decision and one end.              9 Sandboxes are prepared without a call.
 4 Denials are recorded; what is no call is not.    10 Files are there with their call's records, or not at all.
 5 A stop ends a call wherever it is.               11 What came of a call is known before its last record.
 6 A yes widens what the call may do.               12 A connection is decided step by step.
"""

import ast
import base64
import os
import re
from pathlib import Path
from typing import Final

import anyio
import pytest
from tests.fixtures.brokered import glovebox, profile
from tests.fixtures.call_scenes import (
    DENIED,
    ENDLESS,
    FILES,
    GET,
    RUN,
    WHO,
    CallEnding,
    CallScene,
    SignallingCaller,
    await_record,
    open_proposing,
    open_scene,
    open_slowed,
    write_credential,
    write_policy,
    write_profile,
)
from tests.fixtures.internet import OTHER, SITE, Cable, answering, internet, ok, redirect, wires

from glovebox_audit.chain import new_call_id
from glovebox_server.calls import Principal
from glovebox_server.guards.stops import stops

__all__ = ["wires"]

pytestmark = [pytest.mark.driver("bubblewrap"), pytest.mark.usefixtures("runtime_dir")]

HELD_ELSEWHERE: Final = {
    2: (
        "tests/escape/test_redacted_secrets.py::test_a_secret_in_output_is_replaced_and_counted",
        "tests/escape/test_redacted_secrets.py::test_a_file_with_a_secret_in_its_name_is_refused",
        "tests/escape/test_redacted_secrets.py::test_names_of_changed_files_hold_none_either",
        "tests/escape/test_redacted_secrets.py::test_arguments_that_are_kept_hold_none_either",
        "tests/escape/test_redacted_secrets.py::test_arguments_that_are_sealed_show_none_and_are_whole_for_who_has_the_key",
    ),
    3: (
        "tests/escape/test_lifecycle.py::test_cancel_kills_the_sandbox_within_a_second",
        "tests/escape/test_lifecycle.py::test_sigterm_of_a_server_ends_its_calls",
        "tests/escape/test_lifecycle.py::test_sigkill_of_the_server_in_mid_call",
    ),
    4: ("tests/interaction/test_refused_requests.py::test_what_a_client_gets_wrong_is_counted_on_every_way_in",),
    5: (
        "tests/escape/test_stopped_calls.py::test_a_stopped_run_ends_and_no_other_does",
        "tests/interaction/test_stopped_clients.py::test_a_stop_ends_the_call_that_runs_and_refuses_the_next",
    ),
    6: (
        "tests/interaction/test_asking.py::test_who_cannot_be_asked_is_told_to_try_again_and_finds_the_yes",
        "tests/interaction/test_asking_waits.py::test_who_waits_hears_what_for_and_holds_no_turn",
    ),
    7: (
        "tests/interaction/test_proposed_changes.py::test_what_acts_in_a_proposed_file_is_asked_about_with_it",
        "tests/interaction/test_proposed_changes.py::test_looking_into_a_proposed_file_is_charged_to_whoever_proposes",
        "tests/interaction/test_proposed_changes.py::test_what_changes_between_question_and_yes_is_left_alone",
    ),
    10: (
        "tests/interaction/test_findings.py::test_what_acts_in_a_file_is_told_with_the_result",
        "tests/escape/test_placeholders.py::test_a_helper_is_started_for_a_decision_that_is_on_disk",
    ),
    12: (
        "tests/escape/test_egress_end_to_end.py::test_redirects_are_reported_and_each_is_decided",
        "tests/escape/test_egress_end_to_end.py::test_what_no_rule_names_starts_nothing",
        "tests/escape/test_egress_end_to_end.py::test_a_connection_without_its_record_is_not_made",
        "tests/escape/test_egress_network.py::test_a_call_has_only_so_many_connections_and_records",
        "tests/escape/test_egress_rates.py::test_a_host_beyond_its_rate_is_refused_and_another_is_not",
    ),
}
"""Tests that hold a row, or a part of it, without the parts that will be replaced. They are not repeated here."""

NOT_SO_TODAY: Final = {
    4: "A call that a secret file ends is recorded, and over MCP it is also counted as a request that was no call.",
    10: "Files are published before the scan: a call that is stopped during the scan leaves them to its caller.",
    11: "The note that little is left of a budget is added after the result is charged.",
    12: "Stray placeholders are searched for before the rules, so a request to a refused host raises the alarm too.",
}
"""Where the planned chain differs from what the code does; the tests here hold what it does."""

PRINTED = "print('begin', flush=True)\nprint('ghp' + '_' + '0aB1cD2eF3' * 3 + 'abcdef')"
KEY = "q7Zk2mX9vB4tR8wLp3Ns"
LISTED, BESIDE, ELSEWHERE = "docs.example.org", "beside.example.org", "other.example.net"
HTTP = f'{{ host = "{LISTED}", schemes = ["http"] }}'
PAGE = ok(b"<html><body><p>Hello</p></body></html>", "Content-Type: text/html")


@pytest.fixture(autouse=True)
def look_out_of_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for stops out of step with anyio's wait for blocked tasks, which never ends while both wake together."""
    monkeypatch.setattr(stops, "LOOK_SECONDS", 0.03)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_a_canary_inside_a_secret_is_seen_before_it_is_masked(stream: str, tmp_path: Path) -> None:
    """1: a masked private key hides no canary, in live output or in the rest."""
    read = "import sys\nprint('begin', flush=True)\nbody = open('/workspace/{}').read().strip().rpartition('=')[2]\n"
    code = f"{read}sys.{stream}.write('-----BEGIN PRIVATE KEY-----\\n' + body + '\\n-----END PRIVATE KEY-----\\n')"
    caller, other = SignallingCaller(), SignallingCaller()
    async with open_scene(tmp_path, write_profile()) as scene:
        marker = await scene.plant()
        (tmp_path / "workspace" / "plain.txt").write_text(f"TOKEN={marker[::2] * 2}\n")
        control = await scene.call(other, code=code.format("plain.txt"))
        stopped = await scene.call(caller, code=code.format("deploy-credentials.env"))
    assert "[secret: private key]" in control.fields[stream]["text"]
    assert ("[the rest is shown" in other.text) is (stream == "stdout")
    assert (stopped.rule, stopped.end.kind, marker in stopped.shown) == ("stop", "call.cancelled", False)
    assert caller.text in ("", "begin\n")


@pytest.mark.parametrize("action", ["record", "stop"])
async def test_a_rule_for_secrets_sees_what_its_caller_gets_masked(action: str, tmp_path: Path) -> None:
    """1: output raises the alarm; where that stops the run, nothing is shown live."""
    rule, caller = write_policy('tools = ["run_python"]', f'[watch]\nsecrets = "{action}"'), SignallingCaller()
    async with open_scene(tmp_path, write_profile(), policy=rule) as scene:
        ending = await scene.call(caller, code=PRINTED)
        (alarm,) = scene.find_data("watch.alarm")
    assert (alarm["rule"], alarm["where"], alarm["call"]) == ("secrets", "stdout", ending.end.call_id)
    if action == "stop":
        assert (ending.rule, ending.end.data["by"], caller.text) == ("stop", "stop", "")
    else:
        assert ending.fields["stdout"]["text"] == caller.text == "begin\n[secret: GitHub token]\n"


async def test_a_key_that_was_lent_is_masked_wherever_it_would_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2: also in records and the receipt; control: a role without that key."""
    monkeypatch.setenv("LENT", KEY)
    more = '[audit]\nkeep = ["arguments", "stdout", "stderr", "value"]\n' + write_credential(LISTED, 'env = "KEY"')
    roles = write_policy('tools = ["run_python", "read_workspace_file"]', '[roles.b]\ntools = ["read_workspace_file"]')
    async with open_scene(tmp_path, write_profile(f'{{ host = "{LISTED}" }}', more=more), policy=roles) as scene:
        (tmp_path / "workspace" / "notes.txt").write_text(f"key {KEY}\n")
        await scene.call(code="import os\nlen(os.environ['KEY'])")
        code = f"open('/output/{KEY}.txt', 'w').write('1')\nprint({KEY!r}, flush=True)\nraise ValueError({KEY!r})"
        masked = await scene.call(code=code)
        read = await scene.call(tool="read_workspace_file", path="notes.txt")
        control = await scene.call(tool="read_workspace_file", path="notes.txt", roles=("b",))
    assert masked.records[0].data["redacted"] == {"credential of the server": 3}
    assert KEY not in masked.shown + read.shown + str([record.data for record in masked.records])
    (receipt,) = masked.find_data("receipt.signed")
    assert KEY not in base64.b64decode(receipt["envelope"]["payload"]).decode()
    assert (masked.fields["artifacts"], KEY in control.shown) == ([], True)


async def test_a_secret_file_that_appears_ends_a_call_once(tmp_path: Path) -> None:
    """3: no second decision is recorded; control: a file with another name."""
    code, caller = f"import os\nwhile not os.path.exists('plain.txt'): pass\n{ENDLESS}", SignallingCaller()
    async with open_scene(tmp_path, write_profile()) as scene, scene.submit_beside(caller, code=code) as endings:
        await caller.told.wait()
        (tmp_path / "workspace" / "plain.txt").write_text("x")
        await caller.begun.wait()
        (tmp_path / "workspace" / ".env").write_text("KEY=1")
    assert (endings[0].rule, endings[0].end.kind) == ("workspace.secret", "call.failed")
    assert endings[0].records[0].data["effect"] == "allow"


async def test_the_end_of_a_cancelled_call_says_who_cancelled_it(tmp_path: Path) -> None:
    """3: the record and the receipt are written although the call is cancelled."""
    async with open_scene(tmp_path, write_profile()) as scene:
        for word in ("client", "stream closed", "token removed", "server stopping"):
            caller, call_id = SignallingCaller(leaves=word), new_call_id()
            async with scene.submit_beside(caller, cancel=True, call_id=call_id, code=ENDLESS):
                await caller.begun.wait()
            ending = CallEnding(records=scene.read_records(call_id))
            assert (ending.end.kind, ending.end.data["by"]) == ("call.cancelled", word)
            assert ending.kinds[-1] == "receipt.signed"


async def test_a_denial_is_recorded_each_time_and_what_is_no_call_is_not(tmp_path: Path) -> None:
    """4: a denial is a result; an invalid request is raised and leaves no record."""
    async with open_scene(tmp_path, write_profile()) as scene:
        denied = [await scene.call(**DENIED) for _ in range(2)]
        before = scene.list_kinds()
        others = [await scene.call(tool="rm"), await scene.call(code=7)]
        assert scene.list_kinds() == before
    assert [(ending.rule, ending.kinds) for ending in denied] == [("limits.wall_seconds", ["call.decided"])] * 2
    assert all(ending.result is not None and ending.result.failed for ending in denied)
    assert [(ending.rule, ending.result) for ending in others] == [("unknown tool", None), ("invalid", None)]


async def test_a_stop_ends_a_call_that_runs_and_one_that_waits_for_a_turn(tmp_path: Path) -> None:
    """3, 5: the waiting call ends first; each last record names its own stop."""
    policy, caller = write_policy('tools = ["run_python"]\nturns = 1'), SignallingCaller()
    waiting = list[CallEnding]()
    async with open_scene(tmp_path, write_profile(), policy=policy) as scene:

        async def ready() -> None:
            await caller.begun.wait()
            waiting.append(await scene.stop(anyio.wait_all_tasks_blocked, code="1"))

        running = await scene.stop(ready, caller, code=ENDLESS)
    assert waiting[0].kinds == ["call.decided"]
    assert running.kinds == ["call.decided", "sandbox.started", "call.cancelled", "receipt.signed"]


async def test_a_stop_ends_a_call_that_is_delayed(tmp_path: Path) -> None:
    """5: an earlier call, which is denied after its delay, is still delayed then."""
    async with open_slowed(tmp_path) as scene, scene.submit_beside(cancel=True, **DENIED) as endings:
        await anyio.wait_all_tasks_blocked()
        ending = await scene.stop(anyio.wait_all_tasks_blocked, code="1")
        assert endings == []
    assert ending.kinds == ["call.decided"]


async def test_delayed_calls_count_to_the_most_of_a_principal(tmp_path: Path) -> None:
    """4, 5: call 257 is refused and not recorded; control: another principal."""
    async with open_slowed(tmp_path) as scene:
        async with anyio.create_task_group() as tasks:
            for number in range(256):
                tasks.start_soon(lambda code: scene.call(code=code), str(number))
            await anyio.wait_all_tasks_blocked()
            busy = await scene.call(code="256")
            control = await scene.call(**DENIED, principal="local:1001", run="r_" + "1" * 26)
            tasks.cancel_scope.cancel()
        assert [data["effect"] for data in scene.find_data("call.decided")] == ["deny"] * 11
    assert (busy.rule, busy.result, busy.records) == ("busy.calls", None, [])
    assert control.rule == "limits.wall_seconds"


async def test_a_stop_ends_a_call_that_waits_for_a_person(tmp_path: Path) -> None:
    """5: its question is withdrawn."""
    policy = write_policy('tools = ["run_python"]\napproval = [{ name = "programs", by = "operator" }]')
    caller = SignallingCaller(patient=True)
    async with open_scene(tmp_path, write_profile(), policy=policy) as scene, scene.app.audit.subscribe() as log:
        ending = await scene.stop(lambda: await_record(log, "approval.requested"), caller, code="1")
        assert "approval.withdrawn" in scene.list_kinds()
    assert ending.kinds == ["call.decided"]


async def test_a_stop_ends_a_call_whose_files_are_scanned(tmp_path: Path) -> None:
    """3, 5, 10: its caller can read only the files that its last record names."""
    async with open_scene(tmp_path, write_profile(files="scan = true")) as scene, scene.app.audit.subscribe() as log:
        ending = await scene.stop(lambda: await_record(log, "sandbox.started", 2), code=FILES)
        readable = await scene.list_readable(ending)
    assert len(ending.find_data("artifact.collected")) == 16
    assert readable == list(ending.end.data.get("published", ()))


async def test_a_stop_ends_a_proposal_that_is_looked_into(tmp_path: Path) -> None:
    """5, 7: nobody is asked, although its caller would wait for the answer."""
    caller = SignallingCaller(patient=True)
    async with open_proposing(tmp_path, files=16) as (scene, proposal):
        ending = await scene.stop(caller.told.wait, caller, **proposal)
        assert not {"approval.requested", "proposal.scanned"} & {*scene.list_kinds()}
    assert ending.kinds == ["call.decided"]


async def test_a_proposal_is_looked_into_within_a_turn_and_before_the_question(tmp_path: Path) -> None:
    """7: another call of the same caller is decided only after that."""
    caller = SignallingCaller()
    async with open_proposing(tmp_path, "turns = 1") as (scene, proposal):
        async with scene.submit_beside(caller, **proposal) as endings:
            await caller.told.wait()
            assert (await scene.call(**DENIED)).rule == "limits.wall_seconds"
        order = scene.list_kinds()[-5:]
    assert order == [*["proposal.scanned"] * 2, "approval.requested", *["call.decided"] * 2]
    assert endings[0].rule == "approval.pending"


async def test_a_change_that_has_begun_is_made_though_its_caller_leaves(tmp_path: Path) -> None:
    """7: it needs a yes although the profile asks nothing; it ends as finished."""
    async with open_proposing(tmp_path) as (scene, proposal), scene.app.audit.subscribe() as log:
        asked, call_id = await scene.call(**proposal), new_call_id()
        assert list((tmp_path / "reports").iterdir()) == []
        question = await scene.allow(asked)
        async with scene.submit_beside(cancel=True, call_id=call_id, **proposal):
            await await_record(log, "promotion.applied")
        ending = CallEnding(records=scene.read_records(call_id))
    assert (ending.end.kind, ending.records[0].data["approval"]) == ("call.finished", question)
    assert {path.name for path in (tmp_path / "reports").iterdir()} == {"0.txt", "1.txt"}


SPENT = 'tools = ["run_python"]\nbudget = [{ name = "few", per = "principal", every = "day", calls = 1 }]\n'
LIFTED = [
    pytest.param('tools = []\nlift = [{ what = "tool" }]', 0, "tool:run_python", id="tool"),
    pytest.param(f'{SPENT}lift = [{{ what = "budget" }}]', 1, "budget:few", id="budget"),
]


@pytest.mark.parametrize(("role", "calls", "grant"), LIFTED)
async def test_a_yes_widens_what_the_call_may_do(role: str, calls: int, grant: str, tmp_path: Path) -> None:
    """6: once, for that call; controls: another program, and the same again."""
    async with open_scene(tmp_path, write_profile(), policy=write_policy(role)) as scene:
        before = [await scene.call(code="1") for _ in range(calls)]
        asked = await scene.call(code="2")
        question = await scene.allow(asked)
        other, widened, again = [await scene.call(code=code) for code in ("3", "2", "2")]
        (digest,) = [data["digest"] for data in scene.find_data("profile.loaded") if data["source"] == "operator"]
    assert [ending.rule for ending in (*before, other, again)] == [*[""] * calls, *["approval.pending"] * 2]
    assert (asked.kinds, widened.end.data["failed"]) == (["call.decided"], False)
    assert widened.records[0].data["grants"] == [f"{grant} ({question})"]
    assert [ending.records[0].data["profile_digest"] for ending in (asked, widened)] == [digest] * 2


HOSTS = 'tools = ["run_python", "fetch_url"]\nlift = [{ what = "host" }]\n'


async def test_a_lifted_host_is_reached_as_any_other_and_leads_to_no_third(wires: Cable, tmp_path: Path) -> None:
    """6, 12: it is resolved only after the yes; a redirect is decided anew."""
    (tmp_path / "policy.toml").write_text(write_policy(HOSTS))
    text = profile("fetch_url", "bubblewrap", HTTP, max_redirects=2, max_connections=8)
    async with internet(wires) as net, glovebox(net, tmp_path, text) as box:
        scene, url = CallScene(box.app), f"https://{ELSEWHERE}/a"
        net.zone |= {ELSEWHERE: [[OTHER]], BESIDE: [[SITE]]}
        await net.serve(OTHER, 443, answering(redirect(f"https://{BESIDE}/")), name=ELSEWHERE)
        question = await scene.allow(await scene.call(tool="fetch_url", url=url))
        assert net.lookups == []
        reached = await scene.call(tool="fetch_url", url=url)
    decided = [(data["rule"], data.get("address")) for data in reached.find_data("egress.decided")]
    assert decided == [("network.allow[1]", OTHER), ("egress.host", None)]
    assert reached.records[0].data["grants"] == [f"host:https://{ELSEWHERE}:443 ({question})"]
    assert net.lookups == [ELSEWHERE]


async def test_hosts_that_were_refused_are_asked_about_after_the_end(tmp_path: Path) -> None:
    """8, 11: the note in the result is charged; control: a private address."""
    budget = 'budget = [{ name = "told", per = "principal", every = "day", disclosed_bytes = 1_000_000 }]\n'
    async with open_scene(tmp_path, write_profile(HTTP), policy=write_policy(HOSTS + budget)) as scene:
        ending = await scene.call(code=f"{GET}\nget('http://{ELSEWHERE}/')\nget('http://10.0.0.1/')\n")
        assert scene.list_kinds()[-2:] == ["receipt.signed", "approval.requested"]
        guards, caller = scene.app.guards, Principal(id=WHO, transport="cli")
        assert guards.budgets is not None
        (left,) = await guards.budgets.left(caller, RUN, guards.rights_of(caller))
        question = scene.read_records()[-1].data["approval"]
    assert not ending.rule
    (note,) = [text for text in ending.texts if question in text]
    assert f"http://{ELSEWHERE}:80" in note
    assert left.of - left.left == sum(len(text.encode()) for text in ending.texts)


async def test_sandboxes_stand_ready_with_secret_files_masked_before_any_call(tmp_path: Path) -> None:
    """9: the first call has that plan; control: a call after another secret."""
    warm = '[python]\nstart = "warm"\npreload = ["colorsys"]\n'
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace" / ".env").write_text("KEY=1")
    opened = open_scene(tmp_path, write_profile(more=warm), transport="stdio")
    async with opened as scene, scene.app.audit.subscribe() as log:
        ready = await await_record(log, "pool.changed")
        assert "call.decided" not in scene.list_kinds()
        first = await scene.call(code="open('/workspace/.env').read()")
        (tmp_path / "workspace" / "id_rsa").write_text("KEY")
        control = await scene.call(code="1")
    plans = [ending.find_data("sandbox.started")[0]["plan_digest"] for ending in (first, control)]
    assert [digest == ready.data["plan_digest"] for digest in plans] == [True, False]
    assert "PermissionError" in first.fields["stderr"]["text"]
    assert (first.fields["hidden"], control.fields["hidden"]) == (1, 2)


async def test_files_are_gone_where_the_last_record_cannot_be_written(tmp_path: Path) -> None:
    """3, 10: the log is cut during the scan; control: the call once it is mended."""
    log_file, call_id = tmp_path / "state" / "audit" / "audit.jsonl", new_call_id()
    code = "open('/output/0.txt', 'w').write('0')"
    async with open_scene(tmp_path, write_profile(files="scan = true")) as scene, scene.app.audit.subscribe() as log:
        async with scene.submit_beside(call_id=call_id, code=code) as endings:
            await await_record(log, "sandbox.started", 2)
            os.truncate(log_file, log_file.stat().st_size - 1)
        with log_file.open("ab") as file:
            file.write(b"\n")
        control = await scene.call(code=code)
        lost = CallEnding(records=scene.read_records(call_id))
        assert [len(await scene.list_readable(ending)) for ending in (lost, control)] == [0, 1]
    assert (endings[0].rule, lost.end.kind) == ("unavailable", "call.lost")
    assert len(lost.find_data("artifact.collected")) == 1


@pytest.mark.parametrize(("code", "redact"), [("1", "mask"), ("1/0", "mask"), (PRINTED, "refuse")])
async def test_the_last_record_knows_whether_the_result_is_a_failure(code: str, redact: str, tmp_path: Path) -> None:
    """3, 11: a program succeeds, fails, or has its output withheld."""
    async with open_scene(tmp_path, write_profile(more=f'[result]\nredact = "{redact}"\n')) as scene:
        ending = await scene.call(code=code)
    assert ending.result is not None
    assert (ending.end.kind, ending.end.data["failed"]) == ("call.finished", code != "1")
    assert ending.result.failed is ending.end.data["failed"]


async def test_a_connection_is_watched_after_its_record_and_before_it_is_dialled(wires: Cable, tmp_path: Path) -> None:
    """12: a canary in a path is recorded and not dialled; control: a part of it."""
    read = f"{GET}\nmark = open('/workspace/deploy-credentials.env').read().strip().rpartition('=')[2]\n"
    async with internet(wires) as net, glovebox(net, tmp_path, write_profile(HTTP)) as box:
        scene, net.zone[LISTED] = CallScene(box.app), [[SITE]]
        await net.serve(SITE, 80, answering(PAGE))
        await scene.plant()
        control = await scene.call(code=f"{read}get('http://{LISTED}/' + mark[:9])")
        before = len(scene.list_kinds())
        stopped = await scene.call(code=f"{read}get('http://{LISTED}/' + mark)")
        order = scene.list_kinds()[before:]
    assert (control.fields["stdout"]["text"], stopped.rule) == ("200\n", "stop")
    assert (net.lookups, net.connections) == ([LISTED] * 2, [f"{SITE}:80"])
    assert order.index("egress.decided") < order.index("watch.alarm") < order.index("call.cancelled")
    assert [(data["effect"], data["address"]) for data in stopped.find_data("egress.decided")] == [("allow", SITE)]


async def test_what_ends_a_connection_early_is_recorded_and_resolves_no_name(
    wires: Cable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12: a rule, the call's limit, a missing key; control: an allowed host."""
    monkeypatch.delenv("LENT", raising=False)
    page = profile("fetch_url", "bubblewrap", f'{{ host = "{BESIDE}" }}') + write_credential(BESIDE)
    program = write_profile(HTTP, HTTP.replace(LISTED, BESIDE), max_connections=1)
    async with internet(wires) as net, glovebox(net, tmp_path, program, page) as box:
        scene = CallScene(box.app)
        net.zone |= {LISTED: [[SITE]], BESIDE: [[OTHER]]}
        await net.serve(SITE, 80, answering(PAGE))
        code = GET + "".join(f"get('http://{host}/')\n" for host in (ELSEWHERE, LISTED, BESIDE))
        endings = [await scene.call(code=code), await scene.call(tool="fetch_url", url=f"https://{BESIDE}/")]
    decided = [data for ending in endings for data in ending.find_data("egress.decided")]
    rules = ["egress.host", "network.allow[0]", "egress.connections", "egress.credential"]
    assert [(data["rule"], data.get("address")) for data in decided] == [
        (rule, SITE if rule.startswith("network") else None) for rule in rules
    ]
    assert net.lookups == [LISTED]


async def test_a_placeholder_that_strays_is_an_alarm_though_its_host_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12: the refusal is recorded first; control: a request without it."""
    monkeypatch.setenv("LENT", KEY)
    text = write_profile(f'{{ host = "{LISTED}" }}', tls="inspect", more=write_credential(LISTED, 'env = "KEY"'))
    async with open_scene(tmp_path, text) as scene:
        for agent in ("'plain'", "os.environ['KEY']"):
            await scene.call(code=f"{GET}\nget('http://{ELSEWHERE}/', {agent})")
        order = [(record.kind, record.data.get("rule")) for record in scene.read_records()]
    found = [row for row in order if row[0] in ("egress.decided", "watch.alarm")]
    assert found == [*[("egress.decided", "egress.host")] * 2, ("watch.alarm", "placeholder")]


def test_every_row_is_held_by_a_test_that_is_there() -> None:
    """Docstrings here give the rows; tests elsewhere are named."""
    own = [node for node in ast.parse(Path(__file__).read_text()).body if isinstance(node, ast.AsyncFunctionDef)]
    told = [re.match(r"([0-9, ]+): ", ast.get_docstring(node) or "") for node in own if node.name.startswith("test_")]
    rows = {int(row) for found in told if found for row in found[1].split(",")}
    assert None not in told
    assert rows | set(HELD_ELSEWHERE) == set(range(1, 13))
    assert set(NOT_SO_TODAY) <= rows
    for test in (test for tests in HELD_ELSEWHERE.values() for test in tests):
        file, _, name = test.partition("::")
        tree = ast.parse((Path(__file__).parents[2] / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
