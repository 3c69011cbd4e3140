"""Finds a file of the workspace by the caller's path, symlink by symlink. Standard library only.

The mount is the boundary: outside the workspace there is only the sandbox's own runtime. Still no caller's path leaves
it, so that an answer is never about a file that only looks like one of the workspace's. The path is walked with one
openat(2) per part and without following links in the kernel, so no swap in between changes the result.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager

from _glovebox_guest.program.emit import Emit
from _glovebox_guest.stdlib import Any, Callable, Iterator, NoReturn
from _glovebox_guest.workspace.hidden import FLAGS, HiddenPaths

ROOT = "/workspace"
"""Mount point of the workspace; ``glovebox_sandboxes.contract.base.WORKSPACE`` without its imports."""
MAX_LINKS = 40
"""Symlinks followed for one path: the kernel's own limit, see path_resolution(7)."""
_SHOWN = 200

ALLOW = (
    "The operator has to allow it on the host: sandboxes of a server that runs as root are another user than root, "
    "so everybody must be able to read what they are to read (chmod -R o+rX)."
)
"""Advice where the host denies reading: the caller cannot change that."""

_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class JobRefusedError(Exception):
    """A caller's request that cannot be met; jobs turn it into their value.

    Twin of ``glovebox_sandboxes.contract.errors.RefusedError``, which is not there inside a sandbox.
    """

    def __init__(self, rule: str, reason: str, hint: str) -> None:
        super().__init__(reason)
        self.rule = rule
        self.reason = reason
        self.hint = hint

    def value(self) -> dict[str, Any]:
        """Return the job's value: ``{"error": {"rule", "reason", "hint"}}``."""
        return {"error": {"rule": self.rule, "reason": self.reason, "hint": self.hint}}


def answering(job: Callable[[dict[str, Any], Emit], dict[str, Any]]) -> Callable[[dict[str, Any], Emit], None]:
    """Have a job send what it returns, or why it is refused."""

    def run(payload: dict[str, Any], emit: Emit) -> None:
        try:
            value = job(payload, emit)
        except JobRefusedError as problem:
            value = problem.value()
        emit.value(value)

    return run


class OpenedPath:
    """An existing entry of the workspace: its directory held open, its name there, its status."""

    def __init__(self, directory: int, names: list[str], info: os.stat_result, links: list[list[str]]) -> None:
        self.directory = directory
        self.names = names
        self.info = info
        self.links = links
        """Names of the links that led here."""

    @property
    def absolute(self) -> str:
        """Return its path in the sandbox, free of symlinks."""
        return "/".join([ROOT, *self.names])


def display_name(name: str) -> str:
    """Return a name or path that is safe to print: undecodable bytes, controls and bidi marks are escaped.

    A name that needs no escape is returned unchanged; in one that does, backslashes are doubled too.
    """
    return name if name.isprintable() else "".join(map(_escaped, name))


def _escaped(character: str) -> str:
    if character.isprintable() and character != "\\":
        return character
    if "\udc80" <= character <= "\udcff":  # surrogateescape, PEP 383: a byte that is not UTF-8
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode("ascii")


def parts(path: str) -> list[str]:
    """Split a path relative to the workspace or below its mount point; raises JobRefusedError for others."""
    if path.startswith("/"):
        if path != ROOT and not path.startswith(ROOT + "/"):
            raise outside(path)
        path = path[len(ROOT) :]
    return [part for part in path.split("/") if part not in ("", ".")]


EVERYTHING = HiddenPaths()
"""Hides all that is named as secrets are."""


@contextmanager
def find(path: str, hidden: HiddenPaths = EVERYTHING) -> Iterator[OpenedPath]:
    """Find the place a path leads to; symlinks are followed while they stay inside.

    Raises JobRefusedError: ``path.outside``, ``path.missing``, also for what is hidden, or ``path.unreadable``.
    """
    # With ``..`` it may lie beside what is revealed; revealed paths have none.
    named = parts(path)
    asked = (EVERYTHING if ".." in named else hidden).kind([part for part in named if part != ".."])
    if asked is not None and asked.content is None:
        raise missing(path)
    held: list[int] = []
    try:
        try:
            place = _walk(path, held, hidden)
        except (OSError, ValueError) as error:  # ValueError: NUL, or surrogates that are no file name
            _translate(path, error)
        for kind in filter(None, map(hidden.kind, (place.names, *place.links))):
            if kind.content is None or (stat.S_ISREG(place.info.st_mode) and kind.held_at(place.absolute)):
                raise missing(path)
        yield place
    finally:
        for descriptor in held:
            os.close(descriptor)


