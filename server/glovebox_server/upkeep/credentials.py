"""Requires that credential files lie outside the workspaces, which tools read and programs change."""

import shlex
from collections.abc import Iterable
from pathlib import Path

from glovebox_profiles.errors import ProfileError
from glovebox_profiles.model import Profile
from glovebox_server.workspace import place

_WHY = "a file there is for tools to read, and a program there would have the server's rights from whoever changes it"


def require_apart(profiles: Iterable[tuple[Path, Profile]], workspaces: Iterable[Path]) -> None:
    """Refuse a key whose file, or the program that prints it, lies in a workspace. The error names host directories."""
    served = [place(each) for each in dict.fromkeys(workspaces)]
    for path, profile in profiles:
        for each in profile.network.credential:
            for file in _files(each.source):
                # Both its target and its own place: a link in a workspace can be changed to lead elsewhere.
                lies = place(file), place(file.parent)
                where = next((one.path for one in served if any(one.way_to(there) is not None for there in lies)), None)
                if where is not None:
                    reason = f'"{each.name}" comes from {file}, which lies in the workspace, {where}: {_WHY}'
                    fix = "Move it out of there, and name its new path in source."
                    raise ProfileError(path, None, "network.credential", reason, fix)


def _files(source: str) -> list[Path]:
    """Return the files that a source names; of a command line each absolute path."""
    kind, _, where = source.partition(":")
    if kind == "exec":
        return [Path(part) for part in shlex.split(where) if part.startswith("/")]
    return [Path(where)] if kind == "file" else []
