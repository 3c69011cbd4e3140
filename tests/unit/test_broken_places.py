"""Disks that are full or read-only, tokens that are none, a port in use: a sentence with the fix, never a traceback."""

import os
import socket
import subprocess  # noqa: TID251 - whole processes, on a disk of their own
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.fixtures.whole_commands import GLOVEBOX, traceless

from glovebox_server.cli.main import main
from glovebox_server.exits import OK, UNAVAILABLE

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
CALL = ["call", "run_python", "--args", '{"code": "print(6 * 7)"}']
COMMANDS = {"setup": ["setup"], "call": CALL, "serve": ["serve"], "receipt key": ["receipt", "key"]}
FULL = f"mount -t tmpfs -o size=64k none %s && head -c {1 << 20} /dev/zero > %s/filler 2>/dev/null"
DISKS = {
    "full": (FULL, "No space left on device"),
    "read-only": ("mount -t tmpfs -o ro none %s && test -d %s", "Read-only file system"),
}


def ended(command: list[str], place: Path, *, script: str = "") -> tuple[int, str]:
    """How a command ends; with a script, after it and in a mount namespace of its own."""
    before = ["unshare", "--mount", "sh", "-c", f'{script}; exec "$@"', "sh"] if script else []
    done = subprocess.run(
        [*before, *GLOVEBOX, *command],
        cwd=place, env={"PATH": os.environ["PATH"], "HOME": str(place)}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    traceless(done.stdout + done.stderr, done.returncode)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.mark.long
@needs_root
@pytest.mark.parametrize("disk", DISKS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_disk_that_takes_nothing_is_told(command: str, disk: str, tmp_path: Path) -> None:
    """Exit 4, with the place and the reason, and nothing ran; the control is `receipt key` on a disk of ours."""
    place = tmp_path / "disk"
    place.mkdir()
    mount, words = DISKS[disk]
    options = ["--data-dir" if command == "setup" else "--state-dir", str(place / "own")]
    code, told = ended([*COMMANDS[command], *options], tmp_path, script=mount.replace("%s", str(place)))
    assert code == UNAVAILABLE, told
    assert words in told
    assert str(place) in told
    assert "42" not in told.replace(str(place), "")
    if (command, disk) == ("receipt key", "full"):
        assert ended([*COMMANDS[command], *options], tmp_path)[0] == OK


def served(place: Path, *more: str) -> str:
    """What a server says that does not start, without a process of its own."""
    words = ["serve", "--transport", "http", "--port", "0", "--state-dir", str(place / "state"), *more]
    done = CliRunner(env={"HOME": str(place)}).invoke(main, words)
    told = " ".join(done.output.split())
    assert (done.exit_code, "listening" in told, "http://127" in told) == (UNAVAILABLE, False, False), told
    assert isinstance(done.exception, SystemExit)
    return told


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    for place in ("state", "state/tokens"):
        (tmp_path / place).mkdir(mode=0o700)
    return tmp_path / "state/tokens"


def test_tokens_that_cannot_be_read_are_told(tokens: Path, tmp_path: Path) -> None:
    (tokens / "default").mkdir()
    assert str(tokens) in served(tmp_path)
    (tokens / "default").rmdir()
    (tokens / "default").write_text("gbx_" + "0" * 43)
    (tokens / "default").chmod(0o644)
    assert "chmod" in served(tmp_path)


def test_a_token_of_a_role_that_there_is_not_is_told(tokens: Path, tmp_path: Path) -> None:
    (tokens / "ci").touch(mode=0o600)
    (tokens / "ci").write_text(f'{{"version":1,"sha256":"{"0" * 64}","made":"2026-11-22T10:00:00Z","role":"analyst"}}')
    told = served(tmp_path)
    assert f"{tokens}/ci: it is bound to a role that there is not, 'analyst'" in told
    assert "glovebox token revoke ci`" in told


@pytest.mark.parametrize(
    ("issuer", "why"),
    [("http://id.example", "has no TLS"), ("https://127.0.0.1:1", "for its keys"), ("id.example", "no URL")],
)
def test_an_issuer_that_cannot_be_used_is_told(issuer: str, why: str, tmp_path: Path) -> None:
    told = served(tmp_path, "--oauth-issuer", issuer)
    assert why in told
    assert "--oauth-issuer" in told


@pytest.mark.long
@pytest.mark.parametrize("named", [False, True])
def test_a_port_in_use_is_told_and_no_workspace_where_a_caller_has_none(named: bool, tmp_path: Path) -> None:
    """And not where each role names one. The control is a role that does not."""
    (tmp_path / "work").mkdir()
    workspace = f'workspace = "{tmp_path}/work"' if named else ""
    example = '[[example]]\nprincipal = "token:x"\ncall = { tool = "fetch_url" }\nexpect = "deny"'
    (tmp_path / "policy.toml").write_text(f"version = 1\n[roles.reader]\n{workspace}\n{example}\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        served = ["serve", "--transport", "http", "--port", port, "--policy", str(tmp_path / "policy.toml")]
        code, told = ended([*served, "--processes", "1"], tmp_path)
    assert code == UNAVAILABLE, told
    used = f"Cannot listen on 127.0.0.1 port {port}: Address already in use. Choose another with --port or --host."
    assert used in told
    assert ("No workspace is served" in told) == (not named)
