"""What is said of a source that gives no credential, never a value or path; keys that tools could read are none."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

from glovebox_profiles.errors import ProfileError
from glovebox_profiles.load.loader import SHIPPED, load, parse
from glovebox_sandboxes.contract.errors import DiagnosedError
from glovebox_server.cli.main import main
from glovebox_server.exits import OK, USAGE
from glovebox_server.guards.credentials import sources
from glovebox_server.guards.credentials.sources import read
from glovebox_server.settings import Settings
from glovebox_server.startup import governed
from glovebox_server.workspace import Workspace

KEY = "Zq8-fk2_Lw7Rt5Xv9Bn3Mp6Hs1Dy4Gc0"


def _printing(name: str = "value", **more: object) -> str:
    return f"#!/bin/sh\necho '{json.dumps({name: KEY, **more})}'"


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
        (b"x" * 8193, 0o600, "its file does not hold a credential", "the value alone"),
        (b"x" * 65_536, 0o600, "its file does not hold a credential", "the value alone"),
        (f"{KEY} \n".encode(), 0o600, "its file does not hold a credential", "the value alone"),
        (b"a1" * 7 + b"b-----", 0o600, "its file does not hold a credential", "the value alone"),
        (b"x" * 65_537, 0o600, "its file has more than 65536 bytes", "the value alone"),
        (KEY.encode(), 0o604, "others may read or change its file", "chmod o= FILE"),
    ],
)
async def test_what_ails_a_file_is_said(tmp_path: Path, kept: bytes | None, mode: int, reason: str, fix: str) -> None:
    file = tmp_path / "key"
    if kept is not None:
        file.write_bytes(kept)
        file.chmod(mode)
    await said(f"file:{file}", reason, fix, tmp_path)


async def test_a_folder_a_circle_and_a_closed_file_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        ("#!/bin/sh\necho '[]'", "did not print such JSON", "It prints JSON such as"),
        ("#!/bin/sh\necho '{\"value\": 7}'", "did not print such JSON", "It prints JSON such as"),
        (_printing(expires="soon"), "did not print such JSON", "It prints JSON such as"),
        (_printing(expires=4_102_444_800), "did not print such JSON", "It prints JSON such as"),
        (_printing(expires=1e400).replace("Infinity", "1e400"), "did not print such JSON", "It prints JSON such as"),
        (_printing("access_token"), "did not print such JSON", "It prints JSON such as"),
        ("#!/bin/sh\nhead -c 100000 /dev/zero | tr '\\0' x", "printed more than 65536 bytes", ""),
        ('#!/bin/sh\necho \'{"value": "short"}\'', "does not hold a credential", ""),
        (_printing().replace(KEY, f"{KEY}\\\\r\\\\nX: 1"), "does not hold a credential", ""),
        ('#!/bin/sh\necho \'{"value": ""}\'', "what its program printed is empty", "It prints JSON such as"),
        ("#!/bin/sh\nsleep 60", "did not end within 0.3 seconds", "it may be asking for something"),
        ("#!/no/such/shell\n", "cannot be started: No such file or directory", "and its interpreter"),
        ("echo no first line", "cannot be started: Exec format error", "begins with #!"),
        (None, "cannot be started: Permission denied", "Name an executable program"),
        (_printing(expires="2001-01-01T00:00:00Z"), "what its program printed has expired", "sign in again"),
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
    assert failed.value.what == "credential"
    assert reason in failed.value.reason
    assert fix in failed.value.fix
    assert failed.value.fix.endswith(".")
    both = f"{failed.value.reason} {failed.value.fix}"
    assert not [each for each in (KEY, "short", "xxxx", str(place), "[host path]") if each in both]


LENT = """tool = "run_python"
description = "Runs a program."
risk = "low"
isolation = ["bubblewrap"]
[network]
mode = "egress"
tls = "{tls}"
allow = [{allow}]
[[network.credential]]
name = "tracker"
host = "api.example.org"
paths = ["/v1/*"]
header = "Authorization"
source = "{source}"
"""
PLAIN = '{ host = "api.example.org" }'


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A workspace beside a folder that is not one; each has a file, and a link to the other's."""
    for name, other in (("served", "apart"), ("apart", "served")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "key").write_text("q7Zk2mX9vB4tR8wLp3Ns")
        (tmp_path / name / "link").symlink_to(tmp_path / other / "key")
    (tmp_path / "profiles").mkdir()
    return tmp_path


