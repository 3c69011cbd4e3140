"""The command line: options as people mistype them, what it says of itself, and programs given as they are."""

import json
import os
import shlex
import sys
from pathlib import Path

import click
import pytest
import structlog
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result
from tests.fixtures.consoles import walk_commands

from glovebox_server.cli import COMPLETE, entry
from glovebox_server.cli import call as command
from glovebox_server.cli.main import main
from glovebox_server.exits import OK, UNAVAILABLE, USAGE
from glovebox_server.failures import own_command, with_own_command
from glovebox_server.transport import serve


def run(directory: Path, *arguments: str) -> Result:
    """``glovebox …`` with a state of its own and an empty workspace."""
    workspace = directory / "workspace"
    workspace.mkdir(exist_ok=True)
    places = ["--workspace", str(workspace), "--state-dir", str(directory / "state")]
    return CliRunner().invoke(main, [*arguments, *places])


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


WITHOUT_JSON = {
    ("serve",): "it runs until it is ended, and prints nothing",
    ("worker",): "likewise",
    ("console", "serve"): "likewise",
    ("completion",): "what it prints is a script for a shell",
    ("audit", "prove"): "what it prints is JSON",
}
"""The commands that have no ``--json``, and why."""


GROUPS: list[tuple[tuple[str, ...], click.Group]] = [
    ((), main),
    *((words, found) for words, found in walk_commands(main) if isinstance(found, click.Group)),
]
COMMANDS = [(words, command) for words, command in walk_commands(main) if not isinstance(command, click.Group)]


def test_options_are_written_alike_everywhere() -> None:
    """``--json``, but for those named above; a file is ``-o``; what may be left out stands in brackets."""
    options = {words: {option for each in command.params for option in each.opts} for words, command in COMMANDS}
    assert {words for words, given in options.items() if "--json" not in given} == {*WITHOUT_JSON}
    for pair in ({"-o", "--output"}, {"-n", "--limit"}):
        assert [words for words, given in options.items() if given & pair and not given >= pair] == []
    optional = [
        (*words, argument.make_metavar(click.Context(command)))
        for words, command in COMMANDS
        for argument in command.params
        if isinstance(argument, click.Argument) and not argument.required
    ]
    assert [words for words in optional if not words[-1].startswith("[")] == []


@pytest.mark.parametrize(("words", "group"), GROUPS, ids=[" ".join(words) for words, _ in GROUPS])
def test_a_list_of_commands_says_each_in_whole(words: tuple[str, ...], group: click.Group) -> None:
    """In 80 columns, and as the command does itself; that click cuts what does not fit is the control."""
    shown = CliRunner().invoke(main, [*words, "--help"], terminal_width=80).stdout
    assert "Commands:" in shown
    assert "..." not in shown.split("Commands:")[1]
    for name, (_, told) in getattr(group, "_lazy", {}).items():
        command = group.get_command(click.Context(group), name)
        assert command is not None
        assert command.get_short_help_str(200).startswith(told.removesuffix("."))
    long = click.Command("x", help="word " * 40)
    assert long.get_short_help_str(60).endswith("...")


@pytest.mark.parametrize(
    ("words", "begun", "offered"),
    [
        (["call"], "run", ["run_python"]),
        (["profiles", "show"], "fetch", ["fetch_url"]),
        (["setup", "--environment"], "v", ["viz"]),
        (["environment", "remove"], "mi", ["mine"]),
        (["setup", "--environment"], "x", []),
    ],
)
def test_a_tab_key_offers_names(
    words: list[str], begun: str, offered: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "environments").mkdir()
    (tmp_path / "environments" / "mine.toml").write_text("")
    monkeypatch.setenv("GLOVEBOX_PROFILES_DIR", str(tmp_path / "profiles"))
    found = ShellComplete(main, {}, "glovebox", COMPLETE).get_completions(words, begun)
    assert [each.value for each in found] == offered


def test_a_tab_key_meets_no_traceback_where_settings_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOVEBOX_PROFILES_DIR", "")
    found = ShellComplete(main, {}, "glovebox", COMPLETE).get_completions(["setup", "--environment"], "v")
    assert [each.value for each in found] == ["viz"]


