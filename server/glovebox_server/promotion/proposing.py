"""Files scanned with ``scanner``, and promotions that a caller proposes: shown in full, and made exactly as shown.

Rule 1  What cannot be shown in full is refused without asking: nobody can approve what they cannot read. Its size is
        taken from the artifacts' records and the files' metadata, before anything is read.
Rule 2  An approval is bound to what was shown, with the digests of each file before and after. The plan is computed
        again before the approval is used, and each file is checked before and during the exchange.
Rule 3  Each file is scanned for active content in a sandbox of its own. It may take over its parser, so only the form
        of the result is trusted. Files that were not scanned are listed with the reason.

Must never be imported here: the broker, or anything of MCP.
"""

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread

from glovebox_audit.event import Event
from glovebox_audit.events import ProposalScanned
from glovebox_audit.log import AuditLog
from glovebox_audit.place import AuditError
from glovebox_audit.receipts.parts import Input
from glovebox_sandboxes.contract.base import Limits, Plan, SandboxSpec
from glovebox_sandboxes.contract.errors import DiagnosedError, RefusedError, SandboxError, UnsupportedSpecError
from glovebox_sandboxes.contract.outcome import Job, Outcome, Usage
from glovebox_sandboxes.plural import counted
from glovebox_sandboxes.pool.pool import SandboxProvider
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
from glovebox_server.promotion import plan, scanner, transaction
from glovebox_server.promotion.folder import TargetFolder, opened
from glovebox_server.settings import Settings

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

    def recorded(self) -> dict[str, Any]:
        """Return what records have of it; what is empty is left out."""
        names = ("name", "uri", "findings", "more", "not_scanned", "sandbox_id")
        return {name: value for name in names if (value := getattr(self, name))}


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
        many = f"of the files of a call {MAX_FILES} are scanned"
        for number, file in enumerate(files[len(found) :], len(found)):
            found.append(_not_scanned(file, late if number < MAX_FILES else many))
        for scan in found:
            if known and not scan.known:
                known.note(call.request, scan)
        return tuple(found)

    async def _scan(self, call: Call, file: Input | Link) -> Scan:
        if file.bytes > MAX_BYTES:
            return _not_scanned(file, f"it has more than {MAX_BYTES >> 20} MiB")
        scan, now, profile, principal = _not_scanned(file, ""), call.now, call.now.profile, call.request.principal
        python, in_cgroup = profile.python, profile.limits.enforce == "cgroup"
        spec = SandboxSpec(limits=LIMITS, inputs=True, environment=python.environment, require_cgroup=in_cgroup)
        before_start = now.records.flush if now.is_recorded else anyio.lowlevel.checkpoint
        try:
            async with (
                self.artifacts.open(file.uri, principal) as reader,
                self.sandboxes.acquire(
                    profile.isolation, spec, before_start, prepared=python.start == "warm", code=None, key=principal.id
                ) as sandbox,
            ):
                scan = replace(scan, sandbox_id=sandbox.sandbox.id, plan=sandbox.plan)
                if now.is_recorded:
                    await now.records.record(sandbox.record)
                sandbox.require_as_planned()
                job = Job(kind="python", payload={"code": scanner.program()}, inputs=(file.uri,))
                outcome = await run(sandbox, job, inputs=[(file.name, reader.chunks())], hooks=Hooks(file=_no_file))
            if outcome.ended != "exited" or outcome.code != 0:
                raise _unanswered(outcome.reason or "the scanner failed on it")
            found = findings_of(outcome.stdout.text)
        except (RefusedError, SandboxError, UnsupportedSpecError, ArtifactStoreError) as problem:
            return replace(scan, not_scanned=visible(without_paths(problem.reason))[:MAX_CHARACTERS])
        findings = found.lines
        if profile.result.redact != "none":
            told, _ = await mask_value({"findings": list(findings)}, self.forms_of(now.rights))
            findings = tuple(str(each) for each in told["findings"])
        return replace(scan, findings=findings, more=found.more)


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


def findings_of(text: str) -> scanner.ScanFindings:
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
    return scanner.ScanFindings(lines=shown, more=more + len(lines) - len(shown))


