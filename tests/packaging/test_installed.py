"""Installed as people install it, outside of the checkout: set up, serve, call. Takes minutes and a package index."""

import re
import shlex
import subprocess  # noqa: TID251 - types the commands a person would
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from mcp import Client, StdioServerParameters
from mcp_types import TextContent
from tests.fixtures.installing import PYTHON, Place
from tests.repo.files import ROOT

from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.runtime import packages, runtime

pytestmark = pytest.mark.timeout(900)
PROGRAM = '{"code": "import numpy; print(numpy.arange(4).sum())"}'


def _pip(place: Place, what: Path) -> list[str]:
    venv = place.root / "venv"
    place.run(PYTHON, "-I", "-m", "venv", venv)
    place.run(venv / "bin/python", "-I", "-m", "pip", "install", "--quiet", what)
    return [str(venv / "bin/glovebox-mcp")]


def _uv_tool(place: Place) -> list[str]:
    place.run(place.tools / "uv", "tool", "install", "--quiet", place.wheel)
    return [str(place.root / "uv/bin/glovebox-mcp")]


def _pipx(place: Place) -> list[str]:
    place.run(place.tools / "pipx", "install", "--quiet", place.wheel)
    return [str(place.root / "pipx/bin/glovebox-mcp")]


WAYS: Mapping[str, Callable[[Place], Sequence[str]]] = {
    "pip": lambda place: _pip(place, place.wheel),
    "sdist": lambda place: _pip(place, place.sdist),
    "uv tool": _uv_tool,
    "uvx": lambda place: [str(place.tools / "uvx"), "--from", str(place.wheel), "glovebox-mcp"],
    "pipx": _pipx,
}


async def _works(place: Place, command: Sequence[str]) -> None:
    """Set-up says Ready, a client that starts the server gets the sum of four numbers, and so does the shell."""
    assert "Ready: Python 3" in place.run(*command, "setup")
    told = place.run(*command, "client-config")
    assert ("until uv cleans its cache" in told) == command[0].endswith("/uvx")
    (add,) = (shlex.split(line) for line in told.splitlines() if line.startswith("claude mcp add "))
    assert place.run(add[5], "--version").startswith("glovebox, version")
    program, *arguments = [*command, "serve"]
    server = StdioServerParameters(command=program, args=arguments, env=place.env(), cwd=str(place.root / "project"))
    async with Client(server, read_timeout_seconds=60) as client:
        answered = await client.call_tool("run_python", {"code": "print(1 + 2 + 3 + 4)"})
    assert "10" in "".join(block.text for block in answered.content if isinstance(block, TextContent)), answered
    assert place.run(*command, "call", "run_python", "--args", PROGRAM).strip() == "6"


@pytest.mark.driver("bubblewrap")
@pytest.mark.parametrize("way", WAYS)
async def test_an_installation_sets_up_serves_and_calls(way: str, place: Place) -> None:
    """Every way people install Python programs, from a path with a space and more than ASCII in it, umask 077."""
    await _works(place, WAYS[way](place))


@pytest.mark.driver("bubblewrap")
async def test_an_environment_without_pip_builds_the_whole_runtime(place: Place) -> None:
    """What uv installs has no pip of its own; what it builds under umask 077 the sandbox's user can still read."""
    place = replace(place, data=place.root / "data")
    command = _uv_tool(place)
    python = next((place.root / "uv/tools").glob("*/bin/python"))
    absent = await anyio.run_process([python, "-I", "-m", "pip"], check=False)
    assert b"No module named pip" in absent.stderr, "the control"
    await _works(place, command)


async def test_without_any_pip_uv_installs_and_checks_every_hash(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Debian's bare Python, uv stands in. The same package with another hash is refused."""
    monkeypatch.setattr(packages, "_FIND_PIP", "print([])")
    monkeypatch.setenv("UV", str(tools / "uv"))
    (pin,) = re.findall(r"^cycler==.*\n(?:    .*\n)*", runtime.LOCK.read_text(), re.MULTILINE)
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
