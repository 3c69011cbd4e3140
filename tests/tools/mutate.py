"""Counts which wrong versions of a guard its tests notice: ``make mutate GUARD=stops``, outside CI.

mutmut changes one expression of the guard's folder at a time and runs the unit and property tests that import the
guard. It works on a copy in ``.mutate/GUARD``, with its own packages in ``.venv-mutate``, apart from what is tested.

``equivalent_mutants.csv`` lists changes that no test can notice, each with its reason, by function and changed line:
mutmut's numbers move with the code. Exit: 1 if fewer than ``WANTED`` percent of the others are noticed.
"""

import csv
import re
import shutil
import subprocess  # noqa: TID251 - runs mutmut, in a folder of ours; nothing here comes from a sandbox
import sys
import sysconfig
from pathlib import Path

from tests.repo.files import ROOT

MUTMUT = "mutmut==3.8.1"
WANTED = 85
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.csv")
_COPIED = ("server/glovebox_server", "server/glovebox_audit", "tests", "pyproject.toml")
_LINKED = ("docs", "profiles", "sandboxes", "examples", "scripts")
_NOTICED = {"killed", "timeout", "suspicious"}


def main(guard: str) -> int:
    """Mutate one guard, print the changes that no test noticed, and return the exit status."""
    folder = f"glovebox_server/guards/{guard}"
    if not (ROOT / "server" / folder).is_dir():
        names = sorted(path.name for path in (ROOT / "server/glovebox_server/guards").iterdir() if path.is_dir())
        sys.exit(f"Cannot mutate {guard}: there is no such guard. Name one of {', '.join(names)}.")
    place, python = ROOT / ".mutate" / guard, _get_mutmut()
    tests = _make_copy(place, folder, f"guards.{guard}")
    _say(f"• {len(tests)} test files import the guard; this takes about a second a change")
    environment = {
        "PYTHONPATH": f"{sysconfig.get_path('purelib')}:{ROOT}/profiles:{ROOT}/sandboxes",
        "HOME": str(place),
    }

    def mutmut(*arguments: str) -> str:
        command = [str(python), "-m", "mutmut", *arguments]
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"mutmut {arguments[0]} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return done.stdout

    mutmut("run")
    found = dict(
        line.strip().rsplit(": ", 1) for line in mutmut("results", "--all", "true").splitlines() if ": " in line
    )
    shown = {name: _changed_line(mutmut("show", name)) for name, end in found.items() if end not in _NOTICED}
    with EQUIVALENT.open(newline="") as file:
        known = {(row["function"], row["line"]) for row in csv.DictReader(file) if row["guard"] == guard}
    missed = {name: line for name, line in shown.items() if (_function(name), line) not in known}
    for name, line in missed.items():
        _say(f"✗ {_function(name)}: {line}")
    counted = len(found) - len(shown) + len(missed)
    percent = 100 * (counted - len(missed)) / max(1, counted)
    _say(f"{guard}: {percent:.1f} % of {counted} changes noticed; {len(shown) - len(missed)} more are equivalent")
    return int(percent < WANTED)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _get_mutmut() -> Path:
    python = ROOT / ".venv-mutate/bin/python"
    if not python.exists():
        _say(f"• Getting {MUTMUT} into .venv-mutate")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(ROOT / ".venv-mutate")], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", MUTMUT]
        subprocess.run(pip, check=True)
    return python


def _make_copy(place: Path, folder: str, module: str) -> list[str]:
    """Make the tree that mutmut changes; return the test files that import the module."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for name in _COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, place / Path(name).name)
    for name in _LINKED:
        (place / name).symlink_to(ROOT / name)
    paths = (path for kind in ("unit", "property") for path in sorted((place / "tests" / kind).glob("test_*.py")))
    tests = [str(path.relative_to(place)) for path in paths if re.search(rf"\b{re.escape(module)}\b", path.read_text())]
    with (place / "pyproject.toml").open("a") as file:
        file.write(f"""
[tool.mutmut]
source_paths = ["glovebox_server"]
only_mutate = ["{folder}/*.py"]
also_copy = {["glovebox_audit", *_LINKED]}
pytest_add_cli_args = ["-p", "no:cacheprovider", "--driver", "bubblewrap", "-n", "0"]
pytest_add_cli_args_test_selection = {tests}
""")
    return tests


def _function(name: str) -> str:
    """Return ``Class.method`` or ``function`` of a mutant such as ``package.module.xǁStopsǁrecord__mutmut_8``."""
    return name.rpartition("__mutmut_")[0].rpartition(".x")[2].strip("_ǁ").replace("ǁ", ".")


def _changed_line(diff: str) -> str:
    return next((line[1:].strip() for line in diff.splitlines() if line.startswith("+") and line[1:2] != "+"), "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