def missing(path: str) -> JobRefusedError:
    """Return the refusal of what is missing or hidden; it depends on the path alone."""
    hint = "Use list_workspace_files to see what exists; names are case-sensitive, folders are separated by /."
    kind = EVERYTHING.kind([part for part in path.split("/") if part not in ("", ".", "..")])
    if kind is not None:
        such = f"that hold {kind.what} are" if kind.content else f"hold {kind.what}, and are"
        hint = (
            f"Files of such a name {such} hidden, whether they exist or not. "
            "The operator can show one: files.reveal in this tool's profile, with a reason."
        )
    return JobRefusedError("path.missing", f"{_name(path)}: no such file in the workspace.", hint)


def _walk(path: str, held: list[int], hidden: HiddenPaths) -> OpenedPath:
    """Walk a path; ``held[0]`` is the directory reached so far, which the caller closes."""
    names: list[str] = []
    ahead = parts(path)[::-1]
    links: list[list[str]] = []
    info = _climb(held, names)
    while ahead:
        if names:
            _enter(held, names[-1])
        part = ahead.pop()
        if part == "..":
            if not names:
                raise outside(path)
            names.pop()
            info = _climb(held, names)
            continue
        # Before it is looked up, so that no path through it depends on whether it exists.
        if hidden.bars(names, part):
            raise missing(path)
        info = os.stat(part, dir_fd=held[0], follow_symlinks=False)
        if not stat.S_ISLNK(info.st_mode):
            names.append(part)
            continue
        links.append([*names, part])
        if len(links) > MAX_LINKS:
            raise OSError(errno.ELOOP, "too many links")
        target = os.readlink(part, dir_fd=held[0])
        try:
            ahead.extend(parts(target)[::-1])
        except JobRefusedError:
            raise outside(path) from None
        if target.startswith("/"):
            names.clear()
        info = _climb(held, names)
    return OpenedPath(held[0], names, info, links)


def _enter(held: list[int], name: str) -> None:
    held.append(os.open(name, _DIRECTORY, dir_fd=held[0]))
    os.close(held.pop(0))


def _climb(held: list[int], names: list[str]) -> os.stat_result:
    """Start at the workspace, down to the directory of ``names``: ``..`` of a moved directory leads astray."""
    held.append(os.open(ROOT, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
    while len(held) > 1:
        os.close(held.pop(0))
    for name in names[:-1]:
        _enter(held, name)
    return os.stat(names[-1], dir_fd=held[0], follow_symlinks=False) if names else os.fstat(held[0])


def open_file(path: str, hidden: HiddenPaths = EVERYTHING) -> tuple[int, os.stat_result]:
    """Return a regular file's descriptor, which the caller closes, and status; never blocks.

    Raises JobRefusedError: see ``find``; also ``path.directory`` and ``path.special`` (FIFO, socket, device).
    """
    with find(path, hidden) as place:
        if stat.S_ISDIR(place.info.st_mode):
            hint = "Use list_workspace_files to see what is in it."
            raise JobRefusedError("path.directory", f"{_name(path)}: is a directory, not a file.", hint)
        # Checked before it is opened: opening a FIFO would already wake its writer.
        _require_regular(path, place.info)
        try:
            descriptor = os.open(place.names[-1], FLAGS, dir_fd=place.directory)
            try:
                info = os.fstat(descriptor)
                _require_regular(path, info)
                kinds = filter(None, map(hidden.kind, (place.names, *place.links)))
                if any(kind.held_by(descriptor) for kind in kinds):
                    raise missing(path)  # noqa: TRY301 - what was opened is closed below
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            _translate(path, error)
    return descriptor, info


def _require_regular(path: str, info: os.stat_result) -> None:
    if not stat.S_ISREG(info.st_mode):
        hint = "Only files, not pipes, sockets or devices, are read."
        raise JobRefusedError("path.special", f"{_name(path)}: is not a regular file.", hint)


def outside(path: str) -> JobRefusedError:
    """Return the refusal of a path that leaves the workspace."""
    hint = "Give a path relative to the workspace, such as data/sales.csv."
    return JobRefusedError("path.outside", f"{_name(path)}: outside the workspace.", hint)


def closed() -> JobRefusedError:
    """Return the refusal where the host denies the whole workspace: the caller cannot fix that."""
    return JobRefusedError("path.unreadable", "The workspace itself cannot be read (permission denied).", ALLOW)


def _translate(path: str, error: OSError | ValueError) -> NoReturn:
    """Raise the refusal without the operating system's text, which names places of the sandbox."""
    number = error.errno if isinstance(error, OSError) else errno.ENOENT
    if number in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
        raise missing(path) from None
    why, hint = f"cannot be read ({os.strerror(number or errno.EIO).lower()})", "Try again."
    if number == errno.ELOOP:
        why, hint = "its symbolic links go round in a circle", "Name the file the links were meant for."
    elif number in (errno.EACCES, errno.EPERM):
        if not os.access(ROOT, os.X_OK):
            raise closed() from None
        hint = ALLOW
    raise JobRefusedError("path.unreadable", f"{_name(path)}: {why}.", hint) from None


def _name(path: str) -> str:
    return display_name((path or ".") if len(path) <= _SHOWN else f"{path[:_SHOWN]}…")
