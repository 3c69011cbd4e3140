"""The conformance suite itself: its cases are well formed, and it notices what it must, and what is left."""

import re
import subprocess  # noqa: TID251 - a process in a namespace of its own is what is looked at
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from pydantic import ValidationError
from tests.conformance import control

from glovebox_sandboxes.conformance import case as texts
from glovebox_sandboxes.conformance import host, trial
from glovebox_sandboxes.conformance.case import LIMITS, Case, Control, load
from glovebox_sandboxes.drivers import registry
from glovebox_sandboxes.drivers.bubblewrap import driver as bubblewrap
from glovebox_sandboxes.drivers.bubblewrap.driver import Bubblewrap
from glovebox_server.settings import Settings

CASES = load()


def test_every_case_is_one_sentence_and_looks_at_something() -> None:
    """One that expects nothing but an end would hold in any sandbox; its control must then differ."""
    for case in CASES:
        assert re.fullmatch(r"[^.].*\.", case.claim), case.id
        assert all(re.fullmatch(r"[EFIM]\d{1,2}", seed) for seed in case.seeds), case.id
        assert set(case.gaps) <= {*registry.NAMES, "rlimits", "gvisor-docker", "forked"}, case.id
        assert all(reason for reason in case.gaps.values()), case.id
        assert set(case.limits) <= set(LIMITS.__slots__), case.id
    for case in CASES:
        seen = case.stdout or case.value or case.files is not None or case.code is not None or case.repeated
        assert case.attempt or case.ended != "exited" or seen or case.control.outlived, case.id


@pytest.mark.parametrize(
    "fields",
    [
        {"attempt": "1"},
        {"attempt": "1", "answer": "ok", "control": {}},
        {},
        {"attempt": "1", "answer": "ok", "program": "1"},
        {"program": "1", "endde": "exited"},
        {"program": "1", "ended": "vanished"},
        {"program": "1", "id": "Not An Id"},
        {"program": "1", "seeds": ()},
    ],
)
def test_a_case_that_is_wrong_does_not_load(fields: dict[str, object]) -> None:
    """Strict: a misspelt expectation would hold always."""
    whole = {"id": "x", "claim": "X.", "seeds": ("F1",), "proves": ("GB-FILE-1",), "control": {"answer": "ok"}} | fields
    with pytest.raises(ValidationError):
        Case.model_validate(whole)


@pytest.mark.parametrize("printed", ["", "no JSON", "[1]", '{"a": ', "\x00"])
def test_no_answers_are_no_answers(printed: str) -> None:
    """Whatever a sandbox prints in their place."""
    assert texts.answers(printed) == {}


def _wrong(**changes: object) -> Case:
    fields = {
        "id": "wrong",
        "claim": "Wrong.",
        "seeds": ("I10",),
        "proves": ("GB-LIFE-1",),
        "program": "print('printed')\nopen(OUTPUT + '/f', 'w')",
    }
    return Case.model_validate({"control": Control(), **fields, **changes})


@pytest.mark.long
@pytest.mark.driver("bubblewrap")
async def test_every_expectation_is_noticed_when_it_is_not_met() -> None:
    """The control of the judge: one program, judged right once and wrong in every way there is."""
    wrong = {
        "ended": "timed_out", "code": 3, "reason": "x", "stdout": "nothing", "stderr": "x", "value": "7",
        "error": "OSError", "dropped": True, "files": {}, "skipped": {"f": "x"}, "repeated": "different",
    }  # fmt: skip
    async with _bubblewrap() as driver, host.planted() as planted:
        right = await trial.judge(driver, _wrong(files={"f": 0}, repeated="same", code=0, stdout="printed"), planted)
        assert not right.problems
        for field, value in wrong.items():
            found = await trial.judge(driver, _wrong(**{field: value}), planted)
            assert len(found.problems) == 1, field


@pytest.mark.driver("bubblewrap")
async def test_changes_of_the_host_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """F4: a write that gets through to what is planted is told, whatever the program says."""
    async with _bubblewrap() as driver, host.planted() as planted:
        real = trial.see

        async def changed(*given: object, overlay: bool) -> trial.TrialResult:
            (planted.workspace / "data.csv").write_text("changed")
            return await real(*given, overlay=overlay)  # type: ignore[arg-type]

        monkeypatch.setattr(trial, "see", changed)
        found = await trial.judge(driver, _wrong(), planted)
        assert found.problems == ("files of the host were changed",)


async def test_processes_that_stay_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """I10: this very process is in a pid namespace that has not ended."""
    monkeypatch.setattr(trial, "_GONE_SECONDS", 0.05)
    inode = int(str(Path("/proc/self/ns/pid").readlink())[5:-1])
    assert trial.processes({"pid": inode})
    assert trial.processes({"pid": 1}) == ()
    assert await trial.left({"pid": inode}, "", trial.now())


async def test_a_control_that_does_not_work_is_noticed() -> None:
    """A control that is stopped by something else than the missing guard proves nothing."""
    case = _wrong(control=Control(stdout="something else", ended="running", outlived=True))
    async with host.planted() as planted:
        assert len(await control.problems(case, planted)) == 3
        assert not await control.problems(_wrong(control=Control(stdout="printed")), planted)


async def test_what_is_planted_is_taken_away_again() -> None:
    with anyio.CancelScope() as scope:
        async with host.planted() as planted:
            root, shared = planted.root, Path(planted.names["shared"])
            assert root.exists()
            assert shared.exists()
            scope.cancel()
            await anyio.lowlevel.checkpoint()
    assert not root.exists()
    assert not shared.exists()


def _bubblewrap() -> AbstractAsyncContextManager[Bubblewrap]:
    return bubblewrap.connect(Settings().data_dir, "conformance-cases")


@pytest.fixture
def namespace() -> Iterator[int]:
    script = "readlink /proc/self/ns/pid; exec sleep 600"
    options = ["--unshare-pid", "--as-pid-1", "--die-with-parent", "--dev-bind", "/", "/"]
    with subprocess.Popen(["bwrap", *options, "sh", "-c", script], stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            yield int(running.stdout.readline().strip().removeprefix("pid:[").removesuffix("]"))
        finally:
            running.kill()


@pytest.mark.driver("bubblewrap")
async def test_a_namespace_that_began_later_is_no_sandboxs(namespace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another server's sandbox got the number; the control is one that was there already."""
    monkeypatch.setattr(trial, "_GONE_SECONDS", 0.1)
    numbers = {"pid": namespace}
    assert len(await trial.left(numbers, "", trial.now())) == 1
    assert await trial.left(numbers, "", trial.now() - 3600) == ()
