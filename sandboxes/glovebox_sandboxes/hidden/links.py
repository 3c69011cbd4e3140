"""Resolve symbolic links of a served directory, and list the names that they pass.

Paths are relative to the directory. A link is followed as the host does, and as a sandbox does, to which the directory
is ``/workspace``. Its targets are what either of them finds.
"""

import errno
import os
from collections.abc import Iterator

from glovebox_sandboxes.contract.spec import WORKSPACE

_MOST_STEPS = 4096
"""Names on the way of one link: as many as fit into the longest path. Beyond that it may lead anywhere."""
_MOST_LINKS = 40
"""Links on the way of one: as many as the kernel follows, path_resolution(7)."""


class Links:
    """A set of watched links: reports which of them may lead elsewhere by now."""

    def __init__(self) -> None:
        self._passed: dict[str, frozenset[str]] = {}
        self._passing: dict[str, set[str]] = {}
        self._doubtful: dict[str, bool] = {}

    def found(self, link: str, *, came: bool = True) -> None:
        """Add a link; ``came`` if it may be another than before."""
        self._doubtful[link] = came or self._doubtful.get(link, False)

    def changed(self, path: str, *, came: bool) -> None:
        """Mark links that pass this path; ``came`` if something may be new there."""
        for link in self._passing.get(path, ()):
            self.found(link, came=came)

    def gone(self, link: str) -> None:
        """Remove a link."""
        self._doubtful.pop(link, None)
        for path in self._passed.pop(link, ()):
            self._passing[path].discard(link)
            if not self._passing[path]:
                del self._passing[path]

    def clear(self) -> None:
        """Remove all."""
        for each in (self._passed, self._passing, self._doubtful):
            each.clear()

    def followed(self, root: str) -> Iterator[tuple[str, str | None, bool]]:
        """Yield each link in doubt, its target as ``follow`` returns it, and whether the target may be new."""
        doubtful, self._doubtful = self._doubtful, {}
        for link, came in doubtful.items():
            passed, target = follow(root, link)
            self.gone(link)
            self._passed[link] = passed
            for path in passed:
                self._passing.setdefault(path, set()).add(link)
            yield link, target, came


def follow(root: str, link: str) -> tuple[frozenset[str], str | None]:
    """Return every name on the way of a link, its own included, and where it leads.

    That is None if the target does not exist or is outside ``root``, a path without links. It is empty for ``root``
    itself, and for a way that is too long.
    """
    passed: set[str] = set()
    folder, _, name = link.rpartition("/")
    done, waiting, links = [*filter(None, folder.split("/"))], [name], 0
    for _ in range(_MOST_STEPS):
        if not waiting:
            return frozenset(passed), "/".join(done)
        part = waiting.pop()
        if part in {"", "."}:
            continue
        if part == ".." and done:
            done.pop()
            continue
        leads: str | None = "/".join(["..", *reversed(waiting)])
        if part == "..":
            waiting.clear()
        else:
            passed.add(path := "/".join([*done, part]))
            leads = _read(f"{root}/{path}")
            links += bool(leads)
        if part == ".." or (leads or "").startswith("/"):
            leads, done = _within(root, leads or ""), []
        elif leads == "":
            done.append(part)
        if leads is None:
            return frozenset(passed), None
        waiting += leads.split("/")[::-1]
    return frozenset(passed), None if links > _MOST_LINKS else ""


def _read(place: str) -> str | None:
    """Return a link's content; empty if it is no link, None if it does not exist."""
    try:
        return os.readlink(place)  # noqa: PTH115 - called for each of a thousand names
    except OSError as error:
        return "" if error.errno == errno.EINVAL else None


def _within(root: str, text: str) -> str | None:
    """Return an absolute or upward path relative to the directory; None if it never enters it."""
    for top in (root, WORKSPACE):
        home = top.split("/")[1:]
        at, parts = [] if text.startswith("/") else list(home), text.split("/")
        for number, part in enumerate(parts, 1):
            if part == "..":
                del at[-1:]
            elif part not in {"", "."}:
                at.append(part)
            if at == home:
                return "/".join(parts[number:])
    real = os.path.realpath(f"{root}/{text}" if text.startswith("..") else text)
    return real[len(root) + 1 :] if f"{real}/".startswith(f"{root}/") else None
