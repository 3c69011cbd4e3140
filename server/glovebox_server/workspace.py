"""Which directory is served as the workspace: never one that holds, or is held by, what is the server's own.

Every caller's program may read every file of the workspace. So a directory that was named and overlaps the server's own
directories is refused, and the current directory, which nobody named, is not served where it does, nor where it holds
a person's secrets. Decision 0026 says why.
"""

import os
import pwd
import shlex
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePath
from typing import Literal

from glovebox_audit.printable import printable
from glovebox_sandboxes.contract.errors import DiagnosedError, Refusal
from glovebox_sandboxes.host import mounts
from glovebox_sandboxes.host.identity import changes_user
from glovebox_server.settings import Settings

OPTION = "--workspace, GLOVEBOX_WORKSPACE"
OPENS = "chmod -R o+rX"
"""What lets sandboxes read; so says the guest too, where the host denied it (``ALLOW`` in its ``workspace.paths``)."""
_LOOKED_AT = 1000
"""Entries of a workspace that are looked at for what is closed: a server's start waits for it."""
_NAMED = 3
"""Of those that are closed."""

NOT_SERVED = Refusal(
    rule="workspace.missing",
    reason="This server serves no workspace.",
    hint="Its operator can name one with --workspace or GLOVEBOX_WORKSPACE.",
)
"""What callers are told: nothing of where things are on this host."""


class WorkspaceError(DiagnosedError):
    """The directory that was named would give away what is the server's own, so nothing is served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A directory, as far as it shows which other lies in it."""

    path: Path
    """Whole and without links; it need not exist."""
    origin: tuple[str, PurePath] | None = None
    """See ``mounts.origin``."""

    def way_to(self, other: "Location") -> PurePath | None:
        """The path from here to the other one, under whatever name either was bound; None where it lies elsewhere."""
        if other.path.is_relative_to(self.path):
            return other.path.relative_to(self.path)
        if self.origin and other.origin and self.origin[0] == other.origin[0]:
            here, there = self.origin[1], other.origin[1]
            return there.relative_to(here) if there.is_relative_to(here) else None
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """The directory that is served, or that none is."""

    path: Path | None
    reason: str = ""
    """Why none is; for the operator, as it may name directories of the host."""
    closed: str = ""
    """What of it sandboxes cannot read, and what to do; for the operator. Empty where nothing is seen to be closed."""

    def __str__(self) -> str:
        """Say it in one sentence, with what to do where none is served, or it cannot be read."""
        if self.path is not None:
            return self.closed or str(self.path)
        return f"No workspace is served: {self.reason}. Name one with --workspace or GLOVEBOX_WORKSPACE."


def objection(directory: Location, own: Mapping[str, Location], homes: Sequence[Location] = ()) -> str:
    """Why programs must not read all of a directory; empty if nothing speaks against it. Pure.

    Args:
        directory: what would be served.
        own: the server's directories by their names.
        homes: of persons, where nobody named the directory; else none.
    """
    for name, place in own.items():
        if relation := _relation(directory, place):
            return f"{relation} the server's {name} directory, {place.path}"
    for home in homes:
        if (relation := _relation(directory, home)) in ("is", "contains"):
            return f"{relation} the home directory {home.path}"
        way = home.way_to(directory)
        if way and way.parts[0].startswith("."):
            return f"lies in {home.path / way.parts[0]}, where programs keep what is private"
    return ""


def _relation(directory: Location, other: Location) -> Literal["is", "contains", "lies in", ""]:
    inside, outside = directory.way_to(other), other.way_to(directory)
    if inside and outside:
        return "is"
    return "contains" if inside else "lies in" if outside else ""


