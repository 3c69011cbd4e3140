"""The judge of whole calls notices what it must: one call, judged right once and wrong in every way there is."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.conformance.whole_calls import harness
from tests.conformance.whole_calls.case import CallCase, ControlCall, load
from tests.conformance.whole_calls.governed import CaseGovernance
from tests.conformance.whole_calls.harness import CallHarness
from tests.conformance.whole_calls.seen import Seen, differences, incomplete, of_all

from glovebox_audit.read import records_of
from glovebox_sandboxes.conformance import host
from glovebox_server.artifacts.store import ArtifactStore
from glovebox_server.calls import CallResult, Text
from glovebox_server.settings import Settings

CASES = load()


@asynccontextmanager
async def call_harness() -> AsyncIterator[CallHarness]:
    """A server's parts on a host with something to lose."""
    async with host.planted() as planted, harness.opened(Settings().data_dir, planted) as opened:
        yield opened


def a_case(**more: Any) -> CallCase:
    fields = {
        "id": "call-x", "claim": "X.", "seeds": ("M8",), "proves": ("GB-LIFE-4",),
        "arguments": {"code": "print('out')\nopen('/output/a.txt', 'w').write('one')"},
    }  # fmt: skip
    return CallCase.model_validate({**fields, **more})


RIGHT: dict[str, Any] = {
    "failed": False,
    "result": {"stdout.text": "out\n"},
    "text": "out",
    "artifacts": {"a.txt": "one"},
    "audit": "call.decided sandbox.started artifact.collected call.finished( receipt.signed)?",
    "records": {"call.decided/effect": "allow"},
}
WRONG: list[dict[str, Any]] = [
    {"failed": True},
    {"result": {"stdout.text": "out"}},
    {"result": {"stdout.none": ".+out"}},
    {"text": "err"},
    {"artifacts": {}},
    {"artifacts": {"a.txt": "two"}},
    {"audit": "call.decided"},
    {"records": {"call.decided/effect": "deny"}},
    {"refused": "limits.wall_seconds", "control": ControlCall()},
    {"invalid": "code", "control": ControlCall()},
    {"unavailable": "bwrap", "control": ControlCall()},
    {"profile_error": "network", "control": ControlCall()},
    {"cancel": "never printed"},
    {"waits": 60.0},
    {"through": 0},
    {"times": 2, "at_once": True, "through": 1},
    {"before": [{"refused": "stop"}]},
]


@pytest.mark.long
@pytest.mark.driver("bubblewrap")
async def test_every_expectation_is_noticed_when_it_is_not_met() -> None:
    """The control of the judge."""
    async with call_harness() as opened:
        assert (await opened.judge(a_case(**RIGHT), "bubblewrap")).problems == ()
        for wrong in WRONG:
            found = await opened.judge(a_case(**wrong), "bubblewrap")
            assert len(found.problems) == 1, (wrong, found.problems)


def test_a_call_that_is_not_begun_proves_nothing() -> None:
    """No tool of that name, or a server that is too busy; the control is that nothing went wrong."""
    for how, count in (("unknown tool", 1), ("refused", 1), ("", 0)):
        assert len(differences(a_case(), Seen(how=how, told="why"))) == count


@pytest.mark.driver("bubblewrap")
async def test_what_leaks_and_what_is_not_whole_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """M8, M12: a leak of the canary; text without what the structure says, and what the tool's model does not know."""
    async with call_harness() as opened:
        secret = os.environ[host.CANARY]
        leaking = a_case(arguments={"code": f"print({secret!r}, {str(opened._host.root)!r})"})
        found = (await opened.judge(leaking, "bubblewrap")).problems
        assert "the server's secret is in what the caller, the record or the log got" in found
        assert any("a host path is in what the caller got" in each for each in found)
    async with call_harness() as opened:
        async with CaseGovernance.opened(opened._app, tmp_path) as governance:
            ((seen,), _) = await opened._all(a_case(), "bubblewrap", {}, governance)
        tool = opened._app.tools["run_python"]
        assert seen.result is not None
        assert incomplete(tool, seen.result) == []
        assert incomplete(tool, replace(seen.result, content=(Text(text=""),)))
        assert incomplete(tool, replace(seen.result, structured={"call_id": 1}))


@pytest.mark.driver("bubblewrap")
async def test_a_changed_host_and_a_shared_artifact_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """F4, F7: a write that gets through, and a store that gives everybody everything."""
    real = ArtifactStore.open

    def shared(self: ArtifactStore, uri: str, _principal: object) -> Any:
        return real(self, uri, harness._principal("one"))

    async with call_harness() as opened:
        monkeypatch.setattr(ArtifactStore, "open", shared)
        seen = opened._all

        async def changing(*given: Any) -> Any:
            (Path(opened._host.workspace) / "data.csv").write_text("changed")
            return await seen(*given)

        monkeypatch.setattr(opened, "_all", changing)
        found = (await opened.judge(a_case(), "bubblewrap")).problems
    assert found == ("another caller could fetch 'a.txt'", "files of the host were changed")


@pytest.mark.driver("bubblewrap")
async def test_records_that_are_not_there_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = "call.finished"

    def some(directory: Path, call_id: str) -> Any:
        return [record for record in records_of(directory, call_id) if record.kind != lost]

    monkeypatch.setattr(harness, "records_of", some)
    async with call_harness() as opened:
        found = (await opened.judge(a_case(), "bubblewrap")).problems
        assert len(found) == 1
        assert "there are 0 last records instead of 1" in found[0]
        lost = "call.decided"
        assert (await opened.judge(a_case(), "bubblewrap")).problems[0].startswith("the first record is")


@pytest.mark.parametrize(
    "wrong", [{"refused": "x"}, {"refused": "x", "control": ControlCall(invalid="x")}, {"exit": 1}]
)
def test_a_denial_without_a_control_is_no_case(wrong: dict[str, Any]) -> None:
    """A refusal shows something only where the same call gets through without the guard."""
    with pytest.raises(ValidationError):
        a_case(**wrong)


def test_cases_are_sentences_and_a_misspelt_expectation_is_named(tmp_path: Path) -> None:
    """It would hold always."""
    ids = {each.id for each in CASES}
    assert all(each.claim.endswith(".") for each in CASES)
    assert ids >= {
        "call-read-only", "call-network-proxied", "call-timed-out", "call-cancelled", "call-child-left",
        "call-artifacts", "call-finished", "call-exit-status", "call-set-up-failure",
        "call-program-denied-host", "call-secrets",
        "call-read-parent", "call-read-link-out",
    }  # fmt: skip
    before = 'before = [{ refusde = "stop" }]'
    fields = "id = 'x'\nclaim = 'X.'\nseeds = ['F1']\nproves = ['GB-FILE-1']"
    (tmp_path / "one.toml").write_text(f"[[case]]\n{fields}\n{before}")
    with pytest.raises(ValueError, match=r"one\.toml: case 1: before\.0\.refusde: Extra inputs are"):
        load(tmp_path)


def test_of_calls_at_once_one_that_never_began_did_not_get_through() -> None:
    """Nor one that was busy; the control is a result."""
    case = a_case(control=ControlCall(), refused="budget.calls", times=2, through=1)
    ran = Seen(result=CallResult(structured={}, content=(), failed=False, meta={}))
    told = {"refused": {"rule": "budget.calls"}}
    refused = Seen(result=CallResult(structured=told, content=(), failed=True, meta={}))
    assert of_all(case, [ran, refused]) == []
    for how in ("unavailable", "refused", "503"):
        assert of_all(case, [Seen(how=how, told="no sandbox"), refused]) != []
