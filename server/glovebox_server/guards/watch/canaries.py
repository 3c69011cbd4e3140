"""Canaries: files with a marker that nothing has a reason to read, and the store of their markers.

A marker is forty random letters and digits. ``STATE_DIR/governance/canaries/`` keeps it like a key: a program that
knows it can omit it.
"""

import os
import secrets
import stat
import string
from datetime import UTC, datetime
from pathlib import Path

from pydantic import AwareDatetime, Field

from glovebox_audit.chain import new_call_id
from glovebox_sandboxes.contract.errors import DiagnosedError
from glovebox_server.guards.redaction.detector import MARKER_LENGTH
from glovebox_server.secret_files import FOLDER, MAX_BYTES, Files, StoredItem

MAX_CANARIES = 16
"""At one time: more add no information."""
NAME = "deploy-credentials.env"
"""Default name of a canary; it invites reading."""
_MARKS = string.ascii_lowercase + string.digits
_TEXT = "# Deployment\nDEPLOY_HOST=release.internal\nDEPLOY_TOKEN={}\n"


class Canary(StoredItem):
    """One canary."""

    id: str = Field(pattern=r"^y_[0-9a-z]{26}$")
    """``y_`` and 26 lower-case characters, made as call ids are."""
    workspace: str = Field(max_length=4096)
    path: str = Field(min_length=1, max_length=1024)
    marker: str = Field(pattern=rf"^[a-z0-9]{{{MARKER_LENGTH}}}$")
    made: AwareDatetime

    @property
    def text(self) -> str:
        """Return the content of its file."""
        return _TEXT.format(self.marker)

    @property
    def file(self) -> Path:
        """Return its host path."""
        return Path(self.workspace) / self.path

    @property
    def stands(self) -> bool:
        """Return whether its file is unchanged."""
        try:
            # A process that may write there may have put a link, a FIFO or a directory in its place.
            descriptor = os.open(self.file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                whole = stat.S_ISREG(os.fstat(descriptor).st_mode)
                return whole and os.read(descriptor, MAX_BYTES) == self.text.encode()
            finally:
                os.close(descriptor)
        except OSError:
            return False


def canaries_of(state_dir: Path) -> Files[Canary]:
    """Return the canaries of a state directory."""
    return Files(
        state_dir / FOLDER / "canaries",
        Canary,
        fix=lambda path: f"Remove {path}, and plant another.",
        kind="canary",
        most=MAX_CANARIES,
    )


def new_canary(workspace: Path, path: str) -> Canary:
    """Make a canary with a marker of its own; nothing is written."""
    marker = "".join(secrets.choice(_MARKS) for _ in range(MARKER_LENGTH))
    return Canary(
        id=f"y_{new_call_id()[2:]}", workspace=str(workspace), path=path, marker=marker, made=datetime.now(UTC)
    )


def plant(state_dir: Path, workspace: Path, path: str) -> Canary:
    """Put a new canary into a workspace. The server knows it before its file is there.

    Raises:
        DiagnosedError: there is something of that name, or it cannot be made.
        SecretFileError: it cannot be remembered, or there are too many.
    """
    canary = new_canary(workspace, path)
    files = canaries_of(state_dir)
    files.add(canary.id, canary.model_dump_json().encode())
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(canary.file, flags, 0o644)
    except OSError as problem:
        files.remove(canary.id)
        raise DiagnosedError(f"plant {canary.file}", str(problem.strerror), "Name another with --name.") from problem
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, 0o644)  # sandboxes read as another user
        file.write(canary.text)
    return canary


def remove(state_dir: Path, canary: Canary) -> None:
    """Remove a canary from its workspace, if unchanged, and forget it.

    Raises:
        DiagnosedError: its file cannot be removed.
        SecretFileError: it cannot be forgotten.
    """
    if canary.stands:
        try:
            canary.file.unlink()
        except OSError as problem:
            raise DiagnosedError(f"remove {canary.file}", str(problem.strerror), "Remove it by hand.") from problem
    canaries_of(state_dir).remove(canary.id)