def find(settings: Settings, transport: str) -> Workspace:
    """The workspace of a server with these settings.

    Args:
        settings: where things are, and what was named.
        transport: ``stdio``, ``http`` or ``cli``; over HTTP the callers are not where the server was started.

    Raises:
        WorkspaceError: the one that was named must not be served.
    """
    if settings.workspace is not None:
        return _served(named(settings.workspace, settings, OPTION))
    if transport == "http":
        return Workspace(path=None, reason="over HTTP there is none unless it is named")
    try:
        found = place(Path.cwd())
        str(found.path).encode()  # records and digests are UTF-8
    except OSError as problem:
        return Workspace(path=None, reason=f"the current directory cannot be used: {problem.strerror}")
    except UnicodeEncodeError:
        return Workspace(path=None, reason="the current directory's name is not UTF-8")
    if reason := objection(found, own(settings), _homes(found.path)):
        return Workspace(path=None, reason=f"the current directory, {found.path}, {reason}")
    return _served(found.path)


def named(directory: Path, settings: Settings, where: str) -> Path:
    """The whole path of a directory that somebody named to be served.

    Raises:
        WorkspaceError: it must not be; says where it was named.
    """
    found = place(directory)
    if reason := objection(found, own(settings)):
        fix = "Its files are not for programs to read: name another directory."
        raise WorkspaceError(where, f"{found.path} {reason}", fix)
    return found.path


def _served(path: Path) -> Workspace:
    return Workspace(path=path, closed=closed(path) if changes_user() else "")


def closed(directory: Path) -> str:
    """Say what other users cannot read of a directory and of what lies in it, and what opens it; empty for nothing.

    Sandboxes of a server that runs as root are users that own nothing: what is not for everybody is not for them.
    """
    place = str(directory)
    try:
        found = directory.stat()
        shut = not _open(found)
        with os.scandir(directory) as entries:
            looked = [(each.name, each.stat(follow_symlinks=False)) for each in islice(entries, _LOOKED_AT)]
    except OSError:
        return ""  # gone, or changing: calls say so
    names = sorted(name for name, status in looked if not stat.S_ISLNK(status.st_mode) and not _open(status))
    if not shut and not names:
        return ""
    owner = f", or start Glovebox as user {found.st_uid}, who owns it" if found.st_uid else ""
    why = "as root, Glovebox runs each as a user of its own, who reads what everybody may"
    if shut:
        return f"Sandboxes cannot read {place}: {why}. Run `{OPENS} {shlex.quote(place)}`{owner}."
    # Somebody may have closed them on purpose.
    some = shlex.join(f"{place}/{name}" for name in names[:_NAMED])
    rest = f" (and {len(names) - _NAMED} more)" if len(names) > _NAMED else ""
    count = f"{len(names)} of {len(looked)} entries of {place}"
    return printable(f"Sandboxes cannot read {count}: {why}. If they are to, run `{OPENS} {some}`{rest}{owner}.")


def _open(found: os.stat_result) -> bool:
    wanted = stat.S_IROTH | (stat.S_IXOTH if stat.S_ISDIR(found.st_mode) else 0)
    return found.st_mode & wanted == wanted


def place(directory: Path) -> Location:
    """A directory of this host as it is now."""
    path = Path(os.path.realpath(directory))  # Path.resolve does not end well in a circle of links
    return Location(path=path, origin=mounts.origin(path))


def own(settings: Settings) -> Mapping[str, Location]:
    """The directories whose files are the server's own."""
    return {
        "state": place(settings.state_dir),
        "profiles": place(settings.profiles_dir),
        "environments": place(settings.environments_dir),
        "data": place(settings.data_dir),
    }


def _homes(directory: Path) -> Sequence[Location]:
    """The homes of whoever runs this, and of the directory's owner: ``sudo`` leaves one where it was."""
    found = [os.environ.get("HOME", "")]
    for user in {os.geteuid(), directory.stat().st_uid}:
        with suppress(KeyError):
            found.append(pwd.getpwuid(user).pw_dir)
    return [place(Path(each)) for each in dict.fromkeys(found) if each.startswith("/")]
