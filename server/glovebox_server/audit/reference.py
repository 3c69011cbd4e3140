"""Writes the documentation of events from the events themselves. Used by a test and by nothing at run time."""

import ast
import csv
import inspect
import io
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
    return [row for kind, event in EVENTS.items() for row in _rows_of(kind, event)]


def _rows_of(kind: str, event: type[Event]) -> list[Row]:
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
            Row(kind=kind, name=ast.unparse(field.target), type=ast.unparse(field.annotation), meaning=meaning)
        )
    return found


def table() -> str:
    """Return docs/operate/audit-events.csv: each event, and under it each of its fields."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["event", "field", "type", "meaning"])
    described: dict[str, type[Event]] = {"every one of a call": CallEvent, **EVENTS}
    for kind, event in described.items():
        lines.writerow([kind, "", "of a call" if issubclass(event, CallEvent) else "", _plain(event.__doc__ or "")])
        lines.writerows([kind, row.name, row.type, _plain(row.meaning)] for row in _rows_of(kind, event))
    return text.getvalue()


def summary() -> str:
    """Return the list of events in docs/operate/audit.md: the first sentence of each."""
    return "".join(
        f"- `{kind}`: {_plain(event.__doc__ or '').split('. ')[0].rstrip('.')}\n" for kind, event in EVENTS.items()
    )


def _plain(docstring: str) -> str:
    return " ".join(docstring.replace("``", "`").split())