def lend(place: Path, source: str) -> None:
    text = LENT.format(tls="inspect", allow=PLAIN, source=source.format(place=place))
    (place / "profiles/run_python.toml").write_text(text)


@pytest.mark.parametrize(
    "source",
    [
        "file:{place}/served/key",
        "file:{place}/served/link",
        "file:{place}/apart/link",
        "file:{place}/served/none",
        "file:{place}/apart/../served/key",
        "exec:{place}/served/key --for me",
        "exec:/bin/sh {place}/served/key",
    ],
)
def test_a_key_from_the_workspace_is_refused(source: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ``profiles check``, and by a server before it starts; the control is another workspace."""
    lend(place, source)
    wanted = f'"tracker" comes from .*, which lies in the workspace, {place}/served: .* Move it out of there'
    code, said = checked(place, "served", monkeypatch)
    assert (code, bool(re.search(wanted, said))) == (USAGE, True), said
    profiles = load([SHIPPED, place / "profiles"], check_example=None)
    settings = Settings(profiles_dir=place / "profiles")
    with pytest.raises(ProfileError, match=wanted):
        governed(settings, profiles, Workspace(path=place / "served"))
    assert governed(settings, profiles, Workspace(path=place / "profiles")).every
    assert checked(place, "empty", monkeypatch)[0] == OK


@pytest.mark.parametrize("source", ["file:{place}/apart/key", "env:SERVED_KEY"])
def test_a_key_from_elsewhere_is_not(source: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the one above."""
    lend(place, source)
    assert checked(place, "served", monkeypatch)[0] == OK


def checked(place: Path, workspace: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    (place / workspace).mkdir(exist_ok=True)
    monkeypatch.setenv("GLOVEBOX_WORKSPACE", str(place / workspace))
    monkeypatch.setenv("GLOVEBOX_PROFILES_DIR", str(place / "profiles"))
    done = CliRunner().invoke(main, ["profiles", "check"])
    return done.exit_code, done.output


TUNNELS: Mapping[str, str] = {
    "to its host": f'{PLAIN}, {{ host = "api.example.org", methods = ["CONNECT"] }}',
    "beside other methods": '{ host = "api.example.org", methods = ["GET", "CONNECT"] }',
    "to all below": f'{PLAIN}, {{ host = "*.example.org", methods = ["CONNECT"] }}',
}


@pytest.mark.parametrize("tls", ["inspect", "tunnel"])
@pytest.mark.parametrize("allow", TUNNELS.values(), ids=TUNNELS)
def test_a_tunnel_to_the_host_of_a_key_is_refused(allow: str, tls: str) -> None:
    """With its line and what to do; the controls are a tunnel to another host, and a tool that opens none."""
    text = LENT.format(tls=tls, allow=allow, source="env:TRACKER_TOKEN")
    with pytest.raises(ProfileError, match=r"is api\.example\.org, to which network\.allow has a tunnel") as refused:
        parse(text.encode(), Path("run_python.toml"))
    assert (refused.value.line, refused.value.key) == (11, "network.credential[0].host")
    assert "Take CONNECT out of that rule" in refused.value.fix
    other = LENT.format(tls=tls, allow=f'{PLAIN}, {{ host = "b.example.org", methods = ["CONNECT"] }}', source="env:A")
    assert parse(other.encode(), Path("run_python.toml")).network.credential
    assert parse(text.replace("run_python", "fetch_url").encode(), Path("fetch_url.toml")).network.credential
