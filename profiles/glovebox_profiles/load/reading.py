"""From a file to TOML values with their lines: bytes that no other user can have changed, read strictly.

Reads profiles and the policy alike; their models check the values.
"""

import os
import re
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from glovebox_profiles.errors import ProfileError
from glovebox_profiles.load.positions import Positions
from glovebox_sandboxes.host import permissions
from glovebox_sandboxes.host.identity import changes_user

MAX_FILE = 64 * 1024
"""Bytes of one file: some hundred times a usual profile, and few enough to parse at once."""

_TOML = "See https://toml.io/en/v1.0.0."


def read_bytes(path: Path, most: int = MAX_FILE) -> bytes:
    """Read a file that only this user, root or the owner of the package can have written.

    Everything is asked of the open file, so the answer is about the bytes that are read: at most one more than
    ``most``.

    Raises:
        ProfileError: Another user can have written it, or it cannot be read.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise unreadable_error(path, error) from None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ProfileError(path, None, "", "not a regular file", "Put the file itself there.")
        _check_owner(path, handle)
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read(most + 1)
    except OSError as error:
        raise unreadable_error(path, error) from None
    finally:
        os.close(handle)


@contextmanager
def open_directory(directory: Path, *, owned: bool, above: bool) -> Iterator[int]:
    """Open a directory to list it; raise ProfileError if another user can write it, or it cannot be read."""
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise unreadable_error(directory, error) from None
    try:
        if owned:
            _check_owner(directory, handle)
            # As for the runtime: root's server must not be led to a directory that another user can exchange.
            found = permissions.flaw_above(directory.absolute()) if above and changes_user() else None
            if found is not None:
                raise _changeable(*found)
        yield handle
    except OSError as error:
        raise unreadable_error(directory, error) from None
    finally:
        os.close(handle)


def parse_toml(data: bytes, path: Path) -> tuple[dict[str, Any], Positions]:
    """Parse the bytes of one file into values and their positions.

    Raises:
        ProfileError: They are too many, or not strict TOML; names ``path``.
    """
    if len(data) > MAX_FILE:
        raise ProfileError(
            path, None, "", f"larger than {MAX_FILE // 1024} KiB", "Write less: a page of text is usual."
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ProfileError(path, line, "", "not UTF-8 text", "Save the file as UTF-8.") from None
    try:
        positions = Positions(text, path)
    except ValueError:
        _values(text, path)
        raise ProfileError(path, None, "", "not TOML", _TOML) from None
    return _values(text, path), positions


def _values(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        sentence, _, place = str(error).rpartition(" (at ")
        found = re.match(r"line (\d+)", place)
        line = int(found[1]) if found else text.count("\n") + 1
        raise ProfileError(path, line, "", f"not TOML: {sentence}", _TOML) from None
    except ValueError as error:  # an integer with thousands of digits
        raise ProfileError(path, None, "", f"not TOML: {error}", "Write a smaller number.") from None


def _check_owner(path: Path, handle: int) -> None:
    found = permissions.flaw(handle)
    if found is not None:
        raise _changeable(path, *found)


def _changeable(path: Path, problem: str, command: str) -> ProfileError:
    hint = f"Who can change it decides what tools may do. Review it, then: {command} {path}"
    return ProfileError(path, None, "", problem, hint)


def unreadable_error(path: Path, error: OSError) -> ProfileError:
    """Return the error for a file or directory that cannot be read."""
    linked = path.is_symlink()
    problem = "a symbolic link" if linked else f"cannot be read: {error.strerror}"
    return ProfileError(
        path, None, "", problem, "Copy the file here." if linked else "Check that it exists and its permissions."
    )