def _unanswered(reason: str) -> SandboxError:
    return SandboxError("Scanning a file", reason, "Take it for dangerous.")


def _not_scanned(file: Input | Link, reason: str) -> Scan:
    return Scan(name=file.name, uri=file.uri, sha256=file.sha256, not_scanned=reason)


async def _no_file(_name: str, _size: int) -> None:
    return None


MAX_SHOWN_BYTES: Final = 48 * 1024
"""Bytes shown to a person: with the rest of the question they fit into a client's form."""
MAX_SHOWN_FINDINGS: Final = 12
MAX_COMPARED_BYTES: Final = 128 * 1024
MAX_COMPARED_LINES: Final = 4000
"""Comparing takes quadratic time at worst."""

_T = TypeVar("_T")
_BY_HAND: Final = "Propose less at a time, or ask the operator to use `glovebox artifact promote`."


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposed:
    """The changes that a call proposes."""

    planned: plan.Planned
    shown: str
    folder: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposals:
    """The planning and execution of proposals. One per server."""

    settings: Settings
    audit: AuditLog
    into: Callable[[], Mapping[str, str]]

    async def proposed(self, call: ToolCall, size: int) -> Proposed:
        """Compute what a call would change with its artifacts, ``size`` bytes in all. Nothing is written.

        Raises RefusedError: it cannot be done or shown; the message has no path of this host.
        """
        if size > MAX_COMPARED_BYTES:
            raise _too_long(f"holds more than {MAX_COMPARED_BYTES} bytes")
        return await anyio.to_thread.run_sync(_told, lambda: self._proposed(call))

    async def scanned(self, proposed: Proposed, scans: Sequence[Scan], call: ToolCall) -> Proposed:
        """Return a copy that shows the findings of the artifacts, after recording them.

        Raises RefusedError: it is too much to be shown; AuditError: it could not be recorded, so no person is asked.
        """
        shown = _text([*_findings(scans), proposed.shown])
        events = []
        for each in (scan for scan in scans if not scan.known):
            about = {"asked_by": call.id, "principal": call.principal.id, "sha256": each.sha256, **each.recorded()}
            if each.plan is not None:
                about |= {"driver": each.plan.driver, "level": each.plan.level, "plan_digest": each.plan.digest}
            events.append(ProposalScanned(**about))
        if events:
            await self.audit.append_all(events)
        looked_into = (each for each in scans if not each.not_scanned)
        found = {each.uri: scanner.ScanFindings(lines=each.findings, more=each.more) for each in looked_into}
        return replace(proposed, planned=proposed.planned.scanned(found), shown=shown)

    async def put(self, proposed: Proposed, call: ToolCall) -> Outcome:
        """Make the approved changes, all or none. Call it shielded, so that cancellation cannot interrupt it.

        Raises RefusedError: nothing was changed; AuditError: nothing was changed, as it could not be recorded.
        """
        began = anyio.current_time()
        done = await anyio.to_thread.run_sync(_told, lambda: self._put(proposed, call))
        value = {"promotion": done.id, "digest": done.digest, "files": [each.name for each in done.changes]}
        usage = Usage(wall_ms=(anyio.current_time() - began) * 1000, cpu_ms=None, memory_peak_bytes=0)
        return Outcome(ended="exited", code=0, value=value, usage=usage)

    def _proposed(self, call: ToolCall) -> Proposed:
        uris, apply = call.arguments["inputs"], call.arguments["apply"]
        if apply and len(uris) != 1:
            raise RefusedError("promotion.patch", "A patch is applied by itself.", "Name one input.")
        into = call.arguments["into"]
        with opened(plan.target(self.settings, dict(self.into()), into), MAX_COMPARED_BYTES) as folder:
            found = plan.planned(self.settings, uris, into, folder, apply=apply)
            if not found.promotion.changes:
                reason = "Nothing would change: the files hold this already."
                raise RefusedError("promotion.same", reason, "Nothing is left to do.")
            return Proposed(planned=found, shown=_shown(found, folder), folder=str(folder.path))

    def _put(self, proposed: Proposed, call: ToolCall) -> transaction.Promotion:
        promotion = replace(proposed.planned.promotion, by=call.principal.id, asked_by=call.id)

        def record(event: Event) -> None:
            anyio.from_thread.run(self.audit.append, event)

        with transaction.locked(self.settings.state_dir) as journal, opened(Path(promotion.path)) as folder:
            transaction.require_settled(transaction.recover(journal, record))
            transaction.require_same(folder, promotion)
            return transaction.promote(folder, journal, promotion, proposed.planned.content, record)


