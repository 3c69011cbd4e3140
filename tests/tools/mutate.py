"""Counts which wrong versions of a guard its tests notice: ``make mutate GUARD=stops``, outside CI.

mutmut changes one expression of the guard's folder at a time and runs the tests that reach its function: of unit,
property and escape tests that import the guard, and of ``WHOLE_CALLS``. Processes that tests start remain unchanged. It
works on a copy in ``.mutate/GUARD``, with its own packages in ``.venv-mutate``, apart from what is tested.

``equivalent_mutants.csv`` lists changes that no test can notice, each with its reason, by function and changed line:
mutmut's numbers move with the code. Exit: 1 if fewer than ``WANTED`` percent of the others are noticed.
"""

import csv
import os
import re
import shutil
import subprocess  # noqa: TID251 - runs mutmut, in a folder of ours; nothing here comes from a sandbox
import sys
import sysconfig
from pathlib import Path

from tests.repo.files import ROOT

from glovebox_server.settings import Settings

MUTMUT = "mutmut==3.8.1"
WANTED = 85
WHOLE_CALLS = "tests/interaction/test_call_order.py"
"""Goes through every guard and names none."""
SLOW = {"test_hidden_from_programs.py", "test_keys_in_calls.py", "test_planted_secrets.py"}
"""Left out: they take a minute or more."""
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.csv")
_COPIED = ("server/glovebox_server", "server/glovebox_audit", "tests", "pyproject.toml")
_LINKED = ("docs", "profiles", "sandboxes", "examples", "scripts")
_NOTICED = {"killed", "timeout", "suspicious"}
_SHOW = "import sys; from mutmut.__main__ import show; [show.callback(name) for name in sys.argv[1:]]"


def main(guard: str) -> int:
    """Mutate one guard, print the changes that no test noticed, and return the exit status."""
    folder = f"glovebox_server/guards/{guard}"
    if not (ROOT / "server" / folder).is_dir():
        names = sorted(path.name for path in (ROOT / "server/glovebox_server/guards").iterdir() if path.is_dir())
        sys.exit(f"Cannot mutate {guard}: there is no such guard. Name one of {', '.join(names)}.")
    place, python = ROOT / ".mutate" / guard, str(_get_mutmut())
    tests = _make_copy(place, folder, f"guards.{guard}")
    _say(f"• {len(tests)} test files; this takes some seconds a change")
    environment = {
        "PYTHONPATH": f"{sysconfig.get_path('purelib')}:{ROOT}/profiles:{ROOT}/sandboxes",
        "HOME": str(place),
        "PATH": os.environ["PATH"],
        "GLOVEBOX_DATA_DIR": str(Settings().data_dir),
    }

    def run(*arguments: str) -> str:
        command = [python, *arguments]
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"mutmut failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return done.stdout

    run("-m", "mutmut", "run")
    results = run("-m", "mutmut", "results", "--all", "true")
    found = dict(line.strip().rsplit(": ", 1) for line in results.splitlines() if ": " in line)
    shows = run("-c", _SHOW, *(name for name, end in found.items() if end not in _NOTICED)).split("\n# ")
    shown = {show.partition(": ")[0].removeprefix("# "): _changed_line(show) for show in shows if show}
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
    # For processes that tests start, which read no PYTHONPATH.
    (packages,) = (ROOT / ".venv-mutate/lib").glob("python*/site-packages")
    lines = [sysconfig.get_path("purelib"), *(str(ROOT / name) for name in ("server", "profiles", "sandboxes"))]
    (packages / "glovebox.pth").write_text("\n".join(lines))
    return python


def _make_copy(place: Path, folder: str, module: str) -> list[str]:
    """Make the tree that mutmut changes; return the test files to run."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for name in _COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, place / Path(name).name)
    for name in _LINKED:
        (place / name).symlink_to(ROOT / name)
    paths = (path for kind in ("unit", "property", "escape") for path in (place / "tests" / kind).glob("test_*.py"))
    imports = re.compile(rf"\b{re.escape(module)}\b")
    importing = (path for path in paths if path.name not in SLOW and imports.search(path.read_text()))
    tests = [WHOLE_CALLS, *sorted(str(path.relative_to(place)) for path in importing)]
    with (place / "pyproject.toml").open("a") as file:
        file.write(f"""
[tool.mutmut]
source_paths = ["glovebox_server"]
only_mutate = ["{folder}/*.py"]
also_copy = {["glovebox_audit", *_LINKED]}
pytest_add_cli_args = ["--ff", "--timeout", "60", "--driver", "bubblewrap", "-n", "0"]
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
