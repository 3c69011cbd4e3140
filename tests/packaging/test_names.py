"""What a project calls its own modules: it gets them inside, it does not replace ours outside."""

import os
import subprocess  # noqa: TID251 - starts the command line as a shell would
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.zygotes import answer
from tests.repo.files import ROOT

from glovebox_sandboxes.conformance.case import LIMITS
from glovebox_sandboxes.contract.base import WORKSPACE, Driver, Mount, OpenSandbox, Plan, SandboxSpec
from glovebox_sandboxes.drivers import registry
from glovebox_sandboxes.session import connection
from glovebox_server.settings import Settings

#: Folders that projects have, among them those of this repository and names of our own packages.
OWN = (
    "server", "sandboxes", "profiles", "tests", "glovebox", "glovebox_server", "glovebox_sandboxes",
    "glovebox_profiles", "workspace", "guest", "jobs", "program",
)  # fmt: skip
#: Standard modules that we, click or the interpreter itself import early.
STANDARD = ("json", "traceback", "linecache", "typing", "sitecustomize", "usercustomize")
LAUNCHERS = ("glovebox", "glovebox-mcp")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose every module leaves a trace when it is imported and can leave one, and says whose it is."""
    found = tmp_path / "a project"
    for name in (*OWN, "click", "mcp", "anyio"):
        (found / name).mkdir(parents=True)
        (found / name / "__init__.py").write_text('OWN = "the project\'s"\n' + _trace(found))
        (found / name / "__main__.py").write_text(_trace(found))
    for name in (*STANDARD, "startup"):
        (found / f"{name}.py").write_text('OWN = "the project\'s"\n' + _trace(found))
    for path in (found, *found.rglob("*")):
        path.chmod(0o755)
    return found


def _trace(found: Path) -> str:
    return f"try: open({str(found / 'was here')!r}, 'a').write(__file__)\nexcept OSError: pass\n"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_no_module_of_a_project_replaces_ours(launcher: str, project: Path, tmp_path: Path) -> None:
    """Called in the project, with all of it on PYTHONPATH, through a link in a directory with a space in its name."""
    linked = tmp_path / "my bin" / launcher
    linked.parent.mkdir()
    linked.symlink_to(ROOT / ".venv/bin" / launcher)
    hostile = {
        "PYTHONPATH": str(project),
        "PYTHONSTARTUP": str(project / "startup.py"),
        "PYTHONHOME": str(project),
        "PYTHONOPTIMIZE": "2",
        "PYTHONUSERBASE": str(project),
        "PYTHONINSPECT": "",
    }
    done = subprocess.run(
        [linked, "--help"], cwd=project, env={**os.environ, **hostile}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: glovebox [OPTIONS] COMMAND"), done.stdout
    assert done.stderr == ""
    assert not (project / "was here").exists()


def test_control_without_the_launcher_the_project_is_imported(project: Path) -> None:
    """Control: the same Python, started as pip's own scripts start it, takes modules of the project."""
    subprocess.run(
        [ROOT / ".venv/bin/python", "-m", "glovebox_server", "--help"],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(project)},
        capture_output=True,
        check=False,
    )
    assert (project / "was here").exists()


LOOK = f"""
import importlib, importlib.util, json, sys
import matplotlib.pyplot as plt
def owner(name):
    try:
        return getattr(importlib.import_module(name), "OWN", "another's")
    except ModuleNotFoundError:
        return "nobody's"
print(json.dumps({{
    "own": {{name: owner(name) for name in {OWN!r}}},
    "standard": {{name: owner(name) for name in {STANDARD[:4]!r}}},
    "path": sys.path,
    "backend": plt.get_backend(),
    "canvas": [f"{{kind.__module__}}.{{kind.__name__}}" for kind in type(plt.figure().canvas).__mro__[:2]],
}}))
"""


@asynccontextmanager
async def _cold(driver: Driver, plan: Plan) -> AsyncIterator[OpenSandbox]:
    async with driver.open(plan) as sandbox:
        yield sandbox


@asynccontextmanager
async def _warm(driver: Driver, plan: Plan) -> AsyncIterator[OpenSandbox]:
    async with driver.source(plan) as source, source.open() as sandbox:
        yield sandbox


async def _seen(project: Path, preload: tuple[str, ...], *, warm: bool) -> Any:
    """What LOOK prints in a sandbox that shows this project."""
    spec = SandboxSpec(
        limits=replace(LIMITS, pids=64, memory_bytes=512 * 1024**2),
        mounts=(Mount(source=str(project), target=WORKSPACE),),
        preload=preload,
    )
    async with registry.opened(Settings().data_dir, f"names{os.getpid()}") as available:
        driver = await available.get("bubblewrap")
        plan = driver.plan(spec)
        async with (_warm if warm else _cold)(driver, plan) as sandbox:
            return await answer(await connection.attest(sandbox, plan), LOOK)


@pytest.mark.driver("bubblewrap")
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("preload", [(), ("pandas", "matplotlib.pyplot")], ids=["bare", "preloaded"])
async def test_a_program_gets_the_modules_of_its_workspace(warm: bool, preload: tuple[str, ...], project: Path) -> None:
    """Its own by every name but the standard library's: those are always Python's, warm as cold."""
    found = await _seen(project, preload, warm=warm)
    assert found["own"] == dict.fromkeys(OWN, "the project's")
    assert found["standard"] == dict.fromkeys(STANDARD[:4], "another's")
    assert found["path"][0] == WORKSPACE
    assert [place for place in found["path"][1:] if not place.startswith(("/usr/lib", "/opt/packages"))] == []
    assert found["backend"] == "module://_glovebox_guest.program.figures"
    assert found["canvas"] == [
        "_glovebox_guest.program.figures.FigureCanvas",
        "matplotlib.backends.backend_agg.FigureCanvasAgg",
    ]


@pytest.mark.driver("bubblewrap")
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
async def test_an_empty_workspace_offers_no_names(warm: bool, tmp_path: Path) -> None:
    """Nothing of the guest's is on the path: not its folder ``workspace``, not our packages."""
    tmp_path.chmod(0o755)
    found = await _seen(tmp_path, (), warm=warm)
    assert found["own"] == dict.fromkeys(OWN, "nobody's")
