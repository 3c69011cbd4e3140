"""A job for the guest and its outcome. Frozen data, no I/O.

A program's failure is an outcome; only failures of the sandbox itself are exceptions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Ended = Literal["exited", "signalled", "timed_out", "out_of_memory", "limit"]
"""How a program ended: by itself, by a signal, or stopped for a limit (``limit`` covers processor time and output)."""


CountedBy = Literal["group", "guest", "none"]
"""Who counted what a job used: the host's kernel in the sandbox's control group, everything in it included; or the
guest, by the program's processes: at least so much; or nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One thing for the guest to do."""

    kind: str
    """Name of a module in ``_glovebox_guest.jobs``."""
    payload: Mapping[str, Any]
    """JSON-compatible; what it holds depends on the kind."""
    wall_seconds: float | None = None
    """Shorter than the profile's limit where the caller asked for less."""
    inputs: tuple[str, ...] = ()
    """Artifact URIs the broker copies to ``/input`` before the job starts."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the program, where it has a way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """One output stream, cut in the middle where it was too long."""

    text: str
    """Head and tail, decoded as UTF-8 with replacement characters; a line between them tells the gap."""
    total_bytes: int
    dropped_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A smaller copy of a picture, made in the sandbox for clients that would not take the picture itself."""

    name: str
    """Of the file in ``/output`` that it is a copy of; empty for a picture of the job's."""
    media_type: str = ""
    data: bytes = b""
    """Empty where none could be made."""
    size: tuple[int, int] = (0, 0)
    """Width and height in pixels, by its header."""
    of: tuple[int, int] = (0, 0)
    """Those of the picture itself, as the sandbox says."""
    reason: str = ""
    """Why there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A picture the job returned beside its value."""

    media_type: str
    data: bytes
    shown: Shown | None = None
    """What of it clients are shown instead, where they would not take it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedFile:
    """Something in ``/output`` that is not an artifact, and why."""

    name: str
    reason: str
    count: int | None = None
    """How many files, where this stands for those beyond the ones that are named."""


PATCH = "changes.patch"
"""Name of the file that says what a program changed in its copy of the workspace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlayChanges:
    """What a program changed in its copy of the workspace, as far as the patch carries it."""

    created: tuple[str, ...]
    """Names, the first fifty; ``counts`` has all."""
    changed: tuple[str, ...]
    deleted: tuple[str, ...]
    counts: Mapping[str, int]
    """``created``, ``changed`` and ``deleted``."""
    patch: bool
    """Whether there is a patch: where nothing changed there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What the job spent."""

    wall_ms: float
    cpu_ms: float | None
    """Processor time of the whole sandbox from the job on, or of the program's processes; ``cpu_from`` says which. None
    where the guest could not tell and the host does not count it."""
    memory_peak_bytes: int
    """Peak of the whole sandbox, or of the program's largest process; ``memory_from`` says which."""
    cpu_from: CountedBy = "none"
    """Who counted ``cpu_ms``."""
    memory_from: CountedBy = "none"
    """Who counted ``memory_peak_bytes``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one job. All text and bytes in it were produced by untrusted code."""

    ended: Ended
    code: int | None
    """Exit status, or the signal's number when ``signalled``."""
    reason: str
    """One sentence when the job did not exit by itself, else empty."""
    stdout: Captured
    stderr: Captured
    value: Any
    """JSON value the job returned; None where there is none."""
    blobs: tuple[Blob, ...]
    skipped: tuple[SkippedFile, ...]
    usage: Usage
    changes: OverlayChanges | None = None
    """None where the program had no workspace of its own to change."""
    shown: tuple[Shown, ...] = ()
    """Copies of pictures in ``/output``, and of those of the job's that did not come themselves."""
    problems: tuple[str, ...] = ()
    """What of the value and the pictures could not be taken, one sentence each."""

    @property
    def copies(self) -> tuple[Shown, ...]:
        """Return all smaller copies of pictures, those of the job's own too."""
        return (*self.shown, *(blob.shown for blob in self.blobs if blob.shown is not None))
