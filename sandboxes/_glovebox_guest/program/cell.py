"""Runs a program as a notebook runs a cell: its last expression has a value, and it may use top-level await."""

from __future__ import annotations

from _glovebox_guest.stdlib import Any, ast

NAME = "<program>"
"""File name of the caller's code in tracebacks."""
_COROUTINE = 0x80
"""The flag CO_COROUTINE of code that awaits, see the inspect module."""
_SHOWING = ("%matplotlib", "%config InlineBackend")
"""Lines of a notebook that set how it shows figures."""


def execute(code: str, namespace: dict[str, Any]) -> Any:
    """Run all statements; return the last one's value if it is an expression without semicolon, else None."""
    tree, flags = _parsed(code), ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    silent, parts = True, []
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        end = tree.body.pop()
        # Python counts columns in bytes.
        rest = lines(code)[end.end_lineno - 1].encode("utf-8", "surrogatepass")[end.end_col_offset :]
        silent = rest.lstrip().startswith(b";")
        parts = [compile(ast.Expression(body=end.value), NAME, "eval", flags)]
    parts.insert(0, compile(tree, NAME, "exec", flags))
    if any(part.co_flags & _COROUTINE for part in parts):
        value = _awaited(parts, namespace)
    else:
        value = [eval(part, namespace) for part in parts][-1]  # noqa: S307 - this is what the sandbox is for
    return None if silent else value


def _parsed(code: str) -> Any:
    """Parse a program; if that fails, without a notebook's lines about figures."""
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


def _awaited(parts: list[Any], namespace: dict[str, Any]) -> Any:
    """Run a program with top-level await, all of it in one event loop."""
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
    """Return lines as Python counts them, unlike str.splitlines."""
    return code.replace("\r\n", "\n").replace("\r", "\n").split("\n")
