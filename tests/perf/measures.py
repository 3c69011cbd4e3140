"""Counts what the redesign of the core is to make smaller: ``python -m tests.perf.measures [--json] [--part PART]``.

The product is ``server``, ``sandboxes`` and ``profiles``, of files that git knows or would add. By part:

static
    *product lines*: of ``.py``, ``.c`` and ``.sh``. *Code lines*: those of ``.py`` that a token stands on, other than a
    comment or a string that is a statement of its own (docstrings of modules, classes, functions and fields).
    *Longest function*: from ``def`` to its last line, docstring and inner functions included, decorators not.
    *Shared class names*: names defined in more than one module, without leading underscores.
    *Exception classes*: classes with a built-in exception, or another such class, among their bases, by name.
    *Imports inside functions*: import statements, as ruff's PLC0415 without ``noqa`` counts them. The guest is exempt:
    there they keep the start short.
    *Words*: of all Markdown outside ``tests``, between blanks. *Test lines*: ``.py`` below ``tests``; TOML apart.
    *Core*: ``.py`` below a product folder ``core``.
warm, fetch
    Files and moves of one call; ``tests/perf/walk.py`` defines them. ``OFF`` and ``IDLE`` list features that are off
    or have nothing to do: 21 files together at ab654eb. Stops must look in every call, so idle ones have no target.
"""

import argparse
import ast
import builtins
import io
import json
import tokenize
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from rich.console import Console
from rich.table import Column, Table
from tests.perf.walk import walk_fetch, walk_warm_call
from tests.repo.files import ROOT, committed, python_files

