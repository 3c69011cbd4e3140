"""``glovebox audit query``: finds calls; and resolves the calls and runs that a person names."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.progress import Progress
from rich.text import Text

from glovebox_audit import chain
from glovebox_audit.printable import printable
from glovebox_audit.query import ask
from glovebox_audit.query.ask import Told
from glovebox_audit.query.calls import CallSummary
from glovebox_audit.query.index import Filters
from glovebox_audit.query.outcomes import OUTCOMES
from glovebox_sandboxes.plural import counted
from glovebox_server.cli.options import command, emit, err, time_or_age, wants_json
from glovebox_server.cli.terminal import table_of
from glovebox_server.errors import MisnamedError
from glovebox_server.exits import FAILED, OK
from glovebox_server.settings import Settings

#: Delay before a person wants to see progress.
_PATIENCE_SECONDS = 1.0
LINES = "Print the records, one JSON object per line."
_STYLES = {"succeeded": "green", "running": "cyan", "denied": "yellow", "ask": "yellow"}


@command("query")
@click.option("--tool", "tools", multiple=True, help="Calls of this tool.")
@click.option("--principal", "principals", multiple=True, help="Calls of this caller, as token:ci or local:1000.")
@click.option("--client", "clients", multiple=True, help="Calls of this program, as it is shown; '' for none.")
@click.option("--run", "runs", multiple=True, help="Calls of this run, as `audit show` has it: r_ and 26 characters.")
@click.option("--workflow", "workflows", multiple=True, help="Calls of this workflow; '' for none.")
@click.option("--outcome", "outcomes", multiple=True, type=click.Choice(OUTCOMES), help="Calls that came out so.")
@click.option("--since", type=time_or_age, help="Not before this time (UTC), local day (yesterday), or 2h ago.")
@click.option("--until", type=time_or_age, help="Before this time, or the beginning of this day: today.")
@click.option("--grep", "text", help="Calls of which a record has this text, in upper or lower case.")
@click.option(
    "-n", "--limit", type=click.IntRange(1, 10_000), default=20, show_default=True, help="How many, the newest first."
)
def audit_query(settings: Settings, *, text: str | None, limit: int, **given: Any) -> int:
    """Find calls, the newest first.

    Those that fit every option; of a repeated one, any of its values.
    """
    filters = Filters(text=None if text is None else text.casefold(), **given)
    directory = settings.state_dir / "audit"
    with show_indexing() as told:
        found = ask.ask(directory, filters, limit, told)
    titles = ["time", "call", "outcome", "tool", "by", "client", "ms"]
    table = table_of(titles, map(_row, found.calls), right=["ms"])
    emit(asdict(found), table or "No call fits.")
    if found.more and not wants_json():
        err.print(f"The newest {counted(len(found.calls), 'call')}; there are more (--limit).", style="dim")
    if found.damaged:
        words = f"{counted(found.damaged, 'call')} left out: the record was changed. Run `glovebox audit verify`."
        err.print(words, style="red")
    return FAILED if found.damaged else OK


@contextmanager
def show_indexing() -> Iterator[Told]:
    """Show the progress of indexing, once it takes long."""
    began = time.monotonic()
    bar = Progress(console=err, transient=True)
    task = bar.add_task("Indexing the log", total=None)

    def progress(done: int, most: int) -> None:
        if err.is_terminal and time.monotonic() - began > _PATIENCE_SECONDS:
            bar.start()
            bar.update(task, completed=done, total=most)

    try:
        yield Told(say=lambda words: err.print(words, style="dim"), progress=progress)
    finally:
        if bar.live.is_started:
            bar.stop()


def _row(call: CallSummary) -> tuple[object, ...]:
    outcome = Text(_outcome(call), style=_STYLES.get(call.outcome, "red"))
    ms = None if call.elapsed_ms is None else f"{call.elapsed_ms:.0f}"
    return call.time[:19].replace("T", " "), call.call_id, outcome, call.tool, call.principal, call.through, ms


def _outcome(call: CallSummary) -> str:
    more = {
        "denied": call.rule,
        "ask": call.rule,
        "failed": f"exit {call.exit_code}" if call.exit_code else None,
        "error": call.error,
    }
    return printable(": ".join(filter(None, (call.outcome, more.get(call.outcome)))))


def find_call(directory: Path, name: str) -> str:
    """Return the id of the call that a person means: by id, by prefix, or by ``last``.

    Raises MisnamedError if there is none, or several; AuditError if the log cannot be read.
    """
    if not chain.is_name(name):
        what = f"Finding the call {printable(name)[:200]!r}"
        raise MisnamedError(what, "it is not the id of a call", "Give c_ and 26 characters, the beginning, or `last`.")
    with show_indexing() as told:
        found = ask.named(directory, name, told)
    if len(found) > 1:
        more = " …" if len(found) == ask.MOST_NAMED else ""
        reason = f"it is the beginning of several calls: {', '.join(found)}{more}"
        raise MisnamedError(f"Finding the call {name}", reason, "Give more of its id.")
    return found[0] if found else name


def find_run(directory: Path, name: str) -> str:
    """Return the id of the run that a person means: by id, or by ``last``, that of the newest call.

    Raises MisnamedError if there is no newest call, or it has no run; AuditError if the log cannot be read.
    """
    if name != ask.LAST:
        return name
    with show_indexing() as told:
        found = ask.ask(directory, Filters(), 1, told).calls
    if not found or found[0].run is None:
        fix = f"Name the call with --call {found[0].call_id if found else 'CALL'}."
        raise MisnamedError("Finding the last run", "the newest call is of no run", fix)
    return found[0].run
