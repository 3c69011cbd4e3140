"""Scans the files that a call returns, each in a sandbox of its own, with a record."""

from collections.abc import Callable
from dataclasses import dataclass

import anyio

from glovebox_sandboxes.pool.pool import SandboxProvider
from glovebox_sandboxes.session.connection import AttestedSandbox
from glovebox_server.artifacts.store import ArtifactStore
from glovebox_server.core.call import Call, Ran
from glovebox_server.core.rights import Rights
from glovebox_server.guards.journal.journal import artifact_scanned
from glovebox_server.guards.redaction.detector import Forms
from glovebox_server.promotion.scanning import Scanning


@dataclass(frozen=True, slots=True, kw_only=True)
class FileScanner:
    """Scans files for calls."""

    sandboxes: SandboxProvider
    artifacts: ArtifactStore
    forms_of: Callable[[Rights], Forms]

    def of(self, call: Call) -> Scanning:
        """Return the scanner of a call; before its decision is recorded, it records nothing."""
        now = call.now

        async def before_start() -> None:
            if now.is_recorded:
                await now.records.flush()

        async def started(sandbox: AttestedSandbox) -> None:
            if now.is_recorded:
                await now.records.record(sandbox.record)

        return Scanning(
            call=call.request, profile=now.profile, sandboxes=self.sandboxes, artifacts=self.artifacts,
            forms=self.forms_of(now.rights), before_start=before_start, started=started,
        )  # fmt: skip


async def scan(scanner: FileScanner, call: Call) -> None:
    """Scan the files of a call before its last record is written."""

    async def look(ran: Ran) -> None:
        files = (*ran.delivered.artifacts, *ran.delivered.figures)
        if not files:
            return
        call.listener.progress("Looking into files")
        began = anyio.current_time()
        ran.scans = await scanner.of(call).scans(files)
        for scan in ran.scans:
            call.now.records.hold(artifact_scanned(call.request, scan))
        ran.usage["scan_ms"] = round((anyio.current_time() - began) * 1000, 3)

    call.now.on_ran.append(look)
