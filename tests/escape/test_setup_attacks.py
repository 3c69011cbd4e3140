"""`glovebox setup`, run in a directory that strangers filled: nothing that lies there is run."""

import subprocess  # noqa: TID251 - the control runs pip as a careless set-up would
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from glovebox_sandboxes.drivers.docker.image import build as images
from glovebox_sandboxes.runtime import packages, runtime

SERIES = f"{sys.version_info.major}.{sys.version_info.minor}"
INSTALLERS: tuple[Callable[[Path], Awaitable[None]], ...] = (
    lambda target: packages.install(target, runtime.LOCK, SERIES),
    lambda target: packages.install(target, images.LOCK, SERIES, machine="x86_64"),
)


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in a directory with a pip of its own, and with nothing to install; the file that pip would leave."""
    left = tmp_path / "was here"
    hostile = tmp_path / "project"
    hostile.mkdir()
    (hostile / "pip.py").write_text(f"open({str(left)!r}, 'w').close()\n")
    nothing = tmp_path / "empty.lock"
    nothing.write_text("")
    monkeypatch.setattr(runtime, "LOCK", nothing)
    monkeypatch.setattr(images, "LOCK", nothing)
    monkeypatch.chdir(hostile)
    return left


@pytest.mark.parametrize("install", INSTALLERS, ids=["runtime", "image"])
async def test_a_pip_in_the_current_directory_is_not_run(
    install: Callable[[Path], Awaitable[None]], trace: Path, tmp_path: Path
) -> None:
    """Whoever sets up inside a project he has just been given runs the installed pip, not the project's."""
    await install(tmp_path / "target")
    assert not trace.exists()


def test_control_a_plain_pip_would_have_been_the_hostile_one(trace: Path) -> None:
    """Control: without -I, Python looks for modules in the current directory first."""
    subprocess.run([sys.executable, "-m", "pip"], check=True)
    assert trace.exists()


async def test_a_manifest_does_not_say_what_is_run_on_the_host(tmp_path: Path) -> None:
    """Who may write to the runtime, and so what sandboxes see, has not thereby a program of the host's run."""
    left = tmp_path / "was here"
    hostile = tmp_path / "python3"
    hostile.write_text(f"#!/bin/sh\n: > '{left}'\n")
    hostile.chmod(0o755)
    manifest = runtime._Manifest(format=3, lock="", python=str(hostile), version="3.11.2", digest="")
    await runtime._build_guest(tmp_path, manifest, lambda _: None)
    assert not left.exists()
    await runtime._compile(hostile, [tmp_path])
    assert left.exists(), "the control: compiling with it would have run it"
