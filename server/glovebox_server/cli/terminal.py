"""The one place where commands print: nothing that a stranger said is obeyed, hidden or reordered by a terminal.

Always, not only where there is one: what goes to a pipe is looked at in a pager, a build's log or an editor sooner or
later. What has to stay exact does not come here, an artifact's bytes, or has nothing to escape: JSON is ASCII.
"""

import json
from collections.abc import Iterable
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from glovebox_server.printable import LAYOUT, printable


class Terminal(Console):
    """A console all of whose text has passed ``printable``, whoever forgot to ask for it."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render, and let nothing but rich's own controls through."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(printable(text, LAYOUT), style)


def print_json(file: IO[str], value: object, *, indent: int | None = 2) -> None:
    """Print a JSON value, on one line with sorted keys where ``indent`` is None. All of it is printable ASCII."""
    text = json.dumps(value, indent=indent, sort_keys=indent is None)
    file.write(text.replace("\x7f", "\\u007f") + "\n")  # the one control that JSON's escapes leave as it is
