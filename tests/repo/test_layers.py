"""Who may import whom: server → profiles → sandboxes, and what runs inside a sandbox needs nothing but Python."""

import ast
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter

from tests.repo.files import python_files

ALLOWED = {
    "sandboxes": {"sandboxes"},
    "profiles": {"profiles", "sandboxes"},
    "server": {"server", "profiles", "sandboxes"},
}
OURS = {"server", "profiles", "sandboxes", "tests", "scripts"}
#: What runs inside a sandbox, and what it may import of ours.
INSIDE = ("sandboxes/guest/", "sandboxes/wire.py")
INSIDE_OURS = ("sandboxes.guest", "sandboxes.wire", "sandboxes.jsontext")

#: Packages that a program may have loaded; the guest then takes its figures from them.
OPTIONAL = {"sandboxes/guest/figures.py": "matplotlib."}


def imported(text: str) -> Iterator[str]:
    """Full names of what a module imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide who imports whom"
            yield from (f"{node.module}.{name.name}" for name in node.names)


def test_layers_import_downwards_only() -> None:
    """No module imports from a layer above its own, nor from tests."""
    wrong = [
        f"{name} imports {module}"
        for name, text in python_files(*ALLOWED)
        for module in imported(text)
        if (top := module.partition(".")[0]) in OURS and top not in ALLOWED[name.partition("/")[0]]
    ]
    assert not wrong


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Not for types either: each can be read after those it needs. A circle ends as a CycleError that names it."""
    texts = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): text
        for name, text in python_files(*ALLOWED)
    }
    needs = {
        name: {module if module in texts else module.rpartition(".")[0] for module in imported(text)} & texts.keys()
        for name, text in texts.items()
    }
    order = list(TopologicalSorter(needs).static_order())
    assert order.index("sandboxes.wire") < order.index("sandboxes.guest.proxy") < order.index("sandboxes.guest.work")


def test_what_runs_inside_a_sandbox_imports_the_standard_library_only() -> None:
    """The guest and the wire run on a bare Python: no package, and of ours only each other."""
    inside = [(name, text) for name, text in python_files("sandboxes") if name.startswith(INSIDE)]
    assert len(inside) > 10  # the control: the pattern finds them
    wrong = []
    for name, text in inside:
        for module in imported(text):
            standard = module.partition(".")[0] in sys.stdlib_module_names
            allowed = (*INSIDE_OURS, OPTIONAL.get(name, INSIDE_OURS[0]))
            if not standard and not module.startswith(allowed):
                wrong.append(f"{name} imports {module}")
    assert not wrong


def test_only_the_seams_know_their_foreign_library() -> None:
    """MCP is known to the server alone, the Engine's SDK to the docker driver and its image alone."""
    wrong = []
    for name, text in python_files("server", "profiles", "sandboxes"):
        tops = {module.partition(".")[0] for module in imported(text)}
        if tops & {"mcp", "mcp_types"} and not name.startswith("server/"):
            wrong.append(f"{name} imports mcp")
        if "docker" in tops and not name.startswith(("sandboxes/docker/", "sandboxes/images/")):
            wrong.append(f"{name} imports docker")
    assert not wrong
