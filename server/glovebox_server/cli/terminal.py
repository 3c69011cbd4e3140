"""The one place where commands print: a terminal obeys, hides or reorders nothing of untrusted text.

This holds without a terminal too: output of a pipe ends in a pager, a build's log or an editor. An artifact's bytes,
which must stay exact, do not come here; JSON is ASCII and has nothing to escape.
"""

import json
from collections.abc import Collection, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import IO, Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from glovebox_audit.printable import LAYOUT, printable

Shown = Table | Text | str

#: Columns; wider than any line of a table.
_WIDE = 10_000

#: Columns that every table fits into, however narrow the terminal is.
COLUMNS = 80

#: Titles of columns whose cells are copied: they are not broken if another column can be.
_COPIED = frozenset({"id", "call", "name", "address"})

#: Titles of columns of times: dates and hours are not broken either.
_TIMES = frozenset({"time", "made"})


class Terminal(Console):
    """A console that passes all text through ``printable``, even if a caller forgets to."""

    def __init__(self, **options: Any) -> None:
        """Take rich's options; lines are not broken, and text is not styled, coloured or drawn by its content."""
        super().__init__(**{"soft_wrap": True, "highlight": False, "emoji": False, "markup": False} | options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render, and pass no controls except rich's own."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(printable(text, LAYOUT), style)


def table_of(titles: Iterable[str], rows: Iterable[Iterable[object]], right: Collection[str] = ()) -> Table | None:
    """Return a table of rows, whose cells are shown as ``_shown`` says; None without rows.

    ``right`` are titles of columns of numbers.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, justify="right" if title in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(_shown, row))
    return table if table.row_count else None


def _shown(value: object) -> Text:
    """Return a cell; no text is read as markup."""
    if isinstance(value, Text):
        return value
    if isinstance(value, datetime):
        return Text(to_minute(value))
    if isinstance(value, bool):
        return Text("yes" if value else "no")
    return Text(", ".join(map(str, value)) if isinstance(value, list | tuple) else "" if value is None else str(value))


def styled(text: object, style: str, keep: str = "") -> Text:
    """Return untrusted text in a style, on one line unless ``keep`` has the line feed."""
    return Text(printable(str(text), keep), style)


def print_table(console: Console, table: Table, wide: int = _WIDE) -> None:
    """Print a table; into a pipe one line for each row, for grep.

    A terminal is shown no column that is empty or all 0. Where the rest does not fit, cells that are not for copying
    are folded. ``wide`` is the width of a pipe, for rows that people read and that may take several lines.
    """
    if console.is_terminal:
        said = [each for each in table.columns if not {str(cell) for cell in each.cells} <= {"", "0"}]
        table.columns = [replace(each, _index=index) for index, each in enumerate(said)]
    options = console.options.update(width=wide, markup=False)
    table.width = Measurement.get(console, options, table).maximum
    if console.is_terminal and table.width > (fitting := max(console.width, COLUMNS)):
        table.width, table.collapse_padding = None, True
        _narrow(table, fitting)
    for line in console.render_lines(table, options):
        text = Text.assemble(*((segment.text, segment.style or "") for segment in line))
        text.rstrip()  # on a terminal trailing blanks would become lines of their own
        console.print(text, soft_wrap=True)


def _narrow(table: Table, room: int) -> None:
    """Set column widths that fit ``room`` and break few words: rich's own makes the widest alike."""
    texts = [[str(text) for text in (column.header, *column.cells)] for column in table.columns]
    whole = [max(cell_len(text) for text in found) for found in texts]
    words = [max((cell_len(word) for text in found for word in text.split()), default=1) for found in texts]
    broken = [at for at, column in enumerate(table.columns) if column.header not in _COPIED | _TIMES]
    widths = [words[at] if table.columns[at].header not in _COPIED else whole[at] for at in range(len(texts))]
    room -= len(widths) - 1
    while sum(widths) > room and max(widths) > 1:
        rest = [at for at in broken if widths[at] > 1] or range(len(widths))
        widths[max(rest, key=lambda at: (widths[at], whole[at]))] -= 1
    while sum(widths) < room and (short := [at for at, most in enumerate(whole) if widths[at] < most]):
        widths[min(short, key=widths.__getitem__)] += 1
    for column, width in zip(table.columns, widths, strict=True):
        column.width = width


def to_minute(moment: datetime | None) -> str:
    """Return a time for a table, in UTC; empty for none."""
    return "" if moment is None else f"{moment.astimezone(UTC):%Y-%m-%d %H:%M}"


def print_question(console: Console, text: str) -> None:
    """Print a question (of ``governance.approvals.shown``), its lines folded again for a narrow terminal."""
    from glovebox_server.guards.approvals.shown import fold  # noqa: PLC0415 - imports profiles

    for line in text.split("\n"):
        for piece in fold(line, console.width) if console.is_terminal else (line,):
            console.print(Text(piece))


def print_json(file: IO[str], value: object, *, indent: int | None = 2) -> None:
    """Print a JSON value in printable ASCII, on one line with sorted keys if ``indent`` is None; times as ISO 8601."""
    text = json.dumps(value, indent=indent, sort_keys=indent is None, default=datetime.isoformat)
    file.write(text.replace("\x7f", "\\u007f") + "\n")  # the one control that JSON does not escape


def pick(of: object, *names: str) -> dict[str, Any]:
    """Return fields of an object, for JSON."""
    return {name: getattr(of, name) for name in names}
