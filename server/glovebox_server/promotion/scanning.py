"""Scans files for active content with ``scanner``, each in a sandbox of its own.

A file may take over its parser, so only the form of the result is trusted. Files that were not scanned are listed with
the reason. Must never be imported here: the broker, or anything of MCP.
"""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import anyio

from glovebox_audit.events import Input
from glovebox_sandboxes.contract.base import Plan
from glovebox_sandboxes.contract.errors import RefusedError, SandboxError, UnsupportedSpecError
from glovebox_sandboxes.contract.outcome import Job, Outcome
from glovebox_sandboxes.contract.spec import Limits, SandboxSpec
from glovebox_sandboxes.pool.pool import SandboxProvider
from glovebox_sandboxes.session.connection import AttestedSandbox
from glovebox_sandboxes.session.run import Hooks, run
from glovebox_server.artifacts.record import ArtifactStoreError
from glovebox_server.artifacts.store import ArtifactStore
from glovebox_server.calls import Link, ToolCall
from glovebox_server.core.call import Call
from glovebox_server.core.rights import Rights
from glovebox_server.errors import without_paths
from glovebox_server.guards.approvals.shown import visible
from glovebox_server.guards.budgets.spending import MAX_SCAN_SECONDS
from glovebox_server.guards.redaction.detector import Forms
from glovebox_server.guards.redaction.guard import mask_value
from glovebox_server.promotion import scanner
from glovebox_server.promotion.scanner import ScanFindings

MAX_FILES: Final = 16
"""Files of one call. Each takes a sandbox, and some kilobytes of record."""
MAX_BYTES: Final = 32 << 20
"""Bytes of one file: the bound of the scanner, and of a sandbox's inputs."""
MAX_FINDINGS: Final = 64
"""Findings listed of one file; the scanner lists fewer."""
MAX_COUNTED: Final = 1_000_000
MAX_CHARACTERS: Final = 300
_MAX_KNOWN: Final = 256

LIMITS: Final = Limits(
    wall_seconds=10,
    cpu_seconds=10,
    memory_bytes=512 << 20,  # the largest file, and its decoded forms
    pids=16,
    scratch_bytes=1 << 20,
    output_bytes=1 << 20,
    output_files=1,
    stream_bytes=128 << 10,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """The result of scanning one file."""

    name: str
    uri: str
    sha256: str
    findings: tuple[str, ...] = ()
    more: int = 0
    not_scanned: str = ""
    sandbox_id: str = ""
    plan: Plan | None = None
    known: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FileScanner:
    """Scans files for calls. A call's profile sets drivers and packages, and the redaction of findings."""

    sandboxes: SandboxProvider
    artifacts: ArtifactStore
    forms_of: Callable[[Rights], Forms]
    """Injected values, in the forms in which they are replaced."""

    async def scans(self, call: Call, files: Sequence[Input | Link], known: "Known | None" = None) -> tuple[Scan, ...]:
        """Scan files one after the other, within ``MAX_SCAN_SECONDS``, using ``known`` as a cache.

        Before the call's decision is on record, nothing is recorded. Raises AuditError: a record could not be written.
        """
        found: list[Scan] = []
        with anyio.move_on_after(MAX_SCAN_SECONDS):
            for file in files[:MAX_FILES]:
                scan = known.of(call.request, file) if known else None
                found.append(scan or await self._scan(call, file))
        late = f"the {MAX_SCAN_SECONDS} seconds that there are for the files of a call were over"
        many = f"of the files of a call {MAX_FILES} are looked into"
        for number, file in enumerate(files[len(found) :], len(found)):
            found.append(_not_scanned(file, late if number < MAX_FILES else many))
        for scan in found:
            if known and not scan.known:
                known.note(call.request, scan)
        return tuple(found)

    async def _scan(self, call: Call, file: Input | Link) -> Scan:
        if file.bytes > MAX_BYTES:
            return _not_scanned(file, f"it has more than {MAX_BYTES >> 20} MiB")
        scan = _not_scanned(file, "")

        async def started(sandbox: AttestedSandbox) -> None:
            nonlocal scan
            scan = replace(scan, sandbox_id=sandbox.sandbox.id, plan=sandbox.plan)
            if call.now.is_recorded:
                await call.now.records.record(sandbox.record)

        try:
            outcome = await self._outcome(call, file, started)
            if outcome.ended != "exited" or outcome.code != 0:
                raise _unanswered(outcome.reason or "the scanner failed on it")
            found = findings_of(outcome.stdout.text)
        except (RefusedError, SandboxError, UnsupportedSpecError, ArtifactStoreError) as problem:
            return replace(scan, not_scanned=visible(without_paths(problem.reason))[:MAX_CHARACTERS])
        findings = found.lines
        if call.now.profile.result.redact != "none":
            told, _ = await mask_value({"findings": list(findings)}, self.forms_of(call.now.rights))
            findings = tuple(str(each) for each in told["findings"])
        return replace(scan, findings=findings, more=found.more)

    async def _outcome(
        self, call: Call, file: Input | Link, started: Callable[[AttestedSandbox], Awaitable[None]]
    ) -> Outcome:
        profile, principal = call.now.profile, call.request.principal

        async def before_start() -> None:
            if call.now.is_recorded:
                await call.now.records.flush()

        spec = SandboxSpec(
            limits=LIMITS,
            inputs=True,
            environment=profile.python.environment,
            require_cgroup=profile.limits.enforce == "cgroup",
        )
        prepared = profile.python.start == "warm"
        async with (
            self.artifacts.open(file.uri, principal) as reader,
            self.sandboxes.acquire(
                profile.isolation, spec, before_start, prepared=prepared, code=None, key=principal.id
            ) as sandbox,
        ):
            await started(sandbox)
            sandbox.require_as_planned()
            job = Job(kind="python", payload={"code": scanner.program()}, inputs=(file.uri,))
            return await run(sandbox, job, inputs=[(file.name, reader.chunks())], hooks=Hooks(file=_no_file))


class Known:
    """A cache of findings by content, so that a proposal is not scanned again after the answer.

    Keyed by caller: scan time must not reveal what another caller has. Failures are cached only for the same call.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str], tuple[str, Scan]] = {}

    def of(self, call: ToolCall, file: Input | Link) -> Scan | None:
        """Return the cached findings for this content and name."""
        of, found = self._found.get((call.principal.id, file.sha256, file.name), ("", None))
        if found is None or (found.not_scanned and of != call.id):
            return None
        return replace(found, uri=file.uri, known=True)

    def note(self, call: ToolCall, scan: Scan) -> None:
        """Cache findings; the oldest entry is evicted if the cache is full."""
        self._found.pop(key := (call.principal.id, scan.sha256, scan.name), None)
        if len(self._found) >= _MAX_KNOWN:
            del self._found[next(iter(self._found))]
        self._found[key] = call.id, scan


def findings_of(text: str) -> ScanFindings:
    """Return the findings for the one file that the scanner printed; raise ``SandboxError`` if they are malformed."""
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
