"""Proves every claim against one driver on this host, and reports the findings.

The controls stay out: they attack the host for real, and belong to the tests of the cases.
"""

import platform
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, cast

import anyio.abc

from glovebox_sandboxes.conformance import case as texts
from glovebox_sandboxes.conformance import trial
from glovebox_sandboxes.conformance.case import LIMITS, Case, ClaimCase
from glovebox_sandboxes.conformance.host import Planted
from glovebox_sandboxes.contract.base import Capabilities, Driver, Plan, Sandbox, SandboxSpec, Source
from glovebox_sandboxes.contract.errors import SandboxError, UnsupportedSpecError
from glovebox_sandboxes.seccomp import cases as calls

Status = Literal["held", "failed", "gap", "closed", "skipped"]
"""``gap``: a known failure; ``closed``: a known failure that now holds; ``skipped``: not asked."""

Start = Literal["cold", "forked"]
"""``cold``: started for a call; ``forked``: prepared ahead of it, if that is done in another way."""

AT_ONCE = 2

_UNWATCHED = (
    "processes of the sandbox cannot be seen from outside by this user, so that they end with it is not shown here"
)
_CALLS_LIMITS = replace(LIMITS, wall_seconds=60.0, cpu_seconds=60)
"""About 400 attempts, each in a process of its own; a kernel in user space takes ten seconds for them."""
_NOT_THE_FILTER: Mapping[str, Mapping[str, str]] = {
    "gvisor": {
        "near pidfd_getfd": "ENOSYS",
        "near process_mrelease": "ENOSYS",
        "near ioprio_set: another process": "EPERM",
    }
}
"""Neighbours that something other than the filter refuses, by driver: gVisor's kernel has no such calls."""
_LANDLOCKED = {"near open_tree": "EACCES", "near open_tree_attr": "EACCES"}
"""Landlock refuses these elsewhere, in a whole sandbox only: the root cannot be opened for listing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseFinding:
    """The result of one claim."""

    id: str
    """Stable: of the case, or ``syscall-…``."""
    area: str
    claim: str
    seeds: tuple[str, ...]
    proves: tuple[str, ...]
    status: Status
    seen: tuple[str, ...] = ()
    """Deviations with the expected values; one sentence each."""
    reason: str = ""
    """Why a gap is known, or why it was skipped."""
    seconds: float = 0.0


Job = Callable[[], Awaitable[list[CaseFinding]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """All findings about one driver."""

    capabilities: Capabilities
    start: Start
    findings: tuple[CaseFinding, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def holds(self) -> bool:
        """Return whether every claim holds or is a known gap that still fails."""
        return not any(each.status in ("failed", "closed") for each in self.findings)

    def count(self, *statuses: Status) -> int:
        """Return the number of findings with one of these statuses."""
        return sum(each.status in statuses for each in self.findings)


def judged(case: ClaimCase, problems: tuple[str, ...], names: tuple[str, ...], seconds: float) -> CaseFinding:
    """Return the finding of a case: its problems, compared with the gaps of a driver with these names."""
    reason = next((case.gaps[name] for name in names if name in case.gaps), "")
    if reason:
        status: Status = "gap" if problems else "closed"
    else:
        status = "failed" if problems else "held"
    return _finding(case, status, seen=problems, reason=reason, seconds=round(seconds, 3))


def gap_names(capabilities: Capabilities) -> tuple[str, ...]:
    """Return the driver's names in the cases' gaps.

    Also ``rlimits``, if limits hold per process only, and ``gvisor-docker``, if the Engine starts gVisor.
    """
    per_process = "rlimit" in capabilities.limits.get("memory_bytes", "")
    by_engine = capabilities.version.endswith("(runsc)")
    return (capabilities.driver, *["rlimits"] * per_process, *["gvisor-docker"] * by_engine)


async def prove(
    driver: Driver,
    cases: Iterable[Case],
    host: Planted,
    heard: Callable[[CaseFinding], None] = lambda _: None,
    start: Start = "cold",
) -> Proof:
    """Test every claim against one driver; report each finding to ``heard`` as it comes. The report names ``start``."""
    started = anyio.current_time()
    watched = True
    names = (*gap_names(driver.capabilities), start)

    async def ask(these: Sequence[Case]) -> list[CaseFinding]:
        """Judge all attempts, or one program."""
        nonlocal watched
        began = anyio.current_time()
        if these[0].attempt is not None:
            verdicts = await trial.judge_attempts(driver, these, host)
        else:
            try:
                verdicts = [await trial.judge(driver, these[0], host)]
            except UnsupportedSpecError as refused:
                return [_finding(these[0], "skipped", reason=f"the driver refuses to run it: {refused}")]
        watched &= all(verdict.watched for verdict in verdicts)
        each = (anyio.current_time() - began) / len(these)
        return [judged(verdict.case, verdict.problems, names, each) for verdict in verdicts]

    skipped: list[CaseFinding] = []
    asked: list[Case] = []
    for case in cases:
        planted = re.findall(r"""HOST\[["'](\w+)["']\]""", f"{case.attempt}\n{case.before}\n{case.program}")
        if absent := next((why for name, why in host.absent.items() if name in planted), ""):
            skipped.append(_finding(case, "skipped", reason=absent))
            heard(skipped[-1])
        else:
            asked.append(case)
    tried = [case for case in asked if case.attempt is not None]
    jobs: list[Job] = [partial(ask, tried)] if tried else []
    jobs += [partial(system_calls, driver, host)]
    jobs += [partial(ask, [case]) for case in asked if case.program is not None]
    found = [*skipped, *await together(jobs, heard)]
    return Proof(
        capabilities=driver.capabilities,
        start=start,
        findings=tuple(found),
        notes=() if watched else (_UNWATCHED,),
        seconds=round(anyio.current_time() - started, 3),
    )


async def together(jobs: Sequence[Job], heard: Callable[[CaseFinding], None]) -> list[CaseFinding]:
    """Run the jobs, ``AT_ONCE`` at a time; return findings in the order of the jobs, and report each as it comes."""
    found: list[list[CaseFinding]] = [[] for _ in jobs]
    turns = anyio.CapacityLimiter(AT_ONCE)

    async def one(number: int, job: Job) -> None:
        async with turns:
            found[number] = await job()
        for finding in found[number]:
            heard(finding)

    async with anyio.create_task_group() as tasks:
        for number, job in enumerate(jobs):
            tasks.start_soon(one, number, job)
    return [finding for findings in found for finding in findings]


async def system_calls(driver: Driver, host: Planted) -> list[CaseFinding]:
    """Make every call the seccomp policy refuses, and its allowed neighbour, in one sandbox."""
    try:
        cases = calls.load_cases(platform.machine())
    except SandboxError as problem:
        return [_finding(_call_case("policy", "The filter's refusals."), "skipped", reason=str(problem))]
    source = calls.program() + texts.attempts(calls.attempts(cases))
    began = anyio.current_time()
    seen = await trial.see(driver, source, _CALLS_LIMITS, host)
    seconds = (anyio.current_time() - began) / len(cases)
    answers = texts.answers(seen.stdout)
    missing = (f"there is no answer: {seen.unavailable or seen.outcome}",)
    otherwise = _NOT_THE_FILTER.get(driver.capabilities.driver, _LANDLOCKED)
    findings = []
    for case in cases:
        near = f"near {case.id}"
        wrong = tuple(
            f"{name} answered {answers.get(name)} instead of {answer}"
            for name, answer in ((case.id, case.answer), (near, otherwise.get(near, calls.ALLOWED)))
            if answers.get(name) != answer
        )
        claim = (
            f"The system call {case.call} ({case.id}) is refused with {case.answer}, and its allowed neighbour works."
        )
        findings.append(judged(_call_case(case.id, claim), wrong if answers else missing, (), seconds))
    return findings


def _call_case(name: str, claim: str) -> ClaimCase:
    identity = "syscall-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return ClaimCase(id=identity, area="system-calls", claim=claim, seeds=("I4",), proves=("GB-KERN-3",))


def _finding(case: ClaimCase, status: Status, **more: Any) -> CaseFinding:
    about = {name: getattr(case, name) for name in ("id", "area", "claim", "seeds", "proves")}
    return CaseFinding(**about, status=status, **more)


@dataclass(slots=True, eq=False)
class Prepared:
    """A ``Driver`` that opens every sandbox from a source of its plan, which starts when first needed."""

    _driver: Driver
    _tasks: anyio.abc.TaskGroup
    _sources: dict[str, Source] = field(default_factory=dict)
    _turn: anyio.Lock = field(default_factory=anyio.Lock)

    def __getattr__(self, name: str) -> Any:
        """Return what is the driver's own: its name, capabilities, plans and sources."""
        return getattr(self._driver, name)

    @asynccontextmanager
    async def open(self, plan: Plan) -> AsyncIterator[Sandbox]:
        """Open a prepared sandbox; see ``Driver.open``."""
        async with self._turn:
            if plan.digest not in self._sources:
                self._sources[plan.digest] = await self._tasks.start(self._hold, plan)
        async with self._sources[plan.digest].open() as sandbox:
            yield sandbox

    async def _hold(self, plan: Plan, *, task_status: anyio.abc.TaskStatus[Source]) -> None:
        async with self._driver.source(plan) as source:
            task_status.started(source)
            await anyio.sleep_forever()


@asynccontextmanager
async def prepared(driver: Driver) -> AsyncIterator[Driver]:
    """Provide the same driver, with every sandbox prepared, for the length of the block."""
    async with anyio.create_task_group() as tasks:
        yield cast("Driver", Prepared(driver, tasks))
        tasks.cancel_scope.cancel()


async def has_another_way(driver: Driver) -> bool:
    """Return whether prepared sandboxes are made in another way than those started for a call."""
    try:
        async with driver.source(driver.plan(SandboxSpec(limits=LIMITS))) as source:
            return source.make is not None
    except SandboxError:
        # Then every claim is asked all the same, and fails for this reason.
        return True
