"""The one place where commands print: nothing that a stranger said is obeyed, hidden or reordered by a terminal.

Always, not only where there is one: what goes to a pipe is looked at in a pager, a build's log or an editor sooner or
later. What has to stay exact does not come here, an artifact's bytes, or has nothing to escape: JSON is ASCII.
"""

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any, Literal

from rich.cells import chop_cells
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.text import Text

from glovebox_server.printable import LAYOUT, printable

if TYPE_CHECKING:
    from rich.table import Table

#: What ``governance.approvals.shown`` puts before each line that the caller wrote.
_BAR = re.compile(r" *\d* │ ")

#: Fewest columns that a folded line keeps for itself.
_NARROW = 20

#: Columns; wider than any line of a table.
_WIDE = 10_000


class Terminal(Console):
    """A console all of whose text has passed ``printable``, whoever forgot to ask for it."""

    def __init__(self, **options: Any) -> None:
        """Take rich's options; lines are not broken, and nothing is coloured or drawn for what it looks like."""
        super().__init__(**{"soft_wrap": True, "highlight": False, "emoji": False} | options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render, and let nothing but rich's own controls through."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(printable(text, LAYOUT), style)


def new_table(*titles: str, right: Collection[str] = (), whole: bool = False) -> "Table":
    """Return a table without rows.

    Args:
        titles: of its columns.
        right: those of them that hold numbers.
        whole: whether its cells are not folded on a terminal.
    """
    from rich.table import Table  # noqa: PLC0415 - only where one is printed

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        justify: Literal["right", "left"] = "right" if title in right else "left"
        table.add_column(title, justify=justify, overflow="ellipsis" if whole else "fold", no_wrap=whole)
    return table


def print_table(console: Console, table: "Table", *, folded: bool = True, wide: int = _WIDE) -> None:
    """Print a table, its cells folded to the width of a terminal; into a pipe one line for each row, as grep reads it.

    One that is not to be folded shows a terminal no column in which nothing stands, or 0 alone: it has to fit.

    Args:
        console: where to.
        table: no cell of it is read as markup.
        folded: False where a cell is to be copied, so that it must not be broken on a terminal either.
        wide: columns into a pipe, where a row is one that people read and may take several lines.
    """
    if console.is_terminal and folded:
        console.print(table, markup=False)
        return
    if console.is_terminal:
        said = [each for each in table.columns if not {str(cell) for cell in each.cells} <= {"", "0"}]
        table.columns = [replace(each, _index=index) for index, each in enumerate(said)]
    options = console.options.update(width=wide, markup=False)
    table.width = Measurement.get(console, options, table).maximum
    for line in console.render_lines(table, options):
        text = Text.assemble(*((segment.text, segment.style or "") for segment in line))
        text.rstrip()  # on a terminal blanks at the end would be lines of their own
        console.print(text, soft_wrap=True)


def print_question(console: Console, text: str) -> None:
    """Print what a person is asked. On a terminal no line begins with what the caller wrote: a long one is folded.

    Args:
        console: where to.
        text: of ``governance.approvals.shown``.
    """
    for line in text.split("\n"):
        for piece in _folded(line, console.width) if console.is_terminal else (line,):
            console.print(Text(piece))


def _folded(line: str, columns: int) -> Iterable[str]:
    """A line in pieces that fit; what goes on stands behind the same bar, or is indented."""
    found = _BAR.match(line)
    first = found[0] if found else ""
    further = f"{'│ ':>{len(first)}}" if found else "    "
    pieces = chop_cells(line[len(first) :], max(_NARROW, columns - max(len(first), len(further))))
    for number, piece in enumerate(pieces or [""]):
        yield (further if number else first) + piece


def print_json(file: IO[str], value: object, *, indent: int | None = 2) -> None:
    """Print a JSON value, on one line with sorted keys where ``indent`` is None. All of it is printable ASCII."""
    text = json.dumps(value, indent=indent, sort_keys=indent is None)
    file.write(text.replace("\x7f", "\\u007f") + "\n")  # the one control that JSON's escapes leave as it is
