"""The table of events as documentation, taken from the events themselves. Used by a test and by nothing at run time."""

import ast
import inspect
import textwrap
from dataclasses import dataclass

from glovebox_server.audit.events import EVENTS, CallEvent, Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One field of one event."""

    kind: str
    """Kind of the event, e.g. ``call.decided``."""
    name: str
    """Name of the field in the record's ``data``."""
    type: str
    """Its type as written in the source; ``| None`` means that it may be absent."""
    meaning: str
    """What its docstring says."""


def rows() -> list[Row]:
    """Return one row per field of every event, in the order of ``EVENTS`` and of the fields."""
    return [row for event in EVENTS.values() for row in _rows_of(event)]


def _rows_of(event: type[Event]) -> list[Row]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(event))).body[0]
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    found = []
    # A field's docstring is the expression that follows it; the last statement has none.
    for field, text in zip(body, [*body[1:], ast.Pass()], strict=True):
        if not isinstance(field, ast.AnnAssign) or "ClassVar" in ast.unparse(field.annotation):
            continue
        documented = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        meaning = " ".join(str(text.value.value).split()) if documented else ""  # type: ignore[attr-defined]  # a docstring
        found.append(
            Row(kind=event.kind, name=ast.unparse(field.target), type=ast.unparse(field.annotation), meaning=meaning)
        )
    return found


def markdown() -> str:
    """Return the events section of docs/operate/audit.md."""
    parts = []
    for kind, event in EVENTS.items():
        call = " Belongs to a call." if issubclass(event, CallEvent) else ""
        fields = [f"- `{row.name}`: `{row.type}`. {row.meaning.replace('``', '`')}" for row in _rows_of(event)]
        parts.append(f"### `{kind}`\n\n{inspect.cleandoc(event.__doc__ or '')}{call}\n\n" + "\n".join(fields))
    return "\n\n".join(parts) + "\n"
