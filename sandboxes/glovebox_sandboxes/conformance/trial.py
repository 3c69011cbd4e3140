"""Runs cases in sandboxes of one driver, and judges the results from inside and outside."""

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from glovebox_sandboxes.conformance import case as texts
from glovebox_sandboxes.conformance.case import LIMITS, Case
from glovebox_sandboxes.conformance.host import EARLIER, Planted
from glovebox_sandboxes.contract.base import ORIGINAL, WORKSPACE, Driver, Limits, Mount, SandboxSpec
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.contract.outcome import Job, Outcome
from glovebox_sandboxes.session import connection, run
from glovebox_sandboxes.session.connection import StreamSink, whole

_GONE_SECONDS = 10.0
_POLL_SECONDS = 0.01
_TICKS = os.sysconf("SC_CLK_TCK")
_BEGAN = 19
"""Index of the start time behind the name in ``/proc/PID/stat``: ``starttime`` in proc(5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of one case."""

    case: Case
    problems: tuple[str, ...]
    watched: bool = True
    """True if its processes were visible from outside, so that their later absence means something."""


@dataclass(slots=True)
class TrialResult:
    """One program in one sandbox, from inside and outside."""

    outcome: Outcome | None = None
    unavailable: str = ""
    files: dict[str, int] = field(default_factory=dict)
    torn: tuple[str, ...] = ()
    """Files whose received size differs from the announced one."""
    left: tuple[str, ...] = ()
    watched: bool = True

    @property
    def stdout(self) -> str:
        """Return the printed text; empty if it did not run."""
        return self.outcome.stdout.text if self.outcome else ""


async def judge(driver: Driver, case: Case, host: Planted) -> Verdict:
    """Run a case that is a program, in a sandbox of its own (or two), and judge it.

    Raises UnsupportedSpecError: the driver cannot enforce what the case needs.
    """
    fingerprint = host.fingerprint()
    problems: list[str] = []
    if case.before is not None:
        earlier = await see(driver, case.before, case.in_force(), host)
        problems += _aftermath(earlier)
        if earlier.outcome is None or earlier.outcome.ended != "exited":
            problems.append(f"the program before it did not run: {earlier.outcome or earlier.unavailable}")
    seen = await see(driver, case.program or "", case.in_force(), host, overlay=case.overlay)
    problems += [*_inside(case, seen), *_aftermath(seen)]
    if case.repeated is not None:
        again = await see(driver, case.program or "", case.in_force(), host)
        problems += _aftermath(again)
        problems += _repeated(case, seen.stdout.split(), again.stdout.split())
    if host.fingerprint() != fingerprint:
        problems.append("files of the host were changed")
    return Verdict(case=case, problems=tuple(problems), watched=seen.watched)


async def judge_attempts(driver: Driver, cases: Sequence[Case], host: Planted) -> list[Verdict]:
    """Make the attempts of all these cases in one sandbox and judge each."""
    fingerprint = host.fingerprint()
    seen = await see(driver, texts.attempts({case.id: case.attempt for case in cases}), LIMITS, host)
    common = _aftermath(seen)
    if host.fingerprint() != fingerprint:
        common.append("files of the host were changed by one of the attempts")
    answers = texts.answers(seen.stdout)
    verdicts = []
    for case in cases:
        answer = answers.get(case.id)
        problems = list(common)
        if answer is None:
            problems.append(f"there is no answer: {seen.unavailable or seen.outcome}")
        elif not re.fullmatch(case.answer, answer, re.DOTALL):
            problems.append(f"it answered {answer!r} instead of {case.answer}")
        verdicts.append(Verdict(case=case, problems=tuple(problems), watched=seen.watched))
    return verdicts


def spec(limits: Limits, workspace: Path, *, overlay: bool = False) -> SandboxSpec:
    """Return the spec of every case: all a profile can grant except network, so that nothing is safe by its absence."""
    mounts = (Mount(source=str(workspace), target=ORIGINAL if overlay else WORKSPACE),)
    return SandboxSpec(limits=limits, mounts=mounts, overlay=overlay, output=True, inputs=True)


async def see(driver: Driver, program: str, limits: Limits, host: Planted, *, overlay: bool = False) -> TrialResult:
    """Run a program in its own sandbox, and examine it from inside and outside; raises UnsupportedSpecError."""
    seen = TrialResult()
    plan = driver.plan(spec(limits, host.workspace, overlay=overlay))
    text = texts.program(program, texts.INSIDE, host.names)

    async def file(name: str, size: int) -> StreamSink:
        seen.files[name] = size
        return _Counted(seen, name, size)

    namespaces: Mapping[str, int] = {}
    identity, ran = "", now()
    try:
        async with driver.open(plan) as sandbox:
            identity = sandbox.id
            proved = await connection.attest(sandbox, plan)
            namespaces, ran = proved.measured.namespaces, now()
            # A normal user does not see processes of others; a kernel in user space has numbers of its own.
            seen.watched = bool(processes(namespaces) or _groups(identity))
            if differences := proved.attestation.differences:
                seen.unavailable = f"the isolation is not what was planned: {differences}"
            else:
                job = Job(kind="python", payload={"code": text})
                name, content = EARLIER
                seen.outcome = await run.run(proved, job, inputs=[(name, whole(content))], hooks=run.Hooks(file=file))
    except SandboxError as problem:
        seen.unavailable = str(problem)
    seen.left = await left(namespaces, identity, ran)
    return seen


