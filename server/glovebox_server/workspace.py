"""Chooses the directory to serve as the workspace: never one that contains, or lies in, the server's own.

Every caller's program may read every file of the workspace. So a named directory that overlaps the server's own
directories is refused. The current directory is not served by default if it overlaps them or holds a person's secrets.
Decision 0026 says why.
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
from glovebox_sandboxes.contract.errors import MisnamedError, Refusal
from glovebox_sandboxes.host import mounts
from glovebox_sandboxes.host.identity import changes_user
from glovebox_server.settings import Settings

OPTION = "--workspace, GLOVEBOX_WORKSPACE"
OPENS = "chmod -R o+rX"
"""The command that lets sandboxes read; the guest prints the same (``ALLOW`` in its ``workspace.paths``)."""
_LOOKED_AT = 1000
"""Entries of a workspace that are checked for read access: a server's start waits for it."""
_NAMED = 3

NOT_SERVED = Refusal(
    rule="workspace.missing",
    reason="This server serves no workspace.",
    hint="Its operator can name one with --workspace or GLOVEBOX_WORKSPACE.",
)
"""The refusal that callers get, without paths of this host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A directory, described so that nesting can be decided."""

    path: Path
    """Absolute and without links; it need not exist."""
    origin: tuple[str, PurePath] | None = None

    def way_to(self, other: "Location") -> PurePath | None:
        """Return the path from here to the other one, across bind mounts; None if it lies elsewhere."""
        if other.path.is_relative_to(self.path):
            return other.path.relative_to(self.path)
        if self.origin and other.origin and self.origin[0] == other.origin[0]:
            here, there = self.origin[1], other.origin[1]
            return there.relative_to(here) if there.is_relative_to(here) else None
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """The directory that is served, or the reason why none is."""

    path: Path | None
    reason: str = ""
    """Why none is served; for the operator, as it may name directories of the host."""
    closed: str = ""
    """Files that sandboxes cannot read, and the fix; for the operator. Empty if none was found."""

    def __str__(self) -> str:
        """Say it in one sentence, with the fix where none is served or sandboxes cannot read it."""
        if self.path is not None:
            return self.closed or str(self.path)
        return f"No workspace is served: {self.reason}. Name one with --workspace or GLOVEBOX_WORKSPACE."


def objection(directory: Location, own: Mapping[str, Location], homes: Sequence[Location] = ()) -> str:
    """Return why programs must not read all of a directory; empty if they may. Pure.

    ``own`` are the server's directories by name; ``homes`` are persons', only if the directory is the default.
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
    """Return the workspace of these settings; none by default over HTTP, whose callers are elsewhere.

    Raises MisnamedError if the named one must not be served.
    """
    if settings.workspace is not None:
        return _served(named(settings.workspace, settings, OPTION))
    if transport == "http":
        return Workspace(path=None, reason="over HTTP there is none unless it is named")
    try:
        found = place(Path.cwd())
        str(found.path).encode()  # records and digests are UTF-8
    except (OSError, UnicodeEncodeError) as problem:
        return Workspace(path=None, reason=f"the current directory cannot be used: {problem}")
    if reason := objection(found, own(settings), _homes(found.path)):
        return Workspace(path=None, reason=f"the current directory, {found.path}, {reason}")
    return _served(found.path)


def named(directory: Path, settings: Settings, where: str) -> Path:
    """Return the absolute path of a named directory. Raises MisnamedError, with ``where``, if refused."""
    found = place(directory)
    if reason := objection(found, own(settings)):
        fix = "Its files are not for programs to read: name another directory."
        raise MisnamedError(where, f"{found.path} {reason}", fix)
    return found.path


def _served(path: Path) -> Workspace:
    return Workspace(path=path, closed=closed(path) if changes_user() else "")


def closed(directory: Path) -> str:
    """Return what other users cannot read in a directory, and the fix; empty if they can read it.

    Sandboxes of a server that runs as root are users that own nothing: they read only what everybody may.
    """
    place = str(directory)
    try:
        found = directory.stat()
        shut = not _open(found)
        with os.scandir(directory) as entries:
            looked = [(each.name, each.stat(follow_symlinks=False)) for each in islice(entries, _LOOKED_AT)]
    except OSError:
        return ""  # gone, or changing: calls report it
    names = sorted(name for name, status in looked if not stat.S_ISLNK(status.st_mode) and not _open(status))
    if not shut and not names:
        return ""
    owner = f", or start Glovebox as user {found.st_uid}, who owns it" if found.st_uid else ""
    why = "as root, Glovebox runs each as a user of its own, who reads what everybody may"
    if shut:
        return f"Sandboxes cannot read {place}: {why}. Run `{OPENS} {shlex.quote(place)}`{owner}."
    # They may be closed on purpose.
    some = shlex.join(f"{place}/{name}" for name in names[:_NAMED])
    rest = f" (and {len(names) - _NAMED} more)" if len(names) > _NAMED else ""
    count = f"{len(names)} of {len(looked)} entries of {place}"
    return printable(f"Sandboxes cannot read {count}: {why}. If they are to, run `{OPENS} {some}`{rest}{owner}.")


def _open(found: os.stat_result) -> bool:
    wanted = stat.S_IROTH | (stat.S_IXOTH if stat.S_ISDIR(found.st_mode) else 0)
    return found.st_mode & wanted == wanted


def place(directory: Path) -> Location:
    """Return a directory of this host as it is now."""
    path = Path(os.path.realpath(directory))  # Path.resolve fails on a loop of links
    return Location(path=path, origin=mounts.origin(path))


def own(settings: Settings) -> Mapping[str, Location]:
    """Return the directories whose files are the server's own."""
    return {name: place(getattr(settings, f"{name}_dir")) for name in ("state", "profiles", "environments", "data")}


def _homes(directory: Path) -> Sequence[Location]:
    """Return the homes of this user and of the directory's owner: ``sudo`` keeps HOME."""
    found = [os.environ.get("HOME", "")]
    for user in {os.geteuid(), directory.stat().st_uid}:
        with suppress(KeyError):
            found.append(pwd.getpwuid(user).pw_dir)
    return [place(Path(each)) for each in dict.fromkeys(found) if each.startswith("/")]
