"""Docs that cannot drift: every command, option and setting is written down."""

import re

import click
import pytest
from tests.repo.files import ROOT, texts

from glovebox_server.cli.main import main
from glovebox_server.settings import _NO_SETTINGS, Settings


def documentation() -> str:
    """The README and every page of docs/."""
    return "\n".join(path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))])


def commands(group: click.Group, prefix: str = "glovebox") -> list[tuple[str, click.Command]]:
    """Every command with its full name."""
    found: list[tuple[str, click.Command]] = []
    for name, command in group.commands.items():
        full = f"{prefix} {name}"
        found += commands(command, full) if isinstance(command, click.Group) else [(full, command)]
    return found


@pytest.mark.parametrize(("name", "command"), commands(main), ids=lambda value: value if isinstance(value, str) else "")
def test_every_command_and_option_is_documented(name: str, command: click.Command) -> None:
    """The command stands in the docs as it is typed, and so does each of its options."""
    text = documentation()
    assert name in text, f"`{name}` is nowhere in README.md or docs/"
    options = [option for each in command.params if isinstance(each, click.Option) for option in each.opts]
    assert [option for option in options if option.startswith("--") and option not in text] == []


def test_the_variables_that_are_no_settings_are_those_in_use() -> None:
    """Without one of them a test would be refused; one that is gone would hide a slip of the pen."""
    named = {
        name
        for path, text in texts()
        if path != "server/glovebox_server/settings.py"
        for name in re.findall(r"\bGLOVEBOX_[A-Z_]*[A-Z]\b", text)
    }
    misspelt = {"GLOVEBOX_PROFILE_DIR"}  # in a test of what is said to that
    assert named - {f"GLOVEBOX_{name.upper()}" for name in Settings.model_fields} - misspelt == _NO_SETTINGS


def test_every_setting_is_documented() -> None:
    """Each setting's environment variable stands in the docs."""
    text = documentation()
    assert [name for name in Settings.model_fields if f"GLOVEBOX_{name.upper()}" not in text] == []
