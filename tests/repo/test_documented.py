"""Docs that cannot drift: every command, option and setting is written down.

docs/operate/commands.csv is written from the commands: ``python -m tests.repo.test_documented``.
"""

import csv
import io
import re

import click
import pytest
from tests.fixtures.consoles import walk_commands
from tests.repo.files import ROOT, python_files, texts

from glovebox_audit.events import EVENTS
from glovebox_server.cli.main import main
from glovebox_server.settings import _NO_SETTINGS, Settings

TABLE = ROOT / "docs/operate/commands.csv"
SETTINGS = ROOT / "docs/operate/settings.csv"
RULES = (ROOT / "docs/use/artifact-rules.csv", ROOT / "docs/internals/egress-rules.csv")
MOST = 500
"""Characters of a command's first sentence: more than any has."""


def commands(group: click.Group) -> list[tuple[str, click.Command]]:
    """Every command with its full name."""
    found = walk_commands(group, "glovebox")
    return [(" ".join(words), command) for words, command in found if not isinstance(command, click.Group)]


def rows(name: str, command: click.Command) -> list[list[str]]:
    """A command with its arguments, and under it each option of its own: what the table says of it."""
    options = [
        each for each in command.params if isinstance(each, click.Option) and each.name not in Settings.model_fields
    ]
    usage = " ".join(command.collect_usage_pieces(click.Context(command)))
    return [
        [f"{name} {usage}".replace(" [OPTIONS]", ""), "", command.get_short_help_str(MOST), ""],
        *([name, ", ".join(each.opts), each.help or "", default(each)] for each in options),
    ]


def default(option: click.Option) -> str:
    """What holds without the option, where that is a value."""
    return str(option.default) if isinstance(option.default, (str, int)) and not option.is_flag else ""


def table() -> str:
    """Return docs/operate/commands.csv."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["command", "option", "meaning", "default"])
    for name, command in commands(main):
        lines.writerows(rows(name, command))
    return text.getvalue()


@pytest.mark.parametrize(("name", "command"), commands(main), ids=lambda value: value if isinstance(value, str) else "")
def test_every_command_and_option_is_documented(name: str, command: click.Command) -> None:
    """The command stands in the table as it is typed, and so does each of its options, with what it means."""
    written = list(csv.reader(io.StringIO(TABLE.read_text())))
    for row in rows(name, command):
        assert row in written, "run `python -m tests.repo.test_documented`"
        assert row[2], f"{row} says nothing"


def test_the_table_of_commands_has_nothing_else() -> None:
    """A command or option that is gone stands there no longer."""
    assert TABLE.read_text() == table(), "run `python -m tests.repo.test_documented`"


def test_the_variables_that_are_no_settings_are_those_in_use() -> None:
    """Without one of them a test would be refused; one that is gone would hide a slip of the pen."""
    named = {
        name
        for path, text in texts()
        if path != "server/glovebox_server/settings.py"
        for name in re.findall(r"\bGLOVEBOX(?:_|[A-Z])[A-Z_]*[A-Z]\b", text)
    }
    misspelt = {"GLOVEBOX_PROFILE_DIR"}  # in a test of what is said to that
    assert named - {f"GLOVEBOX_{name.upper()}" for name in Settings.model_fields} - misspelt == _NO_SETTINGS


def test_every_setting_is_documented() -> None:
    """docs/operate/settings.csv has each setting's environment variable, its default and its meaning, and no other."""
    _, *settings = csv.reader(io.StringIO(SETTINGS.read_text()), strict=True)
    assert [row[0] for row in settings] == [f"GLOVEBOX_{name.upper()}" for name in Settings.model_fields]
    assert [row for row in settings if len(row) != 3 or not row[1] or not row[2].endswith(".")] == []
    for (_, default, _), field in zip(settings, Settings.model_fields.values(), strict=True):
        assert not isinstance(field.default, float | int) or default == f"{field.default:g}"


def test_every_rule_of_a_refusal_is_documented() -> None:
    """Each rule of these families in the product is in its table; kinds of audit events look alike."""
    literal = re.compile(r"\"((?:artifacts|promotion|egress)\.[a-z_]+)\"")
    in_code = {rule for _, text in python_files("server", "profiles", "sandboxes") for rule in literal.findall(text)}
    rows = [row for table in RULES for row in csv.DictReader(table.read_text().splitlines()) if row["refused when"]]
    assert in_code - set(EVENTS) - {rule for row in rows for rule in row["rule"].split(", ")} == set()


if __name__ == "__main__":
    TABLE.write_text(table())