class _Counted:
    """A sink that keeps only names and sizes of files."""

    def __init__(self, seen: TrialResult, name: str, size: int) -> None:
        self._seen = seen
        self._name = name
        self._missing = size

    async def data(self, data: bytes) -> None:
        self._missing -= len(data)

    async def end(self) -> None:
        if self._missing:
            self._seen.torn += (self._name,)


def _inside(case: Case, seen: TrialResult) -> list[str]:
    found = seen.outcome
    if found is None:
        return [f"the sandbox failed: {seen.unavailable}"]
    value = found.value if isinstance(found.value, dict) else {}
    skipped = {each.name: each.reason for each in found.skipped}
    wanted = (
        ("end", found.ended, case.ended),
        ("code", found.code, found.code if case.code is None else case.code),
        ("error", (value.get("error") or {}).get("type", ""), case.error),
        ("loss of bytes", bool(found.stdout.dropped_bytes or found.stderr.dropped_bytes), case.dropped),
        ("files", seen.files, seen.files if case.files is None else case.files),
        ("files smaller than announced", seen.torn, ()),
    )
    problems = [
        f"{what}: {is_there!r} instead of {right!r}"
        for what, is_there, right in wanted
        if is_there != right and not (isinstance(right, tuple) and is_there in right)
    ]
    patterns = (
        ("reason", case.reason, found.reason),
        ("standard output", case.stdout, found.stdout.text),
        ("standard error", case.stderr, found.stderr.text),
        ("value", case.value, str(value.get("value"))),
        *((f"reason to skip {name}", pattern, skipped.get(name, "")) for name, pattern in case.skipped.items()),
    )
    problems += [
        f"{what}: {text[-500:]!r} does not match {pattern}"
        for what, pattern, text in patterns
        if pattern and not re.search(pattern, text)
    ]
    if problems and found.stderr.text:
        problems.append(f"standard error ends with {found.stderr.text[-800:]!r}")
    return problems


def _repeated(case: Case, first: Sequence[str], second: Sequence[str]) -> list[str]:
    if case.repeated == "same":
        return [] if first == second else [f"two runs printed different things: {first} and {second}"]
    same = [one for one, another in zip(first, second, strict=False) if one == another]
    if same or len(first) != len(second) or not first:
        return [f"two runs printed the same {same or 'nothing'}: {first} and {second}"]
    return []


def _aftermath(seen: TrialResult) -> list[str]:
    return [f"left behind: {what}" for what in seen.left]


def now() -> float:
    """Return seconds since this host was started, on the clock of processes' start times."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def left(namespaces: Mapping[str, int], identity: str, ran: float) -> tuple[str, ...]:
    """Return what is left of a sandbox a moment after it was closed; it was there at ``ran``, by ``now``."""
    found: tuple[str, ...] = ()
    with anyio.move_on_after(_GONE_SECONDS):
        # The kernel does not announce the end of the last process of a namespace that is not ours.
        while found := (*processes(namespaces, ran), *_groups(identity)):  # noqa: ASYNC110 - only /proc tells
            await anyio.sleep(_POLL_SECONDS)
    return found


def processes(namespaces: Mapping[str, int], ran: float | None = None) -> tuple[str, ...]:
    """Return every process in the pid namespace of these, as pid and command line, without zombies.

    The kernel reuses the number of an ended namespace, perhaps for another server's sandbox. ``ran`` is a moment at
    which the intended one was there: a namespace whose first process began later is another, because that process lives
    as long as its namespace.
    """
    wanted = f"pid:[{namespaces.get('pid')}]"
    found = []
    for process in Path("/proc").iterdir():
        try:
            if not process.name.isdigit() or str((process / "ns/pid").readlink()) != wanted:
                continue
            state = (process / "stat").read_text().rpartition(")")[2].split()
            is_later = ran is not None and int(state[_BEGAN]) / _TICKS > ran
            if is_later and re.search(r"^NSpid:.*\t1$", (process / "status").read_text(), re.MULTILINE):
                return ()
            # A zombie is a line in a table, which the host's own process 1 removes at any time.
            if state[0] != "Z":
                found.append(f"process {process.name}: {(process / 'cmdline').read_bytes()[:200]!r}")
        except OSError:
            continue  # it has ended, or is not ours to look at
    return tuple(found)


def _groups(identity: str) -> tuple[str, ...]:
    if not identity:
        return ()
    patterns = (f"*/glovebox/*/{identity}", f"glovebox-*/{identity}", f"*/glovebox-*/{identity}")
    return tuple(str(path) for pattern in patterns for path in Path("/sys/fs/cgroup").glob(pattern))
