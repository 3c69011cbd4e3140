"""What the command line says of itself, and what a shell's tab key offers."""

from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from tests.fixtures.consoles import walk_commands

from glovebox_server.cli import COMPLETE, entry
from glovebox_server.cli.main import main
from glovebox_server.exits import USAGE

WITHOUT_JSON = {
    ("serve",): "it runs until it is ended, and prints nothing",
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
    """Each command has ``--json``, but those named above; a file is ``-o``, and how many ``-n`` and ``--limit``.

    What may be left out stands in brackets.
    """
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


def test_what_may_be_chosen_is_listed_line_by_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Click indents the list by tabs; what could take over a terminal stays escaped (the control)."""
    monkeypatch.setattr("sys.argv", ["glovebox", "completion"])
    assert entry._command_line() == USAGE
    assert "\n\tbash,\n\tzsh,\n\tfish" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["glovebox", "completion", "\x1b[2J"])
    assert entry._command_line() == USAGE
    assert "\\x1b[2J" in capsys.readouterr().err
