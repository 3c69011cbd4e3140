"""The tools people install Python programs with, and what they install: made once for all tests here.

They are themselves installed from a package index; where that is impossible, what needs them is skipped.
"""

import subprocess  # noqa: TID251 - types the commands a person would
import sys
from pathlib import Path

import pytest
from tests.fixtures.installing import PYTHON, Place
from tests.repo.files import ROOT

LINTER = "skillsaw==0.22.0"
"""Pinned, because a later one may have more rules."""


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of uv, uvx and pipx, and of a linter that has the MCP registry's schemas and rules."""
    place = tmp_path_factory.mktemp("tools")
    python = str(place / "bin/python")
    commands: list[list[str | Path]] = [
        [PYTHON, "-I", "-m", "venv", "--without-pip", place],
        [sys.executable, "-I", "-m", "pip", "--python", python, "install", "--quiet", "--no-compile", "uv"],
        [place / "bin/uv", "pip", "install", "--quiet", "--python", python, "pipx", LINTER],
    ]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"uv, pipx and {LINTER} cannot be installed here: {(done.stderr or done.stdout)[-300:]}")
    return place / "bin"


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist."""
    place = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", place], cwd=ROOT, check=True, capture_output=True)
    (wheel,), (sdist,) = place.glob("*.whl"), place.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture
def place(tools: Path, built: tuple[Path, Path], runtime_dir: Path, tmp_path: Path) -> Place:
    """A place of this test's own, whose path a careless script would break at."""
    return Place(root=tmp_path / "für alle", tools=tools, wheel=built[0], sdist=built[1], data=runtime_dir)
