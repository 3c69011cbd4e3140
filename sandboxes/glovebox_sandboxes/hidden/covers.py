"""Reduce secret files to few enough covers of one sandbox, and render their paths."""

from collections.abc import Iterable

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
        reason = "too much of it is named as secrets are: a sandbox has room for so many covers only"
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
