"""A checkout that can be run, whatever its layout: which Python, which command, and proof that its code is its own.

Another revision gets an environment of its own with our packages and its paths: this clone's path files, which an
editable install leaves in ``.venv``, are not read there, not even by a child that ignores ``PYTHONPATH``.
"""

import json
import subprocess  # noqa: TID251 - git, and whole programs of another revision
import sys
import sysconfig
import venv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.perf.bare import environment
from tests.perf.machine import ROOT

HERE, THERE = "here", "there"
FOLDERS = ("server", "sandboxes", "profiles")
"""In every revision; packages themselves in early ones, folders with packages in them since."""
SETUP_SECONDS = 900.0  # for a runtime, and for an image of Docker, whose base and packages come over the network
ASK_SECONDS = 120.0  # for ``doctor``, and for a look at where modules are
_WHERE = """
import importlib.util, json, sys
found = {name: importlib.util.find_spec(name) for name in sys.argv[1:]}
print(json.dumps({name: [spec.origin] if spec.origin else list(spec.submodule_search_locations)
                  for name, spec in found.items() if spec}))
"""


class NoRevisionError(Exception):
    """A revision cannot be run; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How revisions of one time are started."""

    mark: str  # a file that only these have
    program: str  # module that is the command line
    app: str  # module that puts the server's parts together
    profiles: str  # folder of the shipped profiles


LAYOUTS = (
    Layout(
        mark="server/glovebox_server/__main__.py",
        program="glovebox_server",
        app="glovebox_server.app",
        profiles="profiles/glovebox_profiles/data",
    ),
    Layout(mark="server/cli.py", program="server.cli", app="server.app", profiles="profiles"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A checkout, and what runs it."""

    name: str = HERE
    root: Path = ROOT
    python: str = sys.executable
    data: Path | None = None  # its runtime; None for where the settings say

    @property
    def layout(self) -> Layout:
        """How it is started."""
        for each in LAYOUTS:
            if (self.root / each.mark).is_file():
                return each
        raise NoRevisionError(f"{self.root} has none of {', '.join(each.mark for each in LAYOUTS)}: say how it starts")

    @property
    def env(self) -> dict[str, str]:
        """What its programs get of our environment."""
        return {**environment(), **({"GLOVEBOX_DATA_DIR": str(self.data)} if self.data else {})}

    def command(self, *arguments: str) -> list[str]:
        """Its command line; to be run in ``root``."""
        return [self.python, "-m", self.layout.program, *arguments]

    def said(self, argv: Sequence[str], seconds: float = ASK_SECONDS, cwd: Path | None = None) -> str:
        """What one of its programs prints, in ``root`` unless told; whatever its exit code."""
        environ = {**environment(("PATH", "HOME", "USER", "LANG", "PIP_")), **self.env}
        done = subprocess.run(
            argv, capture_output=True, text=True, check=False, timeout=seconds, cwd=cwd or self.root, env=environ
        )
        if not done.stdout:
            raise NoRevisionError(f"{self.name}: {' '.join(argv)[:120]} printed nothing; {done.stderr[-500:].strip()}")
        return done.stdout

    def usable(self) -> dict[str, str]:
        """Drivers that it can run here, each with its version, by its own word."""
        drivers = json.loads(self.said(self.command("doctor", "--json")))["drivers"]
        return {each["driver"]: each["version"] for each in drivers if each["usable"]}


OURS = Side()  # this clone, as its ``.venv`` has it


@contextmanager
def checked_out(name: str, directory: Path) -> Iterator[Path]:
    """A revision's files, for the length of the block."""
    place = directory / "other"
    git = ["git", "-C", str(ROOT), "worktree"]
    done = subprocess.run(
        [*git, "add", "--detach", str(place), name], capture_output=True, text=True, check=False, timeout=ASK_SECONDS
    )
    if done.returncode:
        raise NoRevisionError(done.stderr.strip())
    build = place / "sandboxes/_glovebox_guest/process_1/build"
    if build.exists():  # as scripts/bootstrap does here; where it cannot, neither side has it
        subprocess.run([build], capture_output=True, check=False, timeout=ASK_SECONDS)
    try:
        yield place
    finally:
        subprocess.run([*git, "remove", "--force", str(place)], capture_output=True, check=False, timeout=ASK_SECONDS)


def made(name: str, root: Path, directory: Path) -> Side:
    """A side with an environment and an empty data directory of its own, below ``directory``."""
    place = directory / name
    venv.create(place / "venv", with_pip=False, symlinks=True)
    (site,) = (place / "venv" / "lib").glob("python3*/site-packages")
    # Before the packages, among which an editable install may have left anything.
    paths = [*map(str, roots(root)), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    (site / "side.pth").write_text("\n".join(dict.fromkeys(paths)) + "\n")
    data = place / "data"
    data.mkdir(mode=0o755)
    return Side(name=name, root=root, python=str(place / "venv" / "bin" / "python"), data=data)


def set_up(side: Side, *, base: str | None) -> None:
    """Build its runtime, and from ``base``, if there is one, its image of Docker."""
    argv = side.command("setup", *(["--docker", "--base", base] if base else []))
    environ = {**environment(("PATH", "HOME", "USER", "LANG", "PIP_")), **side.env}
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, timeout=SETUP_SECONDS, cwd=side.root, env=environ
    )
    if done.returncode:
        raise NoRevisionError(f"{side.name}: `glovebox setup` failed: {(done.stderr or done.stdout)[-500:].strip()}")


def roots(root: Path) -> list[Path]:
    """What a revision needs on its module path."""
    within = [root / name for name in FOLDERS if not (root / name / "__init__.py").exists()]
    return within if len(within) == len(FOLDERS) else [root]


def packages(root: Path) -> list[str]:
    """The names under which a revision's own code is imported."""
    found = (each for place in roots(root) for each in sorted(place.iterdir()))
    return [each.name for each in found if (each / "__init__.py").exists()]


def own_code(sides: Sequence[Side]) -> dict[str, str]:
    """Where each side finds the code of both: its own, below its root, and nobody else's."""
    # Asked twice: as a server is started, and by a Python that is deaf to its surroundings, as children are.
    names = sorted({name for side in sides for name in packages(side.root)})
    facts: dict[str, str] = {}
    for side in sides:
        for deaf in ([], ["-I"]):
            argv = [side.python, *deaf, "-c", _WHERE, *names]
            places = json.loads(side.said(argv, cwd=Path("/") if deaf else side.root))
            wrong = strays(places, side.root, packages(side.root))
            if wrong:
                raise NoRevisionError(f"{side.name} ({side.root}) does not run its own code: {'; '.join(wrong)}")
        facts[f"{side.name} runs"] = ", ".join(f"{name} of {side.root}" for name in packages(side.root))
    return facts


def strays(places: Mapping[str, Iterable[str]], root: Path, own: Sequence[str]) -> list[str]:
    """What is wrong with where modules were found: by name, files or folders that an import of it would read."""
    missing = [f"{name} is not found" for name in own if name not in places]
    elsewhere = [
        f"{name} is {place}"
        for name, found in places.items()
        for place in found
        if not Path(place).is_relative_to(root)
    ]
    return missing + elsewhere


def alternating(sides: Sequence[Side], number: int) -> Sequence[Side]:
    """The sides, every other time in the other order."""
    return sides if number % 2 == 0 else sides[::-1]


def parsed(side: Side, program: str) -> Any:
    """What a program of ours prints as JSON when this side runs it, beside its own tests."""
    return json.loads(side.said([side.python, "-c", program]))