def test_what_may_be_chosen_is_listed_by_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Click indents the list by tabs; what could take over a terminal stays escaped (the control)."""
    monkeypatch.setattr("sys.argv", ["glovebox", "completion"])
    assert entry._command_line() == USAGE
    assert "\n\tbash,\n\tzsh,\n\tfish" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["glovebox", "completion", "\x1b[2J"])
    assert entry._command_line() == USAGE
    assert "\\x1b[2J" in capsys.readouterr().err


def test_a_command_that_cannot_be_imported_says_to_install_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing package is no internal error. The control: other commands work without it."""
    monkeypatch.setitem(sys.modules, "glovebox_server.cli.serve", None)
    for word, code in (("serve", UNAVAILABLE), ("completion", OK)):
        monkeypatch.setattr("sys.argv", ["glovebox", word, "--help"])
        assert entry._command_line() == code
    assert "This installation is incomplete" in capsys.readouterr().err


PROGRAM = "print('höhe')\n# \"quoted\" \\n\n"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    made: list[tuple[str, str | None]] = []

    async def make_call(_settings: object, _tool: str, arguments: str, program: str | None, **_: object) -> int:
        made.append((arguments, program))
        return 0

    monkeypatch.setattr(command, "_make_call", make_call)
    return made


def give(*words: str | Path, read: str | bytes = "") -> tuple[int, str]:
    done = CliRunner().invoke(main, ["call", "run_python", *map(str, words)], input=read)
    return done.exit_code, " ".join(done.stderr.split())


def test_a_program_comes_from_a_word_a_file_or_its_input(calls: list[tuple[str, str | None]], tmp_path: Path) -> None:
    """Byte for byte; beside other arguments, and without any (the control)."""
    (tmp_path / "prog.py").write_text(PROGRAM)
    assert give("--code", PROGRAM) == (0, "")
    assert give("--code", "-", read=PROGRAM) == (0, "")
    assert give("--file", "-", read=PROGRAM) == (0, "")
    assert give("--file", tmp_path / "prog.py", "--args", '{"timeout_seconds": 5}') == (0, "")
    assert give() == (0, "")
    assert calls == [*[("{}", PROGRAM)] * 3, ('{"timeout_seconds": 5}', PROGRAM), ("{}", None)]


def test_the_mark_of_an_editor_is_no_part_of_a_program(calls: list[tuple[str, str | None]], tmp_path: Path) -> None:
    """As Python itself has it; the control is the same mark within the program."""
    (tmp_path / "prog.py").write_bytes(b"\xef\xbb\xbfprint(1)\xef\xbb\xbf")
    assert give("--file", tmp_path / "prog.py") == (0, "")
    assert calls == [("{}", "print(1)\ufeff")]


@pytest.mark.parametrize(
    ("words", "read", "said"),
    [
        (("--code", "1", "--file", "FILE"), b"", "--code and --file both name the program"),
        (("--code", "-", "--args", "-"), b"", "cannot both read standard input"),
        (("--file", "-", "--args", "-"), b"", "cannot both read standard input"),
        (("--file", "-"), b"\xff", "--file: it is not UTF-8 at byte 0"),
        (("--code", "-"), b"\xff", "--code: it is not UTF-8 at byte 0"),
        (("--code", "-"), b"1" * (1 << 20) + b"1", "--code: it has more than 1048576 bytes"),
        (("--code", "\udcff"), b"", "--code: it is not UTF-8"),
        (("--file", "BAD"), b"", "--file: it is not UTF-8 at byte 1"),
        (("--file", "/proc/none"), b"", "'--file': '/proc/none': No such file"),
        (("--file", "/proc/self/mem"), b"", "--file: it cannot be read: Input/output error."),
    ],
)
def test_what_is_no_program_is_refused(
    calls: list[tuple[str, str | None]], tmp_path: Path, words: tuple[str, ...], read: bytes, said: str
) -> None:
    (tmp_path / "FILE").write_text("1")
    (tmp_path / "BAD").write_bytes(b"1\xff")
    placed = [str(tmp_path / word) if word in {"FILE", "BAD"} else word for word in words]
    code, err = give(*placed, read=read)
    assert code == 2
    assert said in err
    assert calls == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("call", "run_python", "--code", "1", "--args", '{"code": "2"}'),
            "--args has one, and so does --code or --file",
        ),
        (("call", "search_workspace", "--code", "1"), "it takes no program, so neither --code nor --file"),
        (("call", "no_such_tool", "--code", "1"), "no_such_tool"),
    ],
)
def test_a_program_that_has_no_place_is_refused(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    (tmp_path / "served").mkdir()
    places = [f"--{name}-dir={tmp_path / name}" for name in ("state", "data")]
    done = CliRunner().invoke(main, [*words, *places, f"--workspace={tmp_path / 'served'}"])
    assert (done.exit_code, said in " ".join(done.stderr.split())) == (2, True), done.stderr
    assert b"call.decided" not in (tmp_path / "state" / "audit" / "audit.jsonl").read_bytes()
