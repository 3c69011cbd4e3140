"""What Glovebox is compared with: the same program in a bare interpreter, as a subprocess, with nothing isolated.

Always the fastest CPython of this machine, by its absolute path: a slower one would flatter us.
"""

import os
import shutil
import statistics
import subprocess  # noqa: TID251 - the bare interpreter is what we measure ourselves against
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from glovebox_sandboxes.contract.base import PACKAGES
from glovebox_sandboxes.runtime import runtime

TRIES = 15  # starts of each candidate; they differ by tenths
OLDEST = (3, 11)  # the oldest series that Glovebox itself runs on
SECONDS = 60  # for one program; the slowest takes half a second
CODE = "print(1)"
PRINTED = "1\n"
#: Both run in the workspace: the bare interpreter in the host's directory, the sandbox in its mount.
PANDAS_CODE = """
import pandas as pd
frame = pd.read_csv("data.csv")
print(frame.groupby("city")["amount"].sum().to_string())
"""
_CITIES = ("Aachen", "Bergen", "Cádiz", "Dijon")
_CSV_ROWS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Bare:
    """An interpreter, and where its pandas is."""

    python: str
    version: str
    packages: str = ""  # a directory that is added to the module path; empty where nothing needs to be

    @property
    def told(self) -> str:
        """For the list of what was measured."""
        return f"{self.python} {self.version}{', packages of the runtime' if self.packages else ''}"

    def run(self, code: str, cwd: Path | None = None) -> str:
        """Run a program and return what it printed."""
        if self.packages:
            code = f"import sys; sys.path.append({self.packages!r})\n{code}"
        argv = [self.python, "-I", "-c", code]
        return subprocess.run(argv, capture_output=True, check=True, cwd=cwd, timeout=SECONDS, text=True).stdout

    def milliseconds(self, code: str, printed: str, cwd: Path | None = None) -> float:
        """How long one run takes."""
        began = time.perf_counter()
        found = self.run(code, cwd)
        spent = (time.perf_counter() - began) * 1000
        if found != printed:
            raise RuntimeError(f"{self.python} printed {found[:100]!r}")
        return spent


def candidates() -> list[str]:
    """Every ``python3`` of this machine that is found where people put them."""
    named = [shutil.which(name, path=f"/usr/bin:/usr/local/bin:{os.environ.get('PATH', '')}") for name in _NAMES]
    base = getattr(sys, "_base_executable", sys.executable)
    managed = sorted(str(each) for each in Path.home().glob(".pyenv/versions/3.*/bin/python3"))
    found = {str(Path(each).resolve()): each for each in reversed([*filter(None, named), base, *managed])}
    return list(reversed(found.values()))


_NAMES = ("python3", *(f"python3.{minor}" for minor in range(11, 16)))


def fastest(tries: int = TRIES) -> Bare:
    """The candidate that runs ``print(1)`` soonest, by medians of interleaved runs; of versions people would use."""
    taken: dict[Bare, list[float]] = {}
    for python in candidates():
        try:
            version = Bare(python=python, version="").run("import platform; print(platform.python_version())").strip()
        except (OSError, subprocess.SubprocessError):
            continue
        if tuple(map(int, version.split(".")[:2])) < OLDEST:
            continue
        taken[Bare(python=python, version=version)] = []
    for _ in range(tries):
        for bare, times in taken.items():
            times.append(bare.milliseconds(CODE, PRINTED))
    return min(taken, key=lambda bare: statistics.median(taken[bare]))


def with_pandas(data: Path) -> Bare:
    """The interpreter that the sandboxes' runtime was copied from, with the runtime's own packages: the same pandas."""
    found = runtime.find(data)
    if found is None:
        raise RuntimeError(f"there is no runtime in {data}: run `glovebox setup`")
    python = str(runtime.base_python())
    bare = Bare(python=python, version=found.version, packages=str(found.root / PACKAGES.removeprefix("/")))
    program = "import pandas, platform; print(platform.python_version(), pandas.__version__)"
    try:
        version, pandas = bare.run(program).split()
    except subprocess.SubprocessError as problem:
        raise RuntimeError(f"{python} cannot import the runtime's pandas: {problem}") from problem
    if version != found.version:
        raise RuntimeError(f"{python} is {version}, and the runtime was copied from {found.version}")
    return Bare(python=python, version=f"{version} with pandas {pandas}", packages=bare.packages)


def write_csv(workspace: Path) -> None:
    """The file that the program with pandas reads."""
    rows = (f"{_CITIES[number % len(_CITIES)]},{number % 97}" for number in range(_CSV_ROWS))
    (workspace / "data.csv").write_text("\n".join(("city,amount", *rows)) + "\n", encoding="utf-8")


def environment(names: Sequence[str] = ("GLOVEBOX_", "XDG_", "DOCKER_")) -> dict[str, str]:
    """What a server gets of our environment: where things are, and nothing that changes how it runs."""
    return {name: value for name, value in os.environ.items() if name.startswith(tuple(names))}
