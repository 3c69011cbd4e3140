"""Has files looked into for what acts when they are opened: by ``scanner``, each in a sandbox of its own.

Of what comes back only the form is believed, for a file may have taken its parser over. What was not looked into is
said, and why. Must never be imported here: the broker, or anything of MCP.
"""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import anyio

from glovebox_audit.events import Input
from glovebox_profiles.model import Profile
from glovebox_sandboxes.contract.base import Plan
from glovebox_sandboxes.contract.errors import RefusedError, SandboxError, UnsupportedSpecError
from glovebox_sandboxes.contract.outcome import Job, Outcome
from glovebox_sandboxes.contract.spec import Limits, SandboxSpec
from glovebox_sandboxes.pool.pool import SandboxProvider, SandboxRequest
from glovebox_sandboxes.session.connection import AttestedSandbox
from glovebox_sandboxes.session.run import Hooks, run
from glovebox_server.artifacts.record import ArtifactStoreError
from glovebox_server.artifacts.store import ArtifactStore
from glovebox_server.calls import Link, ToolCall
from glovebox_server.guards.approvals.shown import visible
from glovebox_server.guards.budgets.spending import MAX_SCAN_SECONDS
from glovebox_server.guards.redaction.detector import Forms
from glovebox_server.guards.redaction.guard import mask_value
from glovebox_server.promotion import scanner
from glovebox_server.promotion.scanner import ScanFindings
from glovebox_server.redaction import without_paths

MAX_FILES: Final = 16
"""Of one call. Each takes a sandbox, and its record some kilobytes."""
MAX_BYTES: Final = 32 << 20
"""Of one file: as many as the scanner looks at, and as a sandbox is given."""
MAX_FINDINGS: Final = 64
"""Of one file, that are listed; the scanner lists fewer."""
MAX_COUNTED: Final = 1_000_000
"""A higher count is none of the scanner's."""
MAX_CHARACTERS: Final = 300
"""Of one finding."""
_MAX_KNOWN: Final = 256
"""Files of which it is remembered what was found."""