def _told(work: Callable[[], _T]) -> _T:
    try:
        return work()
    except RefusedError as refusal:
        raise RefusedError(refusal.rule, without_paths(refusal.reason), without_paths(refusal.hint)) from refusal
    except (ArtifactStoreError, AuditError):
        raise
    except OSError as problem:
        reason = f"The system refused: {os.strerror(problem.errno or errno.EIO)}; nothing was changed."
        hint = "Tell the operator: the server's user has to be able to read the folder and its files."
        raise RefusedError("promotion.path", reason, hint) from problem
    except DiagnosedError as problem:
        reason = "The state directory cannot be used for promotions just now; nothing was changed."
        hint = "Tell the operator: `glovebox artifact promotions`."
        raise RefusedError("promotion.interrupted", reason, hint) from problem


def _findings(scans: Sequence[Scan]) -> Iterator[str]:
    """Yield the findings, shown above the changes; a proposed file gets only its share of lines."""
    yield "Each artifact was scanned for what acts when it is opened; that nothing was found proves nothing:"
    for scan in scans:
        name = visible(scan.name)
        if scan.not_scanned:
            yield f"  ! {name} was NOT scanned: {scan.not_scanned}"
        elif not scan.findings and not scan.more:
            yield f"  {name}: nothing was found"
        else:
            yield f"  {name}: {counted(len(scan.findings) + scan.more, 'finding')}"
        yield from (f"  ! found: {each}" for each in scan.findings[:MAX_SHOWN_FINDINGS])
        if rest := max(0, len(scan.findings) - MAX_SHOWN_FINDINGS) + scan.more:
            yield f"  ! and {rest} more{'' if scan.more else ', which are on record'}"


def _shown(found: plan.Planned, folder: TargetFolder) -> str:
    size = lines = 0
    for file in found.files:
        before, after = file.change.before, file.change.after
        size += sum(each.bytes for each in (before, after) if each)
        if size > MAX_COMPARED_BYTES:
            raise _too_long(f"has files of more than {MAX_COMPARED_BYTES} bytes together")
        lines += folder.head(file.change.name, MAX_COMPARED_BYTES).count(b"\n") if before else 0
        lines += sum(chunk.count(b"\n") for chunk in file.content()) if after else 0
        if lines > MAX_COMPARED_LINES:
            raise _too_long(f"has files of more than {MAX_COMPARED_LINES} lines together")
    told = [f"{counted(len(found.files), 'file')} of the folder {visible(found.promotion.folder)} would change:"]
    for file in found.files:
        name, difference = visible(file.change.name), file.difference(folder)
        if difference is None:
            reason = f"{name} is no text, or held none, and nobody can be asked about what they cannot read."
            raise RefusedError("promotion.shown", reason, _BY_HAND)
        told.append(f"{name}: {visible(file.told())}")
        told += (f"  ! {visible(risk)}" for risk in file.risks)
        told += (f"  │ {visible(line)}" for line in difference or ("No line changes.",))
    if found.same:
        told.append(f"The same already: {', '.join(map(visible, found.same))}")
    told.append(f"Digest: {found.promotion.digest}")
    return _text(told)


def _text(lines: Sequence[str]) -> str:
    text = "\n".join(lines)
    if len(text.encode()) > MAX_SHOWN_BYTES:
        raise _too_long(f"takes more than {MAX_SHOWN_BYTES} bytes to be shown")
    return text


def _too_long(what: str) -> RefusedError:
    return RefusedError("promotion.shown", f"This {what}, which is too much for somebody to be asked about.", _BY_HAND)
