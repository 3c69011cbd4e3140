"""Bad input, as a person or a framework meets it: exit code, one sentence that says what to do, and nothing half-run.

Through ``glovebox call`` and ``glovebox serve`` with real parts behind them. What programs do to limits is in
``sandboxes/glovebox_sandboxes/conformance``; the same answers over MCP are in ``tests/interaction``.
"""

import json
import os
import stat
import subprocess  # noqa: TID251 - a server of its own, on a disk of its own
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.fixtures.brokered import profile

from glovebox_audit.read import tail
from glovebox_audit.verify import verify
from glovebox_sandboxes.drivers.bubblewrap import wall
from glovebox_server.cli.main import main
from glovebox_server.exits import FAILED, OK, REFUSED, UNAVAILABLE, USAGE
from glovebox_server.tools.run_python import MAX_CODE

ROOT = Path(__file__).parents[2]
#: A bwrap that answers the driver's probe, and then dies at every start.
DEAD_AFTER_THE_PROBE = """
test "$1" = --version && exec echo "bubblewrap 0.8.0"
case "$*" in *"-- /bin/true") exit 0;; esac
echo "bwrap: it broke" >&2
exit 1
"""
needs_bubblewrap = pytest.mark.driver("bubblewrap")


@dataclass(frozen=True, slots=True)
class Home:
    base: Path

    @property
    def workspace(self) -> Path:
        return self.base / "workspace"

    @property
    def options(self) -> list[str]:
        found = []
        for option in ("workspace", "profiles", "state"):
            name = "--profiles-dir" if option == "profiles" else f"--{option}{'' if option == 'workspace' else '-dir'}"
            found += [name, str(self.base / option)]
        return found

    def call(self, tool: str, arguments: object, *, data: str | None = None) -> tuple[int, dict[str, Any], str]:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        more = [] if data is None else ["--data-dir", data]
        done = CliRunner().invoke(main, ["call", tool, "--args", text, "--json", *self.options, *more])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, json.loads(done.stdout), " ".join(done.stderr.split())

    def kinds(self) -> list[str]:
        directory = self.base / "state" / "audit"
        if not directory.exists():
            return []
        assert verify(directory).ok
        return [line.record.kind for line in tail(directory, 1000) if line.record is not None]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    for name in ("workspace", "profiles"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o755)
    return Home(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, ("code", "required")),
        ({"code": 5}, ("code", "string")),
        ({"code": ""}, ("code", "at least 1")),
        ({"code": "x" * (MAX_CODE + 1)}, ("code", str(MAX_CODE))),
        ({"code": "1", "sandbox_config": {}}, ("sandbox_config", "unknown", "timeout_seconds")),
        ({"code": "1", "env": {"A": "B"}}, ("env", "unknown")),
        ('{"code": "1", "timeout_seconds": NaN}', ("timeout_seconds", "finite")),
        ('{"code": "1", "timeout_seconds": 1e400}', ("timeout_seconds", "finite")),
        ({"code": "1", "timeout_seconds": 0}, ("timeout_seconds", "greater than 0")),
        ({"code": "1", "timeout_seconds": "5"}, ("timeout_seconds", "number")),
        ({"code": "1", "timeout_seconds": True}, ("timeout_seconds", "number")),
        ({"code": "1", "inputs": "artifact://x"}, ("inputs", "array")),
        ({"code": "1", "inputs": ["a"] * 17}, ("inputs", "16")),
        ({"code": "1", "inputs": ["a" * 201]}, ("inputs", "200")),
        ('{"code": "\\ud800"}', ("surrogate",)),
        ("[1]", ("--args", "object")),
        ("{", ("--args", "object")),
        ('{"a":' * 100_000, ("--args", "object")),
    ],
)
def test_wrong_arguments_are_named_and_nothing_starts(arguments: object, words: tuple[str, ...], home: Home) -> None:
    """M4, M5: exit 2; the control is that the same call with right arguments is decided."""
    code, body, told = home.call("run_python", arguments)
    assert code == USAGE
    if words != ("surrogate",):
        assert [word for word in words if word not in told] == []
    assert body["error"] == {"kind": "InvalidArgumentsError", "message": body["error"]["message"]}
    assert " ".join(body["error"]["message"].split()) == told
    assert not [kind for kind in home.kinds() if kind.startswith(("call.", "sandbox."))]