PRODUCT = ("server", "sandboxes", "profiles")
GUEST = "sandboxes/_glovebox_guest/"
APP = "server/glovebox_server/app.py"
PARTS = ("static", "warm", "fetch")
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
_NO_CODE = {getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")}


class Measure(NamedTuple):
    """One number of the table; ``before`` is that of ab654eb, counted by this module."""

    key: str
    part: str
    title: str
    before: int
    wanted: int | None = None


MEASURES = (
    Measure("warm_files", "warm", "warm print(1): files of ours", 80, 35),
    Measure("warm_moves", "warm", "moves between files", 423, 200),
    Measure("warm_returns", "warm", "returns to another file", 376),
    Measure("warm_off", "warm", "files of features that are off", 9, 0),
    Measure("warm_idle", "warm", "files of features with nothing to do", 12),
    Measure("egress_files", "fetch", "fetch_url with a key: egress files", 36, 25),
    Measure("longest_function", "static", "longest product function, lines", 127, 60),
    Measure("app_opened", "static", "app.opened, lines", 127, 40),
    Measure("product_lines", "static", "product lines", 64_570, 52_000),
    Measure("code_lines", "static", "product lines of code", 43_063, 35_000),
    Measure("shared_class_names", "static", "shared class names", 83, 10),
    Measure("exception_classes", "static", "exception classes", 73, 25),
    Measure("inner_imports", "static", "imports inside functions", 119, 15),
    Measure("words", "static", "words of Markdown", 60_478, 30_000),
    Measure("test_lines", "static", "test lines, Python", 73_090, 52_000),
    Measure("test_toml_lines", "static", "test lines, TOML", 1_186),
    Measure("core_files", "static", "core: files", 0, 25),
    Measure("core_lines", "static", "core: lines", 0, 6_000),
)

#: Optional features that a default setting leaves off: why ``print(1)`` needs none of their files, and parts of the
#: paths of these files. A folder ``guards/<name>`` belongs to a feature too.
OFF = {
    "approvals": ('approval = "none", no policy', ("/mcp/asking.py",)),
    "policy": ("no policy file", ("/startup.py", "/glovebox_profiles/policy/")),
    "budgets": ("no role with a budget", ()),
    "watch": ("no canary token, no watch rule", ()),
    "network": ('network.mode = "none"', ("/egress/",)),
    "credentials": ("no network.credential", ()),
    "proposals": ("the tool runs a program", ("/promotion/plan.py", "/promotion/transaction.py")),
    "scanning": ("files.scan = false", ("/promotion/proposing.py", "/promotion/scanner/")),
    "sealing": ("no audit_arguments_key, no audit_anchor", ("/proof/", "/glovebox_audit/segments/anchors.py")),
    "overlay": ('files.workspace = "read"', ("/artifacts/diff_form.py",)),
    "notifications": ("no notify", ("/glovebox_server/notify/",)),
    "subscriptions": ("no client listens to the log", ("/glovebox_audit/subscription.py",)),
}
#: The same of features that are on by default, and have nothing to do in ``print(1)``.
IDLE = {
    "stops": ("no stop", ("/glovebox_server/secret_files.py",)),
    "repeats": ("no failure before", ()),
    "secret_files": ("no secret in the workspace", ("/glovebox_sandboxes/hidden/",)),
    "inputs": ("no artifact is named", ()),
    "artifacts": ("no file comes out", ("/glovebox_server/artifacts/",)),
}


def files_of(features: Mapping[str, tuple[str, tuple[str, ...]]], entered: Iterable[str]) -> list[str]:
    """Return the files that belong to one of these features."""
    parts = {part for name, (_, paths) in features.items() for part in (*paths, f"/guards/{name}/")}
    return [file for file in entered if any(part in file for part in parts)]


def count_static() -> dict[str, int]:
    """Count what needs no call, by key."""
    product = dict(python_files(*PRODUCT))
    trees = {name: ast.parse(text) for name, text in product.items()}
    nodes = {name: list(ast.walk(tree)) for name, tree in trees.items()}
    functions = [(node, name) for name in nodes for node in nodes[name] if isinstance(node, _FUNCTIONS)]
    lengths = [((node.end_lineno or 0) - node.lineno + 1, name, node.name) for node, name in functions]
    inner = (ast.walk(node) for node, name in functions if not name.startswith(GUEST))
    core = [text for name, text in product.items() if "core" in name.split("/")[2:-1]]
    names = committed()
    pages = [name for name in names if name.endswith(".md") and not name.startswith("tests/")]
    return {
        "longest_function": max(lengths)[0],
        "app_opened": next(length for length, *where in lengths if where == [APP, "opened"]),
        "product_lines": _count_lines(names, PRODUCT, (".py", ".c", ".sh")),
        "code_lines": sum(_count_code(text, nodes[name]) for name, text in product.items()),
        **_count_classes(nodes),
        "inner_imports": len(
            {node for body in inner for node in body if isinstance(node, ast.Import | ast.ImportFrom)}
        ),
        "words": sum(len((ROOT / name).read_text().split()) for name in pages),
        "test_lines": _count_lines(names, "tests/", ".py"),
        "test_toml_lines": _count_lines(names, "tests/", ".toml"),
        "core_files": len(core),
        "core_lines": sum(len(text.splitlines()) for text in core),
    }


def _count_lines(names: Iterable[str], below: str | tuple[str, ...], suffix: str | tuple[str, ...]) -> int:
    selected = (name for name in names if name.startswith(below) and name.endswith(suffix))
    return sum(len((ROOT / name).read_bytes().splitlines()) for name in selected)


def _count_code(text: str, nodes: list[ast.AST]) -> int:
    docstrings = {
        (node.lineno, node.col_offset)
        for node in nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE and not (token.type == tokenize.STRING and token.start in docstrings):
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def _count_classes(nodes: Mapping[str, list[ast.AST]]) -> dict[str, int]:
    modules = defaultdict[str, set[str]](set)
    bases = dict[tuple[str, str], set[str]]()
    for module in nodes:
        for node in nodes[module]:
            if isinstance(node, ast.ClassDef):
                modules[node.name.lstrip("_")].add(module)
                bases[module, node.name] = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    exceptions = {
        name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException)
    }
    counted = set[tuple[str, str]]()
    while more := {key for key in bases.keys() - counted if bases[key] & exceptions}:
        counted |= more
        exceptions |= {name for _, name in more}
    return {"shared_class_names": sum(len(where) > 1 for where in modules.values()), "exception_classes": len(counted)}


def count(parts: Collection[str]) -> tuple[dict[str, int], dict[str, list[str]]]:
    """Count these parts; return the numbers by key, and the files behind those of calls."""
    counts: dict[str, int] = count_static() if "static" in parts else {}
    files: dict[str, list[str]] = {}
    if "warm" in parts:
        warm = walk_warm_call()
        files |= {"warm_files": [*warm.files], "warm_off": files_of(OFF, warm.files)}
        files["warm_idle"] = [file for file in files_of(IDLE, warm.files) if file not in files["warm_off"]]
        counts |= {"warm_moves": warm.moves, "warm_returns": warm.returns}
    if "fetch" in parts:
        files["egress_files"] = sorted(walk_fetch().egress)
    return counts | {key: len(names) for key, names in files.items()}, files


def main() -> None:
    """Print the table, or JSON with the files behind the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print numbers by key, and the files of calls")
    parser.add_argument("--part", action="append", choices=PARTS, help="count this part alone; fetch needs root")
    options = parser.parse_args()
    counts, files = count(options.part or PARTS)
    if options.json:
        print(json.dumps({"counts": counts, "files": files}))  # noqa: T201 - for programs
        return
    table = Table("measure", *(Column(name, justify="right") for name in ("ab654eb", "now", "wanted")))
    for measure in MEASURES:
        if measure.key in counts:
            numbers = (measure.before, counts[measure.key], measure.wanted)
            table.add_row(measure.title, *("" if number is None else f"{number:,}" for number in numbers))
    Console(width=80).print(table)


if __name__ == "__main__":
    main()
