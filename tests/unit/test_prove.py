"""``doctor --prove``: what is counted as held, failed, a gap or not asked, and what a gate is told."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.testing import CliRunner
from tests.fixtures.consoles import printing_on

from glovebox_audit.place import AuditError
from glovebox_sandboxes.conformance import case, host, prove, trial
from glovebox_sandboxes.conformance.case import Case, Control
from glovebox_sandboxes.conformance.host import Planted
from glovebox_sandboxes.conformance.prove import Prepared
from glovebox_sandboxes.contract.base import Capabilities, Driver, Missing, Plan, SandboxSpec, Source
from glovebox_sandboxes.contract.errors import SandboxError, UnsupportedSpecError
from glovebox_sandboxes.contract.measure import Expected
from glovebox_sandboxes.drivers import registry
from glovebox_sandboxes.seccomp.cases import load_cases
from glovebox_server.cli.host import doctor
from glovebox_server.cli.main import main
from glovebox_server.cli.terminal import Terminal
from glovebox_server.exits import FAILED, OK, UNAVAILABLE
from glovebox_server.settings import Settings

CAPABILITIES = Capabilities(driver="bubblewrap", level="namespaces", version="1", limits={"memory_bytes": "cgroup v2"})
RLIMITS = replace(CAPABILITIES, limits={"memory_bytes": "rlimit"})


WHOLE = "[[case]]\nid = 'x'\nclaim = 'X.'\nseeds = ['F1']\nproves = ['GB-FILE-1']"
"""A case as far as it is the same for all."""


class Dummy:
    """A driver that only has a name: what it does is said by the judges that replace the real ones."""

    name = "bubblewrap"

    def __init__(self, capabilities: Capabilities = CAPABILITIES, *, quick: bool = False) -> None:
        self.capabilities = capabilities
        self._quick = quick

    def plan(self, spec: SandboxSpec) -> Plan:
        """Nothing to do."""
        expected = Expected(uid=1, interfaces=(), writable=(), mounts=(), namespaces=())
        return Plan(driver=self.name, level="namespaces", spec=spec, action={}, expected=expected)

    @asynccontextmanager
    async def source(self, _plan: Plan) -> AsyncIterator[Source]:
        """Of sandboxes that nobody opens."""
        yield Source(open=lambda: pytest.fail("opened"), bytes_each=1, make=list if self._quick else None)


def a_case(identity: str, **more: object) -> Case:
    """A program that prints, in area ``area``."""
    fields = {
        "id": identity,
        "area": "area",
        "claim": "X.",
        "seeds": ("F1",),
        "proves": ("GB-FILE-1",),
        "control": Control(),
    }
    return Case.model_validate({**fields, "program": "print(1)", **more})


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, ...] | Exception]:
    """Id → problems of each case, instead of a sandbox."""
    found: dict[str, tuple[str, ...] | Exception] = {}

    async def judge(_driver: Driver, one: Case, _host: Planted) -> trial.Verdict:
        problems = found.get(one.id, ())
        if isinstance(problems, Exception):
            raise problems
        return trial.Verdict(case=one, problems=problems)

    async def system_calls(_driver: Driver, _host: Planted) -> list[prove.CaseFinding]:
        return []

    monkeypatch.setattr(trial, "judge", judge)
    monkeypatch.setattr(prove, "system_calls", system_calls)
    return found


async def _proof(capabilities: Capabilities, *cases: Case, absent: dict[str, str] | None = None) -> prove.Proof:
    planted = Planted(root=Path(), workspace=Path(), names={}, absent=absent or {})
    heard: list[prove.CaseFinding] = []
    proof = await prove.prove(Dummy(capabilities), cases, planted, heard.append)  # type: ignore[arg-type]
    assert sorted(each.id for each in heard) == sorted(each.id for each in proof.findings)
    return proof


async def test_a_claim_that_does_not_hold_fails_the_proof(judged: dict[str, tuple[str, ...] | Exception]) -> None:
    """One failed claim among others that hold."""
    judged["b"] = ("it answered 'ok' instead of EROFS",)
    proof = await _proof(CAPABILITIES, a_case("a"), a_case("b"))
    assert [each.status for each in proof.findings] == ["held", "failed"]
    assert proof.findings[1].seen == judged["b"]
    assert not proof.holds
    assert (await _proof(CAPABILITIES, a_case("a"))).holds


async def test_gaps_are_strict_and_of_one_driver(judged: dict[str, tuple[str, ...] | Exception]) -> None:
    """A known gap does not fail the proof; one that has closed does, and one of another driver is none."""
    judged["open"] = ("seen",)
    known = {"gaps": {"rlimits": "why"}}
    proof = await _proof(RLIMITS, a_case("open", **known), a_case("shut", **known))
    assert [(each.status, each.reason) for each in proof.findings] == [("gap", "why"), ("closed", "why")]
    assert not proof.holds
    assert (await _proof(RLIMITS, a_case("open", **known))).holds
    assert not (await _proof(CAPABILITIES, a_case("open", **known))).holds


async def test_what_is_not_asked_says_why(judged: dict[str, tuple[str, ...] | Exception]) -> None:
    """A case whose bait this host does not take, and one that the driver refuses: in the report, never silently."""
    judged["refused"] = UnsupportedSpecError("limits.memory_bytes", "too little", "Use more.")
    baited = a_case("baited", program="print(HOST['tcp'])")
    proof = await _proof(CAPABILITIES, baited, a_case("refused"), absent={"tcp": "no loopback"})
    assert [(each.id, each.status) for each in proof.findings] == [("baited", "skipped"), ("refused", "skipped")]
    assert [each.reason for each in proof.findings] == [
        "no loopback",
        "the driver refuses to run it: limits.memory_bytes: too little. Use more.",
    ]


async def test_a_bait_that_cannot_be_planted_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without a loopback, or a directory too deep for a socket's name: the other baits are there."""

    def refuse(*_: object) -> None:
        raise OSError(97, "Address family not supported by protocol")

    monkeypatch.setattr(host, "_listen", refuse)
    async with host.planted() as planted:
        assert set(planted.absent) == {"unix", "abstract", "tcp"}
        assert "not supported" in planted.absent["tcp"]
        assert Path(planted.names["shared"]).exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (WHOLE + "\nprogram = '1'\ncontrol = {}\nstdot = '1'",
         "one.toml: case 1: stdot: Extra inputs are not permitted"),
        (WHOLE + "\nprogram = '1'\ncontrol = {endde = 'exited'}",
         "one.toml: case 1: control.endde: Extra inputs are not permitted"),
        (WHOLE + "\nprogram = '1'\ncontrol = {}\narea = 'y'", "one.toml: case 'x': it is there twice, or has an area"),
        ("[[case]]\nclaim = 'X.'", "one.toml: case 1: id: Field required"),
        ("[[cases]]\nid = 'x'", "one.toml: it may hold [[case]] entries and nothing else, not cases"),
        ("[[case", "one.toml: not TOML: "),
    ],
)  # fmt: skip
def test_a_case_that_is_wrong_is_refused_with_the_exact_reason(tmp_path: Path, text: str, reason: str) -> None:
    """File, case, field and what would be right: a misspelt expectation would hold always."""
    (tmp_path / "one.toml").write_text(text)
    (tmp_path / "README.md").write_text("not a case")
    with pytest.raises(ValueError, match="one") as caught:
        case.load(tmp_path)
    assert str(caught.value).startswith(reason)


