"""Options as people mistype them: refused in one sentence that names the option, before anything is started."""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest
import structlog
from click.testing import CliRunner, Result

from glovebox_server.cli.main import main
from glovebox_server.exits import OK, USAGE
from glovebox_server.failures import own_command, with_own_command
from glovebox_server.transport import serve


def run(directory: Path, *arguments: str) -> Result:
    """``glovebox …`` with a state of its own and an empty workspace."""
    workspace = directory / "workspace"
    workspace.mkdir(exist_ok=True)
    return CliRunner().invoke(
        main, [*arguments, "--workspace", str(workspace), "--state-dir", str(directory / "state")]
    )


def words(done: Result) -> str:
    return " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.parametrize("command", [("serve",), ("client-config",)])
@pytest.mark.parametrize("port", ["99999", "-1", "65536"])
def test_a_port_that_is_none_is_refused(command: tuple[str], port: str, tmp_path: Path) -> None:
    """Exit 2: it used to listen on another port, modulo 65,536. The control is the next test's highest port."""
    done = run(tmp_path, *command, "--transport", "http", "--port", port)
    assert done.exit_code == USAGE
    assert "--port" in words(done)
    assert not (tmp_path / "state").exists()


def test_clients_get_the_port_and_the_name_they_were_told(tmp_path: Path) -> None:
    """The highest port is fine; on 443 it is a proxy with TLS that answers."""
    told = run(tmp_path, "client-config", "--transport", "http", "--port", "65535", "--host", "box.example")
    assert told.exit_code == OK
    assert "http://box.example:65535/mcp" in told.stdout
    told = run(tmp_path, "client-config", "--transport", "http", "--port", "443", "--host", "box.example")
    assert "https://box.example:443/mcp" in told.stdout


def test_clients_that_start_the_server_get_a_program_that_they_can_start(tmp_path: Path) -> None:
    """The launcher of this environment, by its absolute path; it used to be a module that nobody may execute."""
    told = run(tmp_path, "client-config")
    server = json.loads(told.stdout.partition("mcp.json\n")[2].partition("\n\n")[0])["servers"]["glovebox"]
    assert Path(server["command"]).is_absolute()
    assert os.access(server["command"], os.X_OK)
    alone = json.loads(run(tmp_path, "client-config", "--json").stdout)["mcpServers"]["glovebox"]
    assert {"type": "stdio", **alone} == server
    assert server["args"][:3] == ["serve", "--workspace", str(tmp_path / "workspace")]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]"])  # noqa: S104
def test_an_address_that_is_no_name_is_not_handed_to_clients(host: str, tmp_path: Path) -> None:
    """Exit 2, and where the name is that they should use."""
    done = run(tmp_path, "client-config", "--transport", "http", "--host", host)
    assert done.exit_code == USAGE
    assert "serve --allowed-host" in words(done)
    assert not done.stdout


@pytest.mark.parametrize("option", [("--port", "9000"), ("--host", "127.0.0.1"), ("--allowed-host", "a.example")])
def test_options_of_http_are_refused_over_stdio(option: tuple[str, str], tmp_path: Path) -> None:
    """Exit 2 and the option's name: whoever gives it believes that something listens."""
    done = run(tmp_path, "serve", *option)
    assert done.exit_code == USAGE
    assert f"{option[0]} is for --transport http" in words(done)
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("url", "allowed", "options"),
    [
        ("http://127.0.0.1:8321", (), "--host 127.0.0.1 --port 8321 --state-dir '/srv/my state'"),
        ("http://[::1]:9", ("a.example",), "--host ::1 --port 9 --state-dir '/srv/my state'"),
        ("http://0.0.0.0:80", ("a.example:80",), "--host a.example --port 80 --state-dir '/srv/my state'"),
        ("http://10.0.0.5:80", ("a.example", "b"), "--host a.example --port 443 --state-dir '/srv/my state'"),
    ],
)
def test_a_server_names_the_command_for_its_own_clients(
    url: str, allowed: tuple[str, ...], options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same port and state; the host is one that clients can use, and the program this one, on no PATH here."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with structlog.testing.capture_logs() as logs:
        serve.log_address(url, allowed, ["--state-dir", "/srv/my state"])
    assert logs[0]["clients"] == f"{shlex.join(own_command())} client-config --transport http {options}"
    assert shlex.split(options)
    assert logs[0]["url"] == url


SAID = "It is not built. Run `glovebox setup --docker`, or see glovebox.dev."


@pytest.mark.parametrize(
    ("path", "named"), [("", True), ("{own}", True), ("{other}", True), ("{linked}", False), ("{other}:{linked}", True)]
)
def test_a_command_is_named_by_its_path_unless_every_path_finds_it(
    path: str, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What uv runs has its cache on its PATH: that place counts for nothing; nor does another Glovebox."""
    own, other, linked = (tmp_path / name for name in ("own place", "other", "linked"))
    for place in (own, other, linked):
        place.mkdir()
    for place in (own, other):
        (place / "glovebox").write_text("#!/bin/sh")
        (place / "glovebox").chmod(0o755)
    (linked / "glovebox").symlink_to(own / "glovebox")
    monkeypatch.setattr(sys, "executable", str(own / "python"))
    monkeypatch.setenv("PATH", path.format(own=own, other=other, linked=linked))
    shown = SAID.replace("glovebox setup", f"'{own}/glovebox' setup") if named else SAID
    assert with_own_command(SAID) == shown
