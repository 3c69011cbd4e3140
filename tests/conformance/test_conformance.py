"""Every driver withstands every case of the conformance suite, and every case's attack works without the guard."""

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass

import anyio.from_thread
import pytest
from tests.conformance import control
from tests.must_run import GVISOR_DOCKER

from glovebox_sandboxes.conformance import prove, trial
from glovebox_sandboxes.conformance.case import Case, load
from glovebox_sandboxes.conformance.host import Planted
from glovebox_sandboxes.conformance.prove import gap_names, prepared
from glovebox_sandboxes.contract.base import Driver
from glovebox_sandboxes.drivers import registry
from glovebox_sandboxes.drivers.docker.driver import DockerDriver
from glovebox_sandboxes.host import cgroup
from glovebox_sandboxes.runtime import guest_tree
from glovebox_sandboxes.seccomp import cases as calls
from glovebox_sandboxes.seccomp.cases import SyscallCase
from glovebox_server.settings import Settings

CASES = load()
ATTEMPTS = tuple(case for case in CASES if case.attempt is not None)
PROGRAMS = tuple(case for case in CASES if case.program is not None)
CALLS = calls.load_cases(platform.machine())
RULES = tuple({case.rule: case for case in CALLS}.values())
#: Each driver, and some in other ways than their own first one.
#: "rlimits": bubblewrap as on a host that lets it make no control groups, which is most people's own machine.
#: "forked": bubblewrap's sandboxes as calls get them that find one prepared; "python", where process 1 could be C.
BUBBLEWRAP = ("rlimits", "forked", "forked-rlimits", "forked-python")
DRIVERS = [
    *(pytest.param(name, marks=pytest.mark.driver(name)) for name in registry.NAMES),
    *(pytest.param(name, marks=pytest.mark.driver("bubblewrap")) for name in BUBBLEWRAP),
    pytest.param(GVISOR_DOCKER, marks=pytest.mark.driver(GVISOR_DOCKER)),
]
#: Areas of which programs are tried there, where it is not all of them: those in which this way differs from the first.
AREAS = {
    "rlimits": ("limits",), "forked-rlimits": ("limits",), GVISOR_DOCKER: ("limits", "output", "overlay", "privileges"),
}  # fmt: skip


def _id(case: Case) -> str:
    return case.id


def _tried(case: Case) -> pytest.MarkDecorator:
    """Where this program is tried; a known gap always is."""
    left_out = {name for name, areas in AREAS.items() if case.area not in areas and name not in case.gaps}
    return pytest.mark.engines(*({*registry.NAMES, *BUBBLEWRAP, GVISOR_DOCKER} - left_out))


@dataclass(frozen=True, slots=True)
class Subject:
    """A driver and what it is called in the cases' gaps."""

    name: str
    names: tuple[str, ...]
    driver: Driver


@pytest.fixture(scope="module", params=DRIVERS)
def subject(request: pytest.FixtureRequest, portal: anyio.from_thread.BlockingPortal) -> Iterator[Subject]:
    """Each driver in turn."""
    if request.param == GVISOR_DOCKER:
        with portal.wrap_async_context_manager(DockerDriver.connect("runsc")) as engine:
            yield Subject(request.param, gap_names(engine.capabilities), engine)
        return
    opened = registry.opened(Settings().data_dir, f"conformance{os.getpid()}")
    with pytest.MonkeyPatch.context() as patch, portal.wrap_async_context_manager(opened) as available:
        words = request.param.split("-")
        if "rlimits" in words:
            patch.setattr(cgroup, "detect", lambda _: None)
        if "python" in words:
            if why := guest_tree.process_1()[1]:
                pytest.skip(f"then it is in Python anyway: {why}")
            patch.setattr(guest_tree, "process_1", lambda: ("", ""))
        name = request.param if request.param in registry.NAMES else "bubblewrap"
        found = portal.call(available.get, name)
        if "forked" not in words:
            yield Subject(request.param, tuple(words), found)
            return
        with portal.wrap_async_context_manager(prepared(found)) as forked:
            yield Subject(request.param, tuple(words), forked)


@pytest.fixture(scope="module")
def answers(portal: anyio.from_thread.BlockingPortal, subject: Subject, planted: Planted) -> dict[str, trial.Verdict]:
    """The verdicts on all attempts: they share one sandbox."""
    return {found.case.id: found for found in portal.call(trial.judge_attempts, subject.driver, ATTEMPTS, planted)}


def _hold(verdict: trial.Verdict, subject: Subject) -> None:
    gap = next((verdict.case.gaps[name] for name in subject.names if name in verdict.case.gaps), None)
    if gap is None:
        assert not verdict.problems, "\n".join((verdict.case.claim, *verdict.problems))
    elif verdict.problems:
        pytest.xfail(f"{gap}: {verdict.problems[0]}")
    else:
        pytest.fail(f"the gap has closed, delete it from the case: {gap}")


@pytest.mark.parametrize("case", ATTEMPTS, ids=_id)
def test_attempts_are_refused(case: Case, subject: Subject, answers: dict[str, trial.Verdict]) -> None:
    """The attempt gets the answer that names its guard, the host is unchanged, and nothing is left."""
    _hold(answers[case.id], subject)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id, marks=_tried(case)) for case in PROGRAMS])
def test_programs_end_as_they_must(
    case: Case, subject: Subject, portal: anyio.from_thread.BlockingPortal, planted: Planted
) -> None:
    """The call ends with the right word, what was printed is there, the host is unchanged, and nothing is left."""
    _hold(portal.call(trial.judge, subject.driver, case, planted), subject)


# All of them of each driver, in three parts where a kernel in user space is slow; of its other ways one of each rule.
@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(CALLS, id="all", marks=pytest.mark.engines("bubblewrap", "docker")),
        *(pytest.param(CALLS[part::3], id=str(part), marks=pytest.mark.engines("gvisor")) for part in range(3)),
        pytest.param(RULES, id="rules", marks=pytest.mark.engines(*BUBBLEWRAP, GVISOR_DOCKER)),
    ],
)
def test_system_calls_are_refused(
    subject: Subject,
    asked: tuple[SyscallCase, ...],
    portal: anyio.from_thread.BlockingPortal,
    planted: Planted,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """I4: every call of the seccomp cases gets the policy's answer, and its neighbour works; controls are there."""
    monkeypatch.setattr(calls, "load_cases", lambda _: asked)
    found = portal.call(prove.system_calls, subject.driver, planted)
    assert len(found) == len(asked) > 40
    assert {each.id: each.seen for each in found if each.status != "held"} == {}


@pytest.mark.parametrize("case", CASES, ids=_id)
def test_without_the_guard_the_attack_works(
    case: Case, portal: anyio.from_thread.BlockingPortal, planted: Planted
) -> None:
    """The control: the same program as a plain process does what no sandbox lets it do."""
    if os.geteuid() != 0:
        pytest.skip("only root may do everything a control has to show")
    found = portal.call(control.problems, case, planted)
    assert not found, "\n".join((case.claim, *found))
