"""Proving on this host: every claim against one driver, and what came of each.

The controls stay out: they attack the host for real, and belong to the tests of the cases. Nothing here may import a
profile, the server, or one driver in particular.
"""

import io
import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import anyio

from sandboxes.base import Capabilities, Driver
from sandboxes.conformance import trial
from sandboxes.conformance.case import LIMITS, Case, Claim
from sandboxes.conformance.host import Planted
from sandboxes.errors import SandboxUnavailable, UnsupportedSpec
from sandboxes.seccomp import cases as calls

Status = Literal["held", "failed", "gap", "closed", "skipped"]
"""``gap``: does not hold and is known not to; ``closed``: is said not to hold, and does; ``skipped``: not asked."""

SYSTEM_CALLS = "system-calls"
"""The area of the claims in ``sandboxes/seccomp/cases.json``."""
_CALLS_SEEDS = ("I4",)
_CALLS_PROVE = ("GB-KERN-3",)
_UNWATCHED = (
    "processes of the sandbox cannot be seen from outside by this user, so that they end with it is not shown here"
)
_CALLS_LIMITS = replace(LIMITS, wall_seconds=60.0, cpu_seconds=60)
"""Some 400 attempts, each in a process of its own; a kernel in user space takes ten seconds for them."""
_NOT_THE_FILTER: Mapping[str, Mapping[str, str]] = {
    "gvisor": {
        "near pidfd_getfd": "ENOSYS",
        "near process_mrelease": "ENOSYS",
        "near ioprio_set: another process": "EPERM",
    }
}
"""Neighbours that something else than the filter refuses, by driver: gVisor's kernel has no such calls."""
_LANDLOCKED = {"near open_tree": "EACCES", "near open_tree_attr": "EACCES"}
"""Elsewhere Landlock does, which these attempts meet only in a whole sandbox: the root cannot be opened for listing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What came of one claim."""

    id: str
    """Stable: of the case, or ``syscall-…``."""
    area: str
    claim: str
    seeds: tuple[str, ...]
    proves: tuple[str, ...]
    """Sentences of docs/threat-model.md."""
    status: Status
    seen: tuple[str, ...] = ()
    """What was not as it must be, and what was expected; one sentence each."""
    reason: str = ""
    """Why a gap is known, or why it was skipped."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """All findings about one driver."""

    capabilities: Capabilities
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    """What this proof cannot show on this host."""
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether every claim holds or is a known gap that is still one."""
        return not any(each.status in ("failed", "closed") for each in self.findings)

    def count(self, *statuses: Status) -> int:
        """How many findings have one of these."""
        return sum(each.status in statuses for each in self.findings)


def judged(case: Claim, problems: tuple[str, ...], names: tuple[str, ...], seconds: float) -> Finding:
    """The finding for a case that was asked: what was wrong, held against the gaps of a driver with these names."""
    reason = next((case.gaps[name] for name in names if name in case.gaps), "")
    if reason:
        status: Status = "gap" if problems else "closed"
    else:
        status = "failed" if problems else "held"
    return _finding(case, status, seen=problems, reason=reason, seconds=round(seconds, 3))


def gap_names(capabilities: Capabilities) -> tuple[str, ...]:
    """What the driver is called in the cases' gaps: ``rlimits`` besides, where limits hold per process only."""
    per_process = "rlimit" in capabilities.limits.get("memory_bytes", "")
    return (capabilities.driver, "rlimits") if per_process else (capabilities.driver,)


