"""Installed as people install it, outside of the checkout: set up, serve, call. Takes minutes and a package index."""

import re
import shlex
import subprocess  # noqa: TID251 - types the commands a person would
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import anyio
import pytest
from mcp import Client, StdioServerParameters
from tests.fixtures.installing import PYTHON, Place
from tests.repo.files import ROOT

from glovebox_profiles.load.loader import SHIPPED
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.runtime import packages, runtime

pytestmark = pytest.mark.timeout(900)


def _pip(place: Place) -> list[str]:
    venv = place.root / "venv"
    place.run(PYTHON, "-I", "-m", "venv", venv)
    place.run(venv / "bin/python", "-I", "-m", "pip", "install", "--quiet", place.wheel)
    return [str(venv / "bin/glovebox-mcp")]


def _pipx(place: Place) -> list[str]:
    place.run(place.tools / "pipx", "install", "--quiet", place.wheel)
    return [str(place.root / "pipx/bin/glovebox-mcp")]


WAYS: Mapping[str, Callable[[Place], Sequence[str]]] = {
    "pip": _pip,
    "uvx": lambda place: [str(place.tools / "uvx"), "--from", str(place.wheel), "glovebox-mcp"],
    "pipx": _pipx,
}


async def _works(place: Place, command: Sequence[str]) -> None:
    """Set-up says Ready; a client that starts what it is told to gets the sum of four numbers."""
    assert "Ready: Python 3" in place.run(*command, "setup")
    told = place.run(*command, "client-config")
    assert ("until uv cleans its cache" in told) == command[0].endswith("/uvx")
    (add,) = (shlex.split(line) for line in told.splitlines() if line.startswith("claude mcp add "))
    program, *arguments = add[5:]
    assert arguments[0] == "serve"
    server = StdioServerParameters(command=program, args=arguments, env=place.env(), cwd=str(place.root / "project"))
    async with Client(server, read_timeout_seconds=60) as client:
        answered = await client.call_tool("run_python", {"code": "import numpy\nint(numpy.arange(4).sum())"})
    assert (answered.structured_content or {})["value"] == "6", answered


@pytest.mark.driver("bubblewrap")
@pytest.mark.parametrize("way", WAYS)
async def test_an_installation_sets_up_serves_and_calls(way: str, place: Place) -> None:
    """Every way people install Python programs, from a path with a space and more than ASCII in it, umask 077."""
    await _works(place, WAYS[way](place))


@pytest.mark.driver("bubblewrap")
async def test_an_environment_without_pip_builds_a_runtime(place: Place) -> None:
    """What `uv tool` installs has none; what it builds under umask 077, of one package, the sandbox's user can read."""
    place = replace(place, data=place.root / "data")
    place.run(place.tools / "uv", "tool", "install", "--quiet", place.wheel)
    python = next((place.root / "uv/tools").glob("*/bin/python"))
    absent = await anyio.run_process([python, "-I", "-m", "pip"], check=False)
    assert b"No module named pip" in absent.stderr, "the control"
    (installed,) = python.parents[1].glob("lib/*/site-packages/glovebox_sandboxes/runtime/environments/default.toml")
    described = re.sub(r"(?ms)^modules = \[.*?\]$", 'modules = ["numpy"]', installed.read_text())
    notes = re.findall(r"^#.*\n", runtime.LOCK.read_text(), re.MULTILINE)
    lock = "".join([*notes, _pin("numpy", runtime.LOCK.read_text())])
    for file, text in ((installed, described), (installed.with_suffix(".lock"), lock)):
        file.unlink()  # in uv's cache it is the same file
        file.write_text(text)
    shipped = (SHIPPED / "run_python.toml").read_text()
    (place.root / "profiles/run_python.toml").write_text(shipped.replace('"numpy", "pandas", "matplotlib"', '"numpy"'))
    await _works(place, [str(place.root / "uv/bin/glovebox-mcp")])


def _pin(name: str, lock: str) -> str:
    """The lines of a lock for one package."""
    (pin,) = re.findall(rf"^{name}==.*\n(?:    .*\n)*", lock, re.MULTILINE)
    return str(pin)


def test_the_sdist_makes_the_same_wheel(place: Place) -> None:
    """By pip, in an environment of its own; so what is installed from it is the same."""
    made = place.root / "made"
    place.run(sys.executable, "-I", "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", made, place.sdist)
    (wheel,) = made.iterdir()
    with ZipFile(wheel) as ours, ZipFile(place.wheel) as theirs:
        assert {each.filename: each.CRC for each in ours.infolist()} == {
            each.filename: each.CRC for each in theirs.infolist()
        }


async def test_without_any_pip_uv_installs_and_checks_every_hash(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Debian's bare Python, uv stands in. The same package with another hash is refused."""
    monkeypatch.setattr(packages, "_FIND_PIP", "print([])")
    monkeypatch.setenv("UV", str(tools / "uv"))
    pin = _pin("cycler", runtime.LOCK.read_text())
    lock = tmp_path / "one.lock"
    lock.write_text(pin)
    series = "{}.{}".format(*sys.version_info)
    await packages.install(tmp_path / "good", lock, series)
    assert (tmp_path / "good/cycler/__init__.py").exists()
    lock.write_text(re.sub("[0-9a-f]{64}", "0" * 64, pin))
    with pytest.raises(SandboxError, match=r"[Hh]ash mismatch"):
        await packages.install(tmp_path / "bad", lock, series)


def test_without_a_python_beside_it_the_launcher_says_what_to_do(tmp_path: Path) -> None:
    """As after `pip install --user`."""
    alone = tmp_path / "glovebox"
    alone.write_bytes((ROOT / "scripts/glovebox").read_bytes())
    alone.chmod(0o755)
    done = subprocess.run([alone, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert "there is no Python beside this script" in done.stderr
    assert "uv tool, pipx, or python3 -m venv" in " ".join(done.stderr.split())


def test_a_directory_as_standard_input_is_told(tmp_path: Path) -> None:
    """Exit 2: Python would end with a fatal error before our first line. The control is the null device."""
    launcher = tmp_path / "glovebox"
    launcher.write_bytes((ROOT / "scripts/glovebox").read_bytes())
    launcher.chmod(0o755)
    (tmp_path / "python").symlink_to("/bin/true")
    for place, code in (("/", 2), ("/dev/null", 0)):
        script = f'"$0" < {place}'
        done = subprocess.run(["sh", "-c", script, launcher], capture_output=True, text=True, check=False)
        assert done.returncode == code
        assert ("standard input is a directory" in done.stderr) == (code == 2)
