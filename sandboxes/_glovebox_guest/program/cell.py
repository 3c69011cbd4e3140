"""Runs a program as a notebook runs a cell: its last expression has a value, and it may await outside of functions."""

from __future__ import annotations

from _glovebox_guest.stdlib import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

NAME = "<program>"
"""File name of the caller's code in tracebacks."""
_COROUTINE = 0x80
"""Of the flags of code that awaits: CO_COROUTINE, see the inspect module."""
_SHOWING = ("%matplotlib", "%config InlineBackend")
"""Lines of a notebook that say how it shows figures."""


def execute(code: str, namespace: dict[str, Any]) -> Any:
    """Run all statements; the value of the last one if it is an expression that no semicolon ends, else None."""
    from _glovebox_guest.stdlib import ast

    tree, flags = _parsed(code), ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    silent, parts = True, []
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        end = tree.body.pop()
        silent = ";" in code and _ends_with_semicolon(code, end)
        parts = [compile(ast.Expression(body=end.value), NAME, "eval", flags)]
    parts.insert(0, compile(tree, NAME, "exec", flags))
    if any(part.co_flags & _COROUTINE for part in parts):
        value = _awaited(parts, namespace)
    else:
        value = [eval(part, namespace) for part in parts][-1]  # noqa: S307 - this is what the sandbox is for
    return None if silent else value


def _parsed(code: str) -> Any:
    """The tree of a program, where Python cannot read it without a notebook's lines about how figures are shown."""
    from _glovebox_guest.stdlib import ast

    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        return compile(code, NAME, "exec", flags)
    except SyntaxError:
        own = lines(code)
        kept = [f"{line.partition('%')[0]}pass" if line.lstrip().startswith(_SHOWING) else line for line in own]
        if kept == own:
            raise
        try:
            return compile("\n".join(kept), NAME, "exec", flags)
        except SyntaxError:
            pass
        raise  # the first one, with the program's own lines


def _ends_with_semicolon(code: str, last: Any) -> bool:
    # Of columns, Python counts bytes.
    rest: bytes = lines(code)[last.end_lineno - 1].encode("utf-8", "surrogatepass")[last.end_col_offset :]
    return rest.lstrip().startswith(b";")


def _awaited(parts: list[Any], namespace: dict[str, Any]) -> Any:
    """Run a program that awaits outside of functions, all of it in one event loop."""
    import asyncio  # 44 ms: for such a program alone

    async def run() -> Any:
        value = None
        for part in parts:
            value = eval(part, namespace)  # noqa: S307 - as above
            if part.co_flags & _COROUTINE:
                value = await value
        return value

    return asyncio.run(run())


def lines(code: str) -> list[str]:
    """Lines as Python counts them, which is not as str.splitlines does."""
    return code.replace("\r\n", "\n").replace("\r", "\n").split("\n")