async def prove(
    driver: Driver, cases: Iterable[Case], host: Planted, heard: Callable[[Finding], None] = lambda _: None
) -> Proof:
    """Ask one driver for every claim, one after the other; ``heard`` is told each finding as it comes."""
    started = anyio.current_time()
    found: list[Finding] = []
    watched = True
    names = gap_names(driver.capabilities)

    def tell(finding: Finding) -> None:
        found.append(finding)
        heard(finding)

    asked: list[Case] = []
    for case in cases:
        absent = next((why for name, why in host.absent.items() if name in _planted_names(case)), "")
        if absent:
            tell(_finding(case, "skipped", reason=absent))
        else:
            asked.append(case)
    attempts = [case for case in asked if case.attempt is not None]
    if attempts:
        began = anyio.current_time()
        verdicts = await trial.judge_attempts(driver, attempts, host)
        each = (anyio.current_time() - began) / len(attempts)
        for verdict in verdicts:
            tell(judged(verdict.case, verdict.problems, names, each))
            watched &= verdict.watched
    for finding in await system_calls(driver, host):
        tell(finding)
    for case in asked:
        if case.program is None:
            continue
        began = anyio.current_time()
        try:
            verdict = await trial.judge(driver, case, host)
        except UnsupportedSpec as refused:
            tell(_finding(case, "skipped", reason=f"the driver refuses to run it: {refused}"))
            continue
        tell(judged(verdict.case, verdict.problems, names, anyio.current_time() - began))
        watched &= verdict.watched
    return Proof(
        capabilities=driver.capabilities,
        findings=tuple(found),
        notes=() if watched else (_UNWATCHED,),
        seconds=round(anyio.current_time() - started, 3),
    )


async def system_calls(driver: Driver, host: Planted) -> list[Finding]:
    """Make every call the seccomp policy refuses, and its allowed neighbour, in one sandbox."""
    try:
        cases = calls.load_cases(platform.machine())
    except SandboxUnavailable as problem:
        return [_call_finding("policy", "The filter's refusals.", "skipped", reason=str(problem))]
    stdin = f"import io\nsys.stdin = io.StringIO({calls.payload(cases)!r})\n"
    source = f"{stdin}exec({calls.program()!r}, {{'__name__': '__main__'}})"
    began = anyio.current_time()
    seen = await trial.see(driver, source, _CALLS_LIMITS, host)
    seconds = round((anyio.current_time() - began) / len(cases), 3)
    answers = _answers(seen.outcome.stdout.text if seen.outcome else "")
    missing = f"there is no answer: {seen.unavailable or seen.outcome}"
    otherwise = _NOT_THE_FILTER.get(driver.capabilities.driver, _LANDLOCKED)
    findings = []
    for case in cases:
        wrong = _wrong(case, answers, otherwise) if answers else (missing,)
        claim = (
            f"The system call {case.call} ({case.id}) is refused with {case.answer}, and its allowed neighbour works."
        )
        findings.append(_call_finding(case.id, claim, "failed" if wrong else "held", seen=wrong, seconds=seconds))
    return findings


def _wrong(case: calls.Case, answers: Mapping[str, Any], otherwise: Mapping[str, str]) -> tuple[str, ...]:
    near = f"near {case.id}"
    wanted = {case.id: case.answer, near: otherwise.get(near, calls.ALLOWED)}
    return tuple(
        f"{name} answered {answers.get(name)} instead of {answer}"
        for name, answer in wanted.items()
        if answers.get(name) != answer
    )


def _answers(printed: str) -> Mapping[str, Any]:
    try:
        found = json.load(io.StringIO(printed or "{}"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _call_finding(name: str, claim: str, status: Status, **more: Any) -> Finding:
    identity = "syscall-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return Finding(
        id=identity, area=SYSTEM_CALLS, claim=claim, seeds=_CALLS_SEEDS, proves=_CALLS_PROVE, status=status, **more
    )


def _finding(case: Claim, status: Status, **more: Any) -> Finding:
    return Finding(
        id=case.id,
        area=case.area,
        claim=case.claim,
        seeds=case.seeds,
        proves=case.proves,
        status=status,
        **more,
    )


def _planted_names(case: Case) -> set[str]:
    text = "\n".join(filter(None, (case.attempt, case.before, case.program)))
    return set(re.findall(r"""HOST\[["'](\w+)["']\]""", text))


def host_facts() -> dict[str, Any]:
    """What a reader of a proof needs to know of the machine; nothing that names it or its users."""
    release = platform.freedesktop_os_release() if Path("/etc/os-release").exists() else {}
    groups = "v2" if Path("/sys/fs/cgroup/cgroup.controllers").exists() else "v1"
    modules = Path("/sys/kernel/security/lsm")
    return {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "system": release.get("PRETTY_NAME", ""),
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "root": os.geteuid() == 0,
        "control_groups": groups if Path("/sys/fs/cgroup").is_dir() else "none",
        "security_modules": modules.read_text().strip().split(",") if os.access(modules, os.R_OK) else [],
    }