def test_an_unknown_tool_is_told_with_those_there_are(home: Home) -> None:
    code, body, _ = home.call("run_pyton", {"code": "1"})
    assert code == USAGE
    assert "Unknown tool: run_pyton" in body["error"]["message"]
    assert "run_python" in body["error"]["message"]
    assert not [kind for kind in home.kinds() if kind.startswith(("call.", "sandbox."))]


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"code": "1", "timeout_seconds": 31}, "limits.wall_seconds"),
        ({"code": "1", "timeout_seconds": 1e9}, "limits.wall_seconds"),
        ({"code": "1", "inputs": ["artifact://" + "0" * 32]}, "artifacts.unknown"),
        ({"code": "1", "inputs": ["/etc/passwd"]}, "artifacts."),
    ],
)
def test_what_policy_refuses_names_its_rule_and_what_would_be_allowed(arguments: object, rule: str, home: Home) -> None:
    """M4: exit 3, one record, no sandbox."""
    code, body, _ = home.call("run_python", arguments)
    assert code == REFUSED
    assert body["refused"]["rule"].startswith(rule)
    assert body["refused"]["hint"]
    assert body["error"] is None
    assert home.kinds()[-2:] == ["call.decided", "server.stopped"]


@needs_bubblewrap
def test_the_control_a_right_call_runs(home: Home) -> None:
    """Exit 0: what all the others here are held against."""
    code, body, _ = home.call("run_python", {"code": "print(1)", "timeout_seconds": 30})
    assert (code, body["stdout"]["text"], body["error"]) == (OK, "1\n", None)
    assert body["usage"]["cpu_ms"] > 0  # small, but told: not counted in steps of a clock tick
    assert body["usage"]["cpu_ms"] % 10
    told = ["call.decided", "sandbox.table", "sandbox.started", "call.finished", "receipt.signed"]
    assert home.kinds()[-6:-1] == told


@needs_bubblewrap
@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ("../secret.txt", "path.outside"),
        ("/etc/passwd", "path."),
        ("missing.txt", "path.missing"),
        ("folder", "path."),
        ("binary", ""),
        ("closed", "path."),
        ("outside", "path."),
    ],
)
def test_paths_that_cannot_be_read_are_one_sentence_without_host_paths(path: str, rule: str, home: Home) -> None:
    """F1, F2: exit 1; whatever the path, nothing of the host's own names is told."""
    (home.base / "secret.txt").write_text("secret of the host")
    (home.workspace / "folder").mkdir()
    (home.workspace / "binary").write_bytes(bytes(range(256)) * 10)
    (home.workspace / "closed").write_text("secret of the host")
    (home.workspace / "closed").chmod(stat.S_IWUSR if os.geteuid() else stat.S_IRUSR)
    (home.workspace / "outside").symlink_to(home.base / "secret.txt")
    code, body, _ = home.call("read_workspace_file", {"path": path})
    assert code == FAILED
    assert set(body["error"]) == {"kind", "message", "line"}
    assert body["error"]["kind"].startswith(rule)
    assert body["error"]["message"].rstrip(".").count(". ") == 1  # the reason, and what to do
    whole = json.dumps(body)
    assert str(home.base) not in whole
    assert "secret of the host" not in whole


