"""Paths of a served directory: fold secret files into few enough covers, and follow links.

Paths are relative to the directory. A link is followed as the host does, and as a sandbox does, to which the directory
is ``/workspace``. Its targets are what either of them finds.
"""

import errno
import os
from collections.abc import Iterable

from glovebox_sandboxes.contract.base import WORKSPACE
from glovebox_sandboxes.contract.errors import UnsupportedSpecError

MAX_MASKS = 256
"""Covers of one sandbox: each is a mount, and a line of its record. Beyond that, whole folders are covered."""
_MOST_SHOWN = 200
FIELD = "files.workspace"


def shown(path: str, revealed: frozenset[str]) -> bool:
    """Return whether a path, or a folder above it, is one of these."""
    parts = path.split("/")
    return bool(revealed) and any("/".join(parts[: at + 1]) in revealed for at in range(len(parts)))


def folded(found: Iterable[str]) -> tuple[str, ...]:
    """Return few enough paths to cover: many in one folder become that folder.

    Raises:
        UnsupportedSpecError: that would be the directory itself, or they lie in too many folders.
    """
    kept = {_plain(each) for each in found}
    if "/" in kept:
        reason = "a name at its top is that of a secret, or of a folder with one, and cannot be written on record"
        raise UnsupportedSpecError(
            FIELD, reason, "Rename it: it holds characters that cannot be printed, or is no UTF-8."
        )
    if len(kept) > MAX_MASKS:
        groups: dict[str, list[str]] = {}
        for path in kept:
            groups.setdefault(above(path), []).append(path)
        for folder, inside in sorted(groups.items(), key=lambda each: (-len(each[1]), each[0])):
            if folder and len(kept) > MAX_MASKS:
                kept = kept.difference(inside) | {f"{folder}/"}
    folders = frozenset(each[:-1] for each in kept if each.endswith("/"))
    kept = {each for each in kept if not shown(above(each), folders)}
    if len(kept) > MAX_MASKS:
        fix = "Put them into one folder, show them (files.reveal), or serve a smaller directory (--workspace)."
        reason = "too much of it is named as secrets are: a sandbox has room for no more covers"
        raise UnsupportedSpecError(FIELD, f"{reason} ({MAX_MASKS})", fix)
    return tuple(sorted(kept))


def _plain(path: str) -> str:
    """Return the path, or if no record can hold it, the folder above it."""
    while not path.isprintable():
        path = f"{above(path)}/"
    return path


def above(path: str) -> str:
    """Return the folder of a path."""
    return path.rstrip("/").rpartition("/")[0]


def named(path: str) -> str:
    """Return a path as part of a message; safe to print."""
    text = ascii(path)[1:-1]
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


_MOST_STEPS = 4096
"""Names on the way of one link: as many as fit into the longest path. Beyond that it may lead anywhere."""
_MOST_LINKS = 40
"""Links on the way of one: as many as the kernel follows, path_resolution(7)."""


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
