"""What is said of a credential's source that gives none: each cause with what to do, and never a value or a path."""

import json
import os
from pathlib import Path

import pytest

from glovebox_sandboxes.contract.errors import DiagnosedError
from glovebox_server.guards.credentials import sources
from glovebox_server.guards.credentials.sources import read

KEY = "Zq8-fk2_Lw7Rt5Xv9Bn3Mp6Hs1Dy4Gc0"


@pytest.mark.parametrize(
    ("kept", "mode", "reason", "fix"),
    [
        (None, 0o600, "cannot be read: No such file or directory", "Name in source a file"),
        (b"", 0o600, "its file is empty", "Write the value into it"),
        (b"\n", 0o600, "its file is empty", "Write the value into it"),
        (f"{KEY}\n{KEY}\n".encode(), 0o600, "its file does not hold a credential", "the value alone"),
        (f"{KEY} {KEY}".encode(), 0o600, "its file does not hold a credential", "the value alone"),
        (KEY.encode("utf-16"), 0o600, "its file does not hold a credential", "the value alone"),
        (b"\xff" * 40, 0o600, "its file does not hold a credential", "the value alone"),
        (b"short-one", 0o600, "its file does not hold a credential", "the value alone"),
        (b"x" * 8193, 0o600, "its file does not hold a credential", "the value alone"),
        (b"x" * 65_537, 0o600, "its file has more than 65536 bytes", "the value alone"),
        (KEY.encode(), 0o604, "others may read or change its file", "chmod o= FILE"),
    ],
)
async def test_what_is_wrong_with_a_file_is_said(
    tmp_path: Path, kept: bytes | None, mode: int, reason: str, fix: str
) -> None:
    file = tmp_path / "key"
    if kept is not None:
        file.write_bytes(kept)
        file.chmod(mode)
    await said(f"file:{file}", reason, fix, tmp_path)


async def test_a_folder_a_circle_and_a_file_that_may_not_be_read_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "round").symlink_to(tmp_path / "round")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        await said(f"file:{tmp_path}", "its file is no plain file", "Name the file", tmp_path)
    await said(f"file:{tmp_path}/round", "Too many levels of symbolic links", "Name in source a file", tmp_path)
    await said(f"file:{tmp_path}/round/key", "cannot be read", "", tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before

    def refused(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refused)
    await said(f"file:{tmp_path}/key", "cannot be read: Permission denied", "that the server's user can read", tmp_path)


@pytest.mark.parametrize(
    ("lines", "reason", "fix"),
    [
        ("#!/bin/sh\nexit 3", "ended with status 3", "Run it by hand"),
        ("#!/bin/sh\nkill -9 $$", "was ended by signal 9", "Run it by hand"),
        ("#!/bin/sh\n", "did not print such JSON", "It prints JSON such as"),
        (f"#!/bin/sh\necho {KEY}", "did not print such JSON", "It prints JSON such as"),
        ("#!/bin/sh\necho '{}'", "did not print such JSON", "It prints JSON such as"),
        ('#!/bin/sh\necho \'{"value": ""}\'', "what its program printed is empty", "It prints JSON such as"),
        ("#!/bin/sh\nsleep 60", "did not end within 0.3 seconds", "it may be asking for something"),
        ("#!/no/such/shell\n", "cannot be started: No such file or directory", "and its interpreter"),
        ("echo no first line", "cannot be started: Exec format error", "begins with #!"),
        (None, "cannot be started: Permission denied", "Name an executable program"),
        (
            f"#!/bin/sh\necho '{json.dumps({'value': KEY, 'expires': '2001-01-01T00:00:00Z'})}'",
            "what its program printed has expired",
            "sign in again",
        ),
    ],
)
async def test_what_is_wrong_with_a_program_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str | None, reason: str, fix: str
) -> None:
    if "0.3" in reason:
        monkeypatch.setattr(sources, "SECONDS", 0.3)
    path = tmp_path / "helper"
    path.write_text(lines or "")
    path.chmod(0o600 if lines is None else 0o700)
    await said(f"exec:{path}", reason, fix, tmp_path)


async def said(source: str, reason: str, fix: str, place: Path) -> None:
    """A source fails with this reason and this fix, in which neither a value nor a path of the host is."""
    with pytest.raises(DiagnosedError) as failed:
        await read(source)
    assert reason in failed.value.reason
    assert fix in failed.value.fix
    assert failed.value.fix.endswith(".")
    both = f"{failed.value.reason} {failed.value.fix}"
    assert not [each for each in (KEY, "short-one", "xxxx", str(place), "[host path]") if each in both]
