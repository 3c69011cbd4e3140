"""A program as HTML, with a class for each kind of token; nothing is added, left out or moved. Pure."""

from collections.abc import Sequence
from typing import Final

from markupsafe import Markup, escape
from pygments.lexers.python import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String

MAX_CHARACTERS: Final = 20_000
"""Longer programs have no colours."""
MAX_COLUMNS: Final = 300
"""Nor have those with a longer line: for some lines a lexer takes the square of their length."""
_CLASSES: Final = (
    (Comment, "comment"), (String, "string"), (Keyword, "keyword"), (Operator.Word, "keyword"), (Number, "literal"),
    (Name.Builtin, "builtin"),
)  # fmt: skip


def highlighted(lines: Sequence[str]) -> list[Markup]:
    """Return the lines of a program as HTML."""
    text = "\n".join(lines)
    short = len(text) <= MAX_CHARACTERS and max(map(len, lines)) <= MAX_COLUMNS
    tokens = [*PythonLexer(ensurenl=False, stripnl=False).get_tokens(text)] if short else []
    if "".join(value for _, value in tokens) != text:
        return [escape(line) for line in lines]
    found = [Markup()]
    for kind, value in tokens:
        name = next((name for token, name in _CLASSES if kind in token), None)  # type: ignore[comparison-overlap]  # wrong stub
        for number, piece in enumerate(value.split("\n")):
            if number:
                found.append(Markup())
            found[-1] += Markup('<span class="{}">{}</span>').format(name, piece) if name and piece else escape(piece)
    return found