LIMITS: Final = Limits(
    wall_seconds=10,
    cpu_seconds=10,
    memory_bytes=512 << 20,  # the largest file, and the forms in which it is looked at
    pids=16,
    scratch_bytes=1 << 20,
    output_bytes=1 << 20,
    output_files=1,
    stream_bytes=128 << 10,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What a look into one file gave."""

    name: str
    """The file's."""
    uri: str
    """Its address."""
    sha256: str
    """Digest of its content."""
    findings: tuple[str, ...] = ()
    """What was found, a line each, in which nothing hides."""
    more: int = 0
    """How many more were found, which are not listed."""
    not_scanned: str = ""
    """Why it was not looked into; empty where it was."""
    sandbox_id: str = ""
    """Where that was done; empty where it did not come to that."""
    plan: Plan | None = None
    """Of that sandbox."""
    known: bool = False
    """Whether this was found earlier, in the same content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scanning:
    """How files are looked into for one call."""

    call: ToolCall
    """What they are looked into for; they are its caller's."""
    profile: Profile
    """Says which drivers and packages there are, and what becomes of secrets in what is told."""
    sandboxes: SandboxProvider
    artifacts: ArtifactStore
    forms: Forms
    """Values that are lent, in the forms in which they are replaced."""
    before_start: Callable[[], Awaitable[None]]
    """Awaited before a sandbox is started."""
    started: Callable[[AttestedSandbox], Awaitable[None]]
    """Awaited for each, before the file goes in."""

    async def scans(self, files: Sequence[Input | Link], known: "Known | None" = None) -> tuple[Scan, ...]:
        """Look into files one after the other, within ``MAX_SCAN_SECONDS``.

        Args:
            files: of the caller's.
            known: what was found earlier, and where what is found now is remembered; None where nothing is.

        Raises:
            AuditError: what was to be recorded of it could not be.
        """
        found: list[Scan] = []
        with anyio.move_on_after(MAX_SCAN_SECONDS):
            for file in files[:MAX_FILES]:
                scan = known.of(self.call, file) if known else None
                found.append(scan or await self._scan(file))
                if known and not scan:
                    known.note(self.call, found[-1])
        late = f"the {MAX_SCAN_SECONDS} seconds that there are for the files of a call were over"
        many = f"of the files of a call {MAX_FILES} are looked into"
        for number, file in enumerate(files[len(found) :], len(found)):
            found.append(_not_scanned(file, late if number < MAX_FILES else many))
            if known:
                known.note(self.call, found[-1])
        return tuple(found)

    async def _scan(self, file: Input | Link) -> Scan:
        if file.bytes > MAX_BYTES:
            return _not_scanned(file, f"it has more than {MAX_BYTES >> 20} MiB")
        scan = _not_scanned(file, "")

        async def started(sandbox: AttestedSandbox) -> None:
            nonlocal scan
            scan = replace(scan, sandbox_id=sandbox.sandbox.id, plan=sandbox.plan)
            await self.started(sandbox)

        try:
            found = findings_in(await self._outcome(file, started))
        except (RefusedError, SandboxError, UnsupportedSpecError, ArtifactStoreError) as problem:
            return replace(scan, not_scanned=visible(without_paths(problem.reason))[:MAX_CHARACTERS])
        findings = found.lines
        if self.profile.result.redact != "none":
            told, _ = await mask_value({"findings": list(findings)}, self.forms)
            findings = tuple(str(each) for each in told["findings"])
        return replace(scan, findings=findings, more=found.more)

    async def _outcome(self, file: Input | Link, started: Callable[[AttestedSandbox], Awaitable[None]]) -> Outcome:
        profile = self.profile
        wanted = SandboxRequest(
            isolation=profile.isolation,
            spec=SandboxSpec(
                limits=LIMITS,
                inputs=True,
                environment=profile.python.environment,
                require_cgroup=profile.limits.enforce == "cgroup",
            ),
            prepared=profile.python.start == "warm",
            key=self.call.principal.id,
        )
        async with (
            self.artifacts.open(file.uri, self.call.principal) as reader,
            self.sandboxes.acquire(wanted, before_start=self.before_start) as sandbox,
        ):
            await started(sandbox)
            sandbox.require_as_planned()
            job = Job(kind="python", payload={"code": scanner.program()}, inputs=(file.uri,))
            return await run(sandbox, job, inputs=[(file.name, reader.chunks())], hooks=Hooks(file=_no_file))


class Known:
    """What was found in contents, so that what is proposed is not looked into again once somebody has answered.

    By caller: nobody learns from the time it takes what another has. That it failed holds for the one call.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self._found: dict[tuple[str, str, str], tuple[str, Scan]] = {}

    def of(self, call: ToolCall, file: Input | Link) -> Scan | None:
        """What was found in this content of this name."""
        of, found = self._found.get((call.principal.id, file.sha256, file.name), ("", None))
        if found is None or (found.not_scanned and of != call.id):
            return None
        return replace(found, uri=file.uri, known=True)

    def note(self, call: ToolCall, scan: Scan) -> None:
        """Remember it, in place of what was noted first where there is too much."""
        self._found.pop(key := (call.principal.id, scan.sha256, scan.name), None)
        if len(self._found) >= _MAX_KNOWN:
            del self._found[next(iter(self._found))]
        self._found[key] = call.id, scan


def findings_in(outcome: Outcome) -> ScanFindings:
    """Return what the scanner found in the one file that it was given.

    Raises:
        SandboxError: it gave nothing that has its form.
    """
    if outcome.ended != "exited" or outcome.code != 0:
        raise _unanswered(outcome.reason or "the scanner failed on it")
    return findings_of(outcome.stdout.text)


def findings_of(text: str) -> ScanFindings:
    """Do the same with what it printed."""
    try:
        told: Any = json.loads(text)
    except (ValueError, RecursionError):
        told = None
    found = next(iter(told.values())) if isinstance(told, dict) and len(told) == 1 else None
    lines, more = (found.get("findings"), found.get("more")) if isinstance(found, dict) else (None, None)
    if not isinstance(lines, list) or type(more) is not int or not 0 <= more <= MAX_COUNTED:
        raise _unanswered("the scanner gave no findings, which the file may have brought about")
    shown = tuple(visible(str(line)[:MAX_CHARACTERS])[:MAX_CHARACTERS] for line in lines[:MAX_FINDINGS])
    return ScanFindings(lines=shown, more=more + len(lines) - len(shown))


def _unanswered(reason: str) -> SandboxError:
    return SandboxError("Scanning a file", reason, "Take it for dangerous.")


def _not_scanned(file: Input | Link, reason: str) -> Scan:
    return Scan(name=file.name, uri=file.uri, sha256=file.sha256, not_scanned=reason)


async def _no_file(_name: str, _size: int) -> None:
    return None
