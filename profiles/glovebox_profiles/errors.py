"""The exception for a profile that does not load: the only failure of this package."""

import difflib
from collections.abc import Collection, Iterable
from itertools import islice
from pathlib import Path

from glovebox_sandboxes.contract.errors import DiagnosedError

#: Characters of a key or sentence that are repeated: enough to find it in the file, too few to fill a terminal.
SHOWN_CHARACTERS = 300

MAX_ERRORS = 20
"""Reported errors of one file: a screen of them. Finding the nearest key takes time for each."""


class ProfileError(DiagnosedError):
    """A profile cannot be used as written, so the server does not start."""

    def __init__(self, path: Path | str, line: int | None, key: str, reason: str, fix: str) -> None:
        """Set file, line (from 1, None for the whole file), dotted key, problem and fix.

        The message is for the operator's terminal and log; it names host paths and never goes to a client. Key and
        reason may repeat text of the file, so terminal escapes are escaped and the length is bounded.
        """
        self.path = Path(path)
        self.line = line
        self.key = _plain(key)
        where = f"{_plain(str(path))}:{line}" if line else _plain(str(path))
        super().__init__(f"{where}: {self.key}" if key else where, _plain(reason), _plain(fix))
        self.more: tuple[ProfileError, ...] = ()
        """Further errors of the same file."""

    def __str__(self) -> str:
        return "\n".join(map(str, (super().__str__(), *self.more)))

    @classmethod
    def combine(cls, errors: Iterable["ProfileError"], total: int) -> "ProfileError":
        """Return the first of a file's errors, with the others as its ``more``."""
        first, *others = islice(errors, MAX_ERRORS)
        if left := total - 1 - len(others):
            others.append(cls(first.path, None, "", f"has {left} more errors", "Correct these first."))
        first.more = tuple(others)
        return first


def nearest(name: str, names: Collection[str]) -> str:
    """Return a hint for an unknown name."""
    close = difflib.get_close_matches(name, names, n=1)
    return f'The nearest is "{close[0]}".' if close else f"There are: {', '.join(names) or 'none'}."


def _plain(text: str) -> str:
    kept = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in kept)
