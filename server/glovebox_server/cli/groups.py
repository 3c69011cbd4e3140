"""Commands and groups of them, imported when they are used, and the handling of failures."""

import gc
import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import click

from glovebox_server.errors import InternalError, OutputError

Act = Callable[..., int | None]
"""A command's function, which returns its exit code."""

#: Where a command notes its state directory, for the handling of its failures.
STATE_DIR = "glovebox.state_dir"

#: Where it notes whether it was given ``--json``.
JSON = "glovebox.json"


class CliCommand(click.Command):
    """A command that returns its exit code, and whose failures end in a sentence and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run it, and note ``--json``; ``failures`` and ``entry`` handle its exceptions."""
        ctx.meta[JSON] = ctx.params.pop("json", False)
        try:
            code = super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, OutputError):
            raise
        except Exception as raised:
            failures = importlib.import_module("glovebox_server.cli.failures")  # imports every part
            doing = f"running `{ctx.command_path}`"
            found = failures.foreseen(raised, doing.capitalize())
            if found is None:
                raise InternalError(doing, ctx.meta.get(STATE_DIR)) from raised
            err = importlib.import_module("glovebox_server.cli.options").err
            failures.tell(found[0], err, as_json=bool(ctx.meta.get(JSON)))
            ctx.exit(found[1])
        if code:
            ctx.exit(code)


class LazyGroup(click.Group):
    """A group of such commands. Those of other modules are imported when they are used."""

    command_class = CliCommand
    group_class = type  # click: of the same class

    def __init__(self, *args: Any, lazy: Mapping[str, tuple[str, str]] = MappingProxyType({}), **kwargs: Any) -> None:
        """Take each command's place in ``glovebox_server.cli`` (``rules.stop:stops``), and its short help, by name."""
        super().__init__(*args, **kwargs)
        self._lazy = lazy
        for name, (_, text) in lazy.items():
            self.add_command(click.Command(name, short_help=text))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; None if there is none of this name."""
        if cmd_name not in self._lazy:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = self._lazy[cmd_name][0].partition(":")
        gc.disable()  # many modules are imported: there is no garbage, and looking for it takes a third of the time
        try:
            command: click.Command = getattr(importlib.import_module(f"glovebox_server.cli.{module}"), attribute)
        finally:
            gc.freeze()
            gc.enable()
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands, without importing them."""
        click.Group(commands=self.commands).format_commands(ctx, formatter)