def test_the_digest_is_of_all_that_the_cases_say() -> None:
    """Two suites that differ in one pattern have two digests."""
    assert case.digest([a_case("a")]) == case.digest([a_case("a")])
    assert case.digest([a_case("a")]) != case.digest([a_case("a", stdout="1")])


def _served(monkeypatch: pytest.MonkeyPatch, capabilities: Mapping[str, Capabilities], *, quick: bool = False) -> None:
    @asynccontextmanager
    async def opened(_data: Path, _server_id: str) -> AsyncIterator[object]:
        class Available:
            async def get(self, name: str) -> Dummy:
                return Dummy(capabilities[name], quick=quick)

        yield Available()

    monkeypatch.setattr(registry, "opened", opened)
    monkeypatch.setattr(registry, "NAMES", tuple(capabilities))


GONE = replace(CAPABILITIES, driver="docker", missing=(Missing(what="no Engine", fix="start it", fatal=True),))


@pytest.mark.parametrize(
    ("found", "names", "code"),
    [
        ({"bubblewrap": CAPABILITIES, "docker": GONE}, (), OK),
        ({"bubblewrap": CAPABILITIES, "docker": GONE}, ("docker",), UNAVAILABLE),
        ({"docker": GONE}, (), UNAVAILABLE),
    ],
)
def test_a_gate_is_told_by_the_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    judged: dict[str, tuple[str, ...] | Exception],
    found: dict[str, Capabilities],
    names: tuple[str, ...],
    code: int,
) -> None:
    """A driver that was asked for and is not there is never a proof; one that was not asked for may be absent."""
    monkeypatch.setattr(case, "load", lambda: (a_case("a"),))
    _served(monkeypatch, found)
    out = StringIO()
    assert _run(out, names=names) == code
    body = json.loads(out.getvalue())
    assert body["holds"] is (code == OK)
    assert [each["proved"] for each in body["drivers"]] == [
        each.usable for each in found.values() if not names or each.driver in names
    ]


