"""A job for the guest and its outcome. Frozen data, no I/O.

A program's failure is an outcome; only failures of the sandbox itself are exceptions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Ended = Literal["exited", "signalled", "timed_out", "out_of_memory", "limit"]
"""A program's end: by itself, by a signal, or at a limit (``limit`` covers processor time and output)."""


CountedBy = Literal["group", "guest", "none"]
"""The counter of a job's usage: the host's kernel, in the sandbox's control group, everything in it included; the
guest, by the program's processes, as a lower bound; or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A task for the guest."""

    kind: str
    payload: Mapping[str, Any]
    """JSON-compatible; the content depends on the kind."""
    wall_seconds: float | None = None
    """Shorter than the profile's limit if the caller asked for less."""
    inputs: tuple[str, ...] = ()
    """Artifact URIs the broker copies to ``/input`` before the job starts."""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """One output stream, cut in the middle if too long."""

    text: str
    total_bytes: int
    dropped_bytes: int


NOTHING_PRINTED = Captured(text="", total_bytes=0, dropped_bytes=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A smaller copy of a picture, made in the sandbox for clients that would reject the picture itself."""

    name: str
    media_type: str = ""
    data: bytes = b""
    """Empty if none could be made."""
    size: tuple[int, int] = (0, 0)
    of: tuple[int, int] = (0, 0)
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A picture the job returned beside its value."""

    media_type: str
    data: bytes
    shown: Shown | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedFile:
    """A path in ``/output`` that is not an artifact, and why."""

    name: str
    reason: str
    count: int | None = None


PATCH = "changes.patch"


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlayChanges:
    """A program's changes in its copy of the workspace, as far as the patch carries them."""

    created: tuple[str, ...]
    """Names, the first fifty; ``counts`` has all."""
    changed: tuple[str, ...]
    deleted: tuple[str, ...]
    counts: Mapping[str, int]
    patch: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The resources that a job used."""

    wall_ms: float
    cpu_ms: float | None
    """Processor time of the whole sandbox from the job on, or of the program's processes; ``cpu_from`` says which. None
    if neither guest nor host counted it."""
    memory_peak_bytes: int
    """Peak of the whole sandbox, or of the program's largest process; ``memory_from`` says which."""
    cpu_from: CountedBy = "none"
    memory_from: CountedBy = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one job. All text and bytes in it were produced by untrusted code."""

    ended: Ended
    code: int | None
    """Exit status, or the signal's number when ``signalled``."""
    reason: str = ""
    stdout: Captured = NOTHING_PRINTED
    stderr: Captured = NOTHING_PRINTED
    value: Any
    blobs: tuple[Blob, ...] = ()
    skipped: tuple[SkippedFile, ...] = ()
    usage: Usage
    changes: OverlayChanges | None = None
    shown: tuple[Shown, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def copies(self) -> tuple[Shown, ...]:
        """Return all smaller copies of pictures, including those of the job's own."""
        return (*self.shown, *(blob.shown for blob in self.blobs if blob.shown is not None))
