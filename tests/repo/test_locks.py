"""The locks hold what pyproject.toml asks for, exact, with hashes, and agree with each other."""

import re
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.repo.files import ROOT, python_files
from tests.repo.test_layers import ALLOWED, FOLDERS, OPTIONAL, imported

_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^ ]+) \\$")
_HASH = re.compile(r"^    --hash=sha256:[0-9a-f]{64}( \\)?$")


def pins(name: str) -> dict[str, str]:
    """Version by package, of a lock whose every line is a comment, a pin or a hash."""
    found: dict[str, str] = {}
    for line in (ROOT / name).read_text().splitlines():
        pin = _PIN.match(line)
        if pin:
            found[canonicalize_name(pin[1])] = pin[2]
        else:
            assert not line or line.startswith("#") or _HASH.match(line), f"{name}: {line}"
    return found


def asked(kind: str) -> list[Requirement]:
    """What pyproject.toml asks for at run time, or for development beside that."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    runtime = project["project"]["dependencies"]
    more = [*project["dependency-groups"]["dev"], *project["build-system"]["requires"]] if kind == "dev" else []
    return [Requirement(text) for text in [*runtime, *more]]


@pytest.mark.parametrize(("lock", "kind"), [("requirements.lock", "runtime"), ("requirements-dev.lock", "dev")])
def test_the_lock_holds_a_fitting_version_of_everything_asked_for(lock: str, kind: str) -> None:
    """Every requirement is pinned to a version it allows. Out of date: scripts/relock."""
    locked = pins(lock)
    wrong = []
    for each in asked(kind):
        version = locked.get(canonicalize_name(each.name))
        if version is None or version not in each.specifier:
            wrong.append(f"{each}, but {lock} has {version}")
    assert not wrong


def test_what_is_tested_is_what_is_shipped() -> None:
    """Every runtime pin is the same in the development lock."""
    development = pins("requirements-dev.lock")
    assert {
        name: version for name, version in pins("requirements.lock").items() if development.get(name) != version
    } == {}


def test_whatever_is_imported_is_asked_for() -> None:
    """Each package that ours import is in pyproject.toml by its own name, and each that is there is imported."""
    tops = {
        module.partition(".")[0]
        for name, text in python_files(*FOLDERS)
        for module in imported(text)
        if not (name in OPTIONAL and module.startswith(OPTIONAL[name]))
    }
    foreign = tops - sys.stdlib_module_names - ALLOWED.keys()
    brought = packages_distributions()
    needed = {canonicalize_name(brought[top][0]) for top in foreign}
    assert needed == {canonicalize_name(each.name) for each in asked("runtime")}
