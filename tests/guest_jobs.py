"""Running a job of the guest in this process, on a directory that stands for the workspace."""

from pathlib import Path
from typing import Any

import pytest

from _glovebox_guest.jobs import listing, read, search, workspace_paths
from _glovebox_guest.program.emit import Emit

_JOBS = {"read": read, "list": listing, "search": search}


class Collected(Emit):
    """Keeps what a job hands back."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.blobs: list[tuple[str, bytes]] = []

    def value(self, value: Any) -> None:
        """Keep a value."""
        self.values.append(value)

    def blob(self, media_type: str, data: bytes) -> None:
        """Keep a picture."""
        self.blobs.append((media_type, data))


class Workspace:
    """A directory and the jobs that see it as their workspace."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, name: str, content: bytes | str = b"") -> Path:
        """Make a file, and the folders it is in."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def collect(self, kind: str, /, **payload: Any) -> Collected:
        """Run a job; return everything it handed back."""
        emit = Collected()
        _JOBS[kind].run(payload, emit)
        assert len(emit.values) == 1
        return emit

    def run(self, kind: str, /, **payload: Any) -> Any:
        """Run a job; return its one value."""
        return self.collect(kind, **payload).values[0]

    def rule(self, kind: str, /, **payload: Any) -> str:
        """Run a job that cannot do what it is asked; return the rule that says why."""
        error = self.run(kind, **payload)["error"]
        assert set(error) == {"rule", "reason", "hint"}
        assert error["reason"].endswith(".")
        if str(self.root.parent) not in str(payload):  # what the caller wrote may be repeated
            assert str(self.root.parent) not in error["reason"] + error["hint"]
        assert isinstance(error["rule"], str)
        return error["rule"]


def make(root: Path, patch: pytest.MonkeyPatch) -> Workspace:
    """Return a workspace at ``root``, which is made."""
    root.mkdir()
    patch.setattr(workspace_paths, "ROOT", str(root))
    return Workspace(root)
