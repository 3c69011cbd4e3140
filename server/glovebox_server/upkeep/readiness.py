"""Checks whether calls can be served: for ``/ready``, the image's health check, and ``glovebox doctor``."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Final

import anyio
import anyio.to_thread

from glovebox_audit.log import AuditLog
from glovebox_sandboxes.runtime import runtime
from glovebox_server.core.rights import ActivePolicy

#: Seconds for which an answer of the disk is cached: anybody may ask, and one check flushes the disk.
KEPT_SECONDS: Final = 5.0

#: Seconds in which the disk must answer.
WAIT_SECONDS: Final = 2.0
_PAGE: Final = bytes(4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """The needs of calls besides a driver."""

    runtime: bool = False
    """``glovebox setup`` of this version was run."""
    log: bool = False
    policy: bool = False
    profiles: bool = False

    @property
    def ready(self) -> bool:
        """Return whether nothing is missing."""
        return self.runtime and self.log and self.policy and self.profiles


class ReadinessProbe:
    """Checks whether a server is ready, however often it is asked. One per server."""

    def __init__(
        self,
        data_dir: Path,
        audit_dir: Path,
        audit: AuditLog,
        policy: ActivePolicy,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._data_dir, self._audit_dir = data_dir, audit_dir
        self._audit, self._policy, self._clock = audit, policy, clock
        self._turn = anyio.Lock()
        self._looking = False
        self._found, self._until = Readiness(), clock()

    async def look(self) -> Readiness:
        """Return the current state; of the disk, that of at most ``KEPT_SECONDS`` ago."""
        async with self._turn:
            if self._clock() >= self._until:
                self._found = Readiness()
                # A disk that does not answer blocks one thread, not one each time.
                with anyio.move_on_after(0 if self._looking else WAIT_SECONDS):
                    self._found = await anyio.to_thread.run_sync(self._look_at_disk, abandon_on_cancel=True)
                self._until = self._clock() + KEPT_SECONDS
        unusable = self._policy.unusable
        return replace(
            self._found, log=self._found.log and self._audit.usable, policy=unusable != "policy",
            profiles=unusable != "profiles",
        )  # fmt: skip

    def _look_at_disk(self) -> Readiness:
        self._looking = True
        try:
            return Readiness(runtime=is_built(self._data_dir), log=can_write(self._audit_dir))
        finally:
            self._looking = False


def is_built(data_dir: Path) -> bool:
    """Return whether the runtime of this version is built."""
    try:
        return runtime.find(data_dir.resolve()) is not None
    except OSError:
        return False


def can_write(audit_dir: Path) -> bool:
    """Return whether the log can be written: a file without a name is, and flushed."""
    log = audit_dir / "audit.jsonl"
    try:
        with tempfile.TemporaryFile(dir=audit_dir, buffering=0) as file:
            file.write(_PAGE)
            os.fdatasync(file.fileno())
        return not log.exists() or os.access(log, os.W_OK)
    except OSError:
        return False
