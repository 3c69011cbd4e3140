"""What ``glovebox audit query`` does, and how every command finds the call that its CALL means."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from glovebox_audit import chain
from glovebox_audit.printable import printable
from glovebox_audit.query import ask
from glovebox_audit.query.ask import Told
from glovebox_audit.query.calls import Call
from glovebox_audit.query.index import Filters
from glovebox_sandboxes.plural import counted
from glovebox_server.cli.terminal import new_table, print_json, print_table
from glovebox_server.exits import FAILED, OK

#: How long something takes before a person wants to know what.
_PATIENCE_SECONDS = 1.0

_STYLES = {"succeeded": "green", "running": "cyan", "denied": "yellow", "ask": "yellow"}


class NoSuchCall(Exception):  # noqa: N818 - it names what is so
    """CALL means no call, or more than one; the message is a sentence."""


@contextmanager
def telling(err: Console) -> Iterator[Told]:
    """Tell a person how far indexing is, once it takes long."""
    began = time.monotonic()
    bar = Progress(console=err, transient=True)
    task = bar.add_task("Indexing the log", total=None)

    def progress(done: int, most: int) -> None:
        if err.is_terminal and time.monotonic() - began > _PATIENCE_SECONDS:
            bar.start()
            bar.update(task, completed=done, total=most)

    try:
        yield Told(say=lambda words: err.print(Text(words), style="dim"), progress=progress)
    finally:
        if bar.live.is_started:
            bar.stop()


def query(directory: Path, console: Console, err: Console, filters: Filters, *, limit: int, as_json: bool) -> int:
    """Show the newest calls that fit; 1 where one of them is not what was written."""
    with telling(err) as told:
        found = ask.ask(directory, filters, limit, told)
    if as_json:
        print_json(console.file, asdict(found))
    elif found.calls:
        print_table(console, _table(found.calls), folded=False)
    else:
        console.print(Text("No call fits."))
    if found.more and not as_json:
        err.print(Text(f"The newest {counted(len(found.calls), 'call')}; there are more (--limit)."), style="dim")
    if found.damaged:
        words = f"{counted(found.damaged, 'call')} left out: the record was changed. Run `glovebox audit verify --all`."
        err.print(Text(words), style="red")
    return FAILED if found.damaged else OK


def _table(calls: tuple[Call, ...]) -> Table:
    table = new_table("time", "call", "outcome", "tool", "by", "client", "ms", right=["ms"], whole=True)
    for each in calls:
        spent = "" if each.elapsed_ms is None else f"{each.elapsed_ms:.0f}"
        cells = (each.call_id, Text(_outcome(each), style=_STYLES.get(each.outcome, "red")), each.tool, each.principal)
        time_ = each.time[:19].replace("T", " ")
        table.add_row(time_, *(_text(cell) for cell in cells), _text(each.through), spent)
    return table


def _text(cell: str | Text) -> Text:
    return cell if isinstance(cell, Text) else Text(printable(cell))


def _outcome(call: Call) -> str:
    """How it came out, with what there is to say of it."""
    more = {
        "denied": call.rule,
        "ask": call.rule,
        "failed": f"exit {call.exit_code}" if call.exit_code else None,
        "error": call.error,
    }
    return printable(": ".join(filter(None, (call.outcome, more.get(call.outcome)))))


def call_named(directory: Path, name: str, err: Console) -> str:
    """The id of the call that a person means: by it, by its beginning, or by ``last``.

    Raises:
        NoSuchCall: it means none, or several.
        AuditUnavailable: the log cannot be read.
    """
    if not chain.is_name(name):
        hint = "it looks like c_ and 26 characters; its beginning will do, and `last`"
        raise NoSuchCall(f"{printable(name)[:200]!r} is not the id of a call: {hint}.")
    with telling(err) as told:
        found = ask.named(directory, name, told)
    if len(found) > 1:
        some = ", ".join(found)
        raise NoSuchCall(
            f"{name} is the beginning of several calls: {some}{' …' if len(found) == ask.MOST_NAMED else ''}"
        )
    return found[0] if found else name


def run_named(directory: Path, name: str, err: Console) -> str:
    """The id of the run that a person means: by it, or by ``last``, that of the newest call.

    Raises:
        NoSuchCall: there is no newest call, or it is of no run.
        AuditUnavailable: the log cannot be read.
    """
    if name != ask.LAST:
        return name
    with telling(err) as told:
        found = ask.ask(directory, Filters(), 1, told).calls
    if not found or found[0].run is None:
        raise NoSuchCall(f"The newest call is of no run: name it with --call {found[0].call_id if found else 'CALL'}.")
    return found[0].run