def test_the_scorecard_names_what_failed_and_cannot_redraw_the_terminal(
    monkeypatch: pytest.MonkeyPatch, judged: dict[str, tuple[str, ...] | Exception]
) -> None:
    """Expected and seen are there; escapes that a program printed are not."""
    judged["b"] = ("it answered '\x1b[2J' instead of EROFS",)
    monkeypatch.setattr(case, "load", lambda: (a_case("a"), a_case("b")))
    _served(monkeypatch, {"bubblewrap": CAPABILITIES})
    out = StringIO()
    assert _run(out, as_json=False) == FAILED
    text = out.getvalue()
    assert "failed: b" in text
    assert "it answered '\\x1b[2J' instead of EROFS" in text
    assert "NOT PROVED" in text
    assert "1 of 2 claims hold" in text


@pytest.mark.parametrize("quick", [False, True])
def test_both_ways_to_start_a_sandbox_are_proved_and_told_apart(
    monkeypatch: pytest.MonkeyPatch, judged: dict[str, tuple[str, ...] | Exception], *, quick: bool
) -> None:
    """Where prepared sandboxes come to be in another way, a claim that only holds for the others is not proved."""
    ways: list[bool] = []

    async def judge(driver: Driver, one: Case, _host: Planted) -> trial.Verdict:
        ways.append(isinstance(driver, Prepared))
        return trial.Verdict(case=one, problems=("forked",) if ways[-1] else ())

    monkeypatch.setattr(trial, "judge", judge)
    monkeypatch.setattr(case, "load", lambda: (a_case("a"),))
    _served(monkeypatch, {"bubblewrap": CAPABILITIES}, quick=quick)
    out = StringIO()
    assert _run(out) == (FAILED if quick else OK)
    found = [(each["start"], each["holds"]) for each in json.loads(out.getvalue())["drivers"]]
    assert found == [("cold", True), ("forked", False)][: 1 + quick]
    assert ways == [False, True][: 1 + quick]
    out = StringIO()
    _run(out, as_json=False)
    assert ("prepared ahead, forked: 0 of 1 claims hold" in out.getvalue()) == quick
    assert "started for a call: 1 of 1 claims hold" in out.getvalue()


async def test_a_source_that_cannot_be_started_is_a_proof_that_fails() -> None:
    """Not a driver that has no other way, and not an error of the proof."""

    class Broken(Dummy):
        @asynccontextmanager
        async def source(self, _plan: Plan) -> AsyncIterator[Source]:
            if self.name:
                raise SandboxError("Starting a zygote", "it broke", "")
            yield Source(open=lambda: pytest.fail("opened"), bytes_each=1)

    driver: Any = Broken()
    assert await prove.has_another_way(driver)
    async with prove.prepared(driver) as forked:
        for _ in range(2):
            with pytest.raises(SandboxError, match="it broke"):
                async with forked.open(forked.plan(SandboxSpec(limits=case.LIMITS))):
                    pytest.fail("opened")


def _run(out: StringIO, *, names: tuple[str, ...] = (), as_json: bool = True) -> int:
    with printing_on(Terminal(file=out, width=200), as_json=as_json):
        return anyio.run(lambda: doctor._prove(Settings(), names))


def test_system_calls_have_ids_of_their_own() -> None:
    """Stable, of letters, digits and hyphens, and no two the same."""
    found = [prove._call_case(each.id, "").id for each in load_cases("x86_64")]
    assert len(set(found)) == len(found)


def test_our_own_failures_are_one_paragraph(
    monkeypatch: pytest.MonkeyPatch, judged: dict[str, tuple[str, ...] | Exception]
) -> None:
    """A host where the proof itself cannot be set up ends with the code for that, not with a traceback."""

    def full(_data: Path, _server_id: str) -> None:
        raise AuditError("Opening the log", "the disk is full", "Free space.")

    _served(monkeypatch, {"bubblewrap": CAPABILITIES})
    monkeypatch.setattr(registry, "opened", full)
    done = CliRunner().invoke(main, ["doctor", "--prove"])
    assert done.exit_code == UNAVAILABLE
    assert done.stderr.count("\n") == 1
    assert "Opening the log: the disk is full. Free space." in done.stderr