@pytest.mark.long
@needs_bubblewrap
@pytest.mark.skipif(os.geteuid() != 0, reason="only root's sandboxes are another user than the workspace's owner")
@pytest.mark.parametrize("mode", [0o700, 0o600, 0o711])
@pytest.mark.parametrize(
    ("tool", "arguments"),
    [("list_workspace_files", {}), ("search_workspace", {"pattern": "x"}), ("read_workspace_file", {"path": "a.txt"})],
)
def test_a_workspace_closed_to_sandboxes_is_not_empty(
    tool: str, arguments: dict[str, str], mode: int, home: Home
) -> None:
    """Exit 1 and the command that opens it, instead of an empty list; with 0711 a name that is known can be read."""
    (home.workspace / "a.txt").write_text("x")
    (home.workspace / "a.txt").chmod(0o644)
    home.workspace.chmod(mode)
    code, body, _ = home.call(tool, arguments)
    if mode == 0o711 and tool == "read_workspace_file":
        assert code == OK  # the control
        return
    assert code == FAILED
    assert body["error"]["kind"] == "path.unreadable"
    assert "another user than root" in body["error"]["message"]
    assert "chmod -R o+rX" in body["error"]["message"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's sandboxes are another user than the workspace's owner")
@pytest.mark.parametrize(("folder", "file"), [(0o700, 0o644), (0o755, 0o600), (0o755, 0o644)])
def test_a_program_that_may_not_read_its_workspace_is_told_who_can_help(folder: int, file: int, home: Home) -> None:
    """The operator at once, with the directory's name; the caller without it. The last is the control."""
    (home.workspace / "a.txt").write_text("x")
    (home.workspace / "a.txt").chmod(file)
    home.workspace.chmod(folder)
    code, body, told = home.call("run_python", {"code": "print(open('a.txt').read())"})
    if (folder, file) == (0o755, 0o644):
        assert (code, str(home.workspace) in told) == (OK, False)
        return
    assert code == FAILED
    assert "chmod -R o+rX" in body["error"]["message"]
    assert str(home.workspace) not in str(body)
    assert f"un `chmod -R o+rX {home.workspace}{'' if folder == 0o700 else '/a.txt'}`" in told
    _, body, told = home.call("run_python", {"code": "open('/nowhere/b.txt')"})
    assert ("chmod" in body["error"]["message"]) == ("chmod" in told) == (folder == 0o700)


@needs_bubblewrap
@pytest.mark.parametrize(
    ("program", "kind", "line"),
    [
        ("x = (", "SyntaxError", 1),
        ("a = 1\n\n1 / 0", "ZeroDivisionError", 3),
        ("import nothing_here", "ModuleNotFoundError", 1),
    ],
)
def test_an_error_in_the_program_is_an_ordinary_result(program: str, kind: str, line: int, home: Home) -> None:
    code, body, _ = home.call("run_python", {"code": program})
    assert (code, body["ended"], body["exit_code"]) == (FAILED, "exited", 1)
    assert (body["error"]["kind"], body["error"]["line"]) == (kind, line)
    assert "/guest" not in body["stderr"]["text"]
    assert home.kinds()[-3:] == ["call.finished", "receipt.signed", "server.stopped"]


@needs_bubblewrap
def test_a_program_that_takes_too_long_is_an_ordinary_result(home: Home) -> None:
    program = {"code": "print('begun')\nwhile True: pass", "timeout_seconds": 1}
    code, body, _ = home.call("run_python", program)
    assert (code, body["ended"], body["exit_code"]) == (FAILED, "timed_out", None)
    assert body["stdout"]["text"] == "begun\n"


@pytest.mark.parametrize("command", [["serve"], ["call", "run_python", "--args", '{"code": "1"}']])
def test_a_profile_with_a_typo_starts_nothing(command: list[str], home: Home) -> None:
    """M18: exit 2; file, line, key and the nearest key are named, and not even a log is begun."""
    text = profile("run_python", "bubblewrap").replace("wall_seconds", "wall_secnds")
    line = next(number for number, each in enumerate(text.splitlines(), 1) if "wall_secnds" in each)
    (home.base / "profiles" / "run_python.toml").write_text(text)
    done = CliRunner().invoke(main, [*command, *home.options])
    told = " ".join(done.stderr.split())
    assert done.exit_code == USAGE
    assert f"run_python.toml:{line}: limits.wall_secnds: unknown key" in told
    assert '"limits.wall_seconds"' in told
    assert not (home.base / "state").exists()


def _only(home: Home, driver: str) -> None:
    (home.base / "profiles" / "run_python.toml").write_text(profile("run_python", driver))


def _unavailable(home: Home, found: tuple[int, dict[str, Any], str], *words: str) -> None:
    code, body, told = found
    assert code == UNAVAILABLE
    assert [word for word in words if word not in told] == []
    assert set(body) == {"error"}
    assert body["error"]["kind"] in ("UnsupportedSpecError", "SandboxError")
    assert home.kinds()[-3:] == ["call.failed", "receipt.signed", "server.stopped"]


def test_a_docker_engine_that_is_gone_is_told_with_its_fix(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 4: the call was decided, nothing was started, and the record says why."""
    _only(home, "docker")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{home.base}/nobody.sock")
    _unavailable(home, home.call("run_python", {"code": "1"}), "Docker Engine", "docker.io")


def test_a_runtime_that_is_not_built_is_told_with_the_command_that_builds_it(home: Home) -> None:
    _only(home, "bubblewrap")
    empty = str(home.base / "data")
    _unavailable(home, home.call("run_python", {"code": "1"}, data=empty), "runtime is not built", "glovebox setup")


@needs_bubblewrap
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exit 1", "version"),
        ('test "$1" = --version && echo "bubblewrap 0.4.1"', "0.8"),
        ('test "$1" = --version && exec echo "bubblewrap 0.8.0"; echo "No permissions" >&2; exit 1', "namespaces"),
        (DEAD_AFTER_THE_PROBE, "it broke"),
    ],
)
def test_a_bwrap_that_is_dead_is_told(
    script: str, words: str, home: Home, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """I5: exit 4, whichever way it is dead; never a result."""
    fake = home.base / "bwrap"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    # The sandbox's user has to reach it; with --basetemp the directory for all tests has any name.
    above = tmp_path_factory.getbasetemp()
    ours = [above, *(each for each in above.parents if each.name.startswith("pytest-of-"))]
    if above.name.startswith("popen-"):  # a worker's, within that of the run
        ours.append(above.parent)
    for place in (home.base, *ours):
        place.chmod(0o755)
    monkeypatch.setattr(wall, "which", lambda _: str(fake))
    _only(home, "bubblewrap")
    _unavailable(home, home.call("run_python", {"code": "1"}), words)


def test_a_state_directory_that_cannot_be_made_is_told_with_its_fix(home: Home) -> None:
    """Exit 4: nothing is decided where nothing can be recorded."""
    words = ["call", "run_python", "--args", '{"code": "1"}', *home.options, "--state-dir", "/proc/none"]
    done = CliRunner().invoke(main, words)
    told = " ".join(done.stderr.split())
    assert done.exit_code == UNAVAILABLE
    assert "/proc/none" in told
    assert "--state-dir" in told
    assert not done.stdout


@pytest.mark.long
@needs_bubblewrap
@pytest.mark.parametrize("free", [0, 2000])
def test_a_full_disk_refuses_calls_before_anything_runs(free: int, home: Home) -> None:
    """M13: exit 4 and the reason, on a disk that is full at once, or at the call's first record."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    state = home.base / "state"
    state.mkdir()
    fill = f"head -c {64 * 1024} /dev/zero > {state}/filler 2>/dev/null; truncate -s -{free} {state}/filler"
    call = [sys.executable, "-m", "glovebox_server", "call", "run_python", "--args", '{"code": "print(6 * 7)"}']
    script = f'mount -t tmpfs -o size=48k,mode=700 none {state} && {fill}; exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", *call, *home.options],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == UNAVAILABLE, done
    assert "42" not in done.stdout
    assert "No space left" in " ".join(done.stderr.split())
