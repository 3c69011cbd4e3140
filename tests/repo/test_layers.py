"""Who may import whom: server → profiles → sandboxes, and what runs inside a sandbox needs nothing but Python."""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import PurePosixPath

from tests.repo.files import python_files

#: Package → what of ours it may import. Each lies in a folder of the top level.
ALLOWED = {
    "_glovebox_guest": {"_glovebox_guest"},
    "glovebox_sandboxes": {"glovebox_sandboxes", "_glovebox_guest"},
    "glovebox_profiles": {"glovebox_profiles", "glovebox_sandboxes"},
    "glovebox_audit": {"glovebox_audit", "glovebox_sandboxes"},
    "glovebox_server": {"glovebox_server", "glovebox_audit", "glovebox_profiles", "glovebox_sandboxes"},
}
FOLDERS = ("server", "sandboxes", "profiles")
OURS = {*ALLOWED, *FOLDERS, "tests", "scripts"}
GUEST = "sandboxes/_glovebox_guest/"
DOCKER = "sandboxes/glovebox_sandboxes/drivers/docker/"
MOST_MODULES = 12
MCP = ("server/glovebox_server/mcp/", "server/glovebox_server/transport/")

#: Packages that a program may have loaded; the guest then takes its figures from them. And those of an extra.
OPTIONAL = {
    "server/glovebox_server/mcp/messages.py": "opentelemetry.",
    "server/glovebox_server/telemetry/otlp.py": "opentelemetry.",
    "server/glovebox_server/promotion/reencoder.py": "PIL.",
    "sandboxes/_glovebox_guest/pictures/smaller.py": "PIL.",
    "sandboxes/_glovebox_guest/program/figures.py": "matplotlib.",
}


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
        for name, text in python_files(*FOLDERS)
        for module in imported(text)
        if (top := module.partition(".")[0]) in OURS and top not in ALLOWED[name.split("/")[1]]
    ]
    assert not wrong


def test_the_core_imports_no_guard() -> None:
    """Not for types either; the control is that guards import the core."""
    texts = dict(python_files("server"))
    of = {
        part: {module for name, text in texts.items() if f"/{part}/" in name for module in imported(text)}
        for part in ("core", "guards")
    }
    assert not [module for module in of["core"] if module.startswith("glovebox_server.guards")]
    assert "glovebox_server.core.call.Call" in of["guards"]


def test_egress_dials_for_itself_alone_and_knows_no_guard() -> None:
    """Neither guards, the core nor MCP; the control is that both patterns find imports of the other side."""
    front = {f"glovebox_server.egress.{name}" for name in ("authority", "events", "gate", "request", "serve")}
    texts = dict(python_files("server"))
    inside, outside = set[str](), set[str]()
    for name, text in texts.items():
        modules = {module.rpartition(".")[0] for module in imported(text)}
        if "/egress/" in name:
            inside |= modules
        else:
            outside |= {module for module in modules if module.startswith("glovebox_server.egress")}
    assert outside == front
    assert not [module for module in inside if module.startswith(("glovebox_server.guards", "glovebox_server.core"))]
    assert "glovebox_server.egress.gate" in inside


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Not for types either: each can be read after those it needs. A circle ends as a CycleError that names it."""
    texts = {
        name.partition("/")[2].removesuffix(".py").removesuffix("/__init__").replace("/", "."): text
        for name, text in python_files(*FOLDERS)
    }
    needs = {
        name: {module if module in texts else module.rpartition(".")[0] for module in imported(text)} & texts.keys()
        for name, text in texts.items()
    }
    order = list(TopologicalSorter(needs).static_order())
    lowest, middle, highest = "_glovebox_guest.wire", "_glovebox_guest.proxy.listener", "_glovebox_guest.work"
    assert order.index(lowest) < order.index(middle) < order.index(highest)


def test_what_runs_inside_a_sandbox_imports_the_standard_library_only() -> None:
    """The guest and the wire run on a bare Python: no package, and of ours only each other."""
    inside = [(name, text) for name, text in python_files("sandboxes") if name.startswith(GUEST)]
    assert len(inside) > 10  # the control: the pattern finds them
    wrong = []
    for name, text in inside:
        for module in imported(text):
            standard = module.partition(".")[0] in sys.stdlib_module_names
            allowed = ("_glovebox_guest", OPTIONAL.get(name, "_glovebox_guest"))
            if not standard and not module.startswith(allowed):
                wrong.append(f"{name} imports {module}")
    assert not wrong


def test_only_the_seams_know_their_foreign_library() -> None:
    """MCP is known to the server alone, the Engine's SDK to the docker driver and its image alone."""
    wrong = []
    for name, text in python_files(*FOLDERS):
        tops = {module.partition(".")[0] for module in imported(text)}
        if tops & {"mcp", "mcp_types"} and not name.startswith(MCP):
            wrong.append(f"{name} imports mcp")
        if "docker" in tops and not name.startswith(DOCKER):
            wrong.append(f"{name} imports docker")
    assert not wrong


def test_folders_hold_few_modules() -> None:
    """At most a dozen to a folder, its ``__init__`` apart: more are families of their own."""
    crowded = Counter(
        str(PurePosixPath(name).parent) for name, _ in python_files(*FOLDERS) if not name.endswith("/__init__.py")
    )
    assert {folder: count for folder, count in crowded.items() if count > MOST_MODULES} == {}
