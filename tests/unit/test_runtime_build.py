"""Building the runtime beside others, after damage, and after an end half-way.

What takes long (packages, compiling, most of the standard library) is left out: the order of steps is the real one.
"""

import functools
import os
import subprocess  # noqa: TID251 - a set-up that is killed
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.lowlevel
import psutil
import pytest

from glovebox_sandboxes.runtime import packages, runtime

SHORT = """
import sys, anyio
from pathlib import Path
from glovebox_sandboxes.runtime import packages, runtime

async def forever(*_, **__):
    print("half-way", flush=True)
    await anyio.sleep_forever()

runtime._LEFT_OUT = ("*",)
packages.install = forever
anyio.run(runtime.build, Path(sys.argv[1]), lambda _: None)
"""
WORKERS = """
import os, time
if os.fork():
    open("started", "w").close()
time.sleep(600)
"""


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that let others run, and do nothing."""

    async def nothing(*_: object, **__: object) -> None:
        await anyio.lowlevel.checkpoint()

    monkeypatch.setattr(runtime, "_LEFT_OUT", ("*",))
    monkeypatch.setattr(packages, "install", nothing)
    monkeypatch.setattr(runtime, "_compile", nothing)


@pytest.mark.usefixtures("short")
async def test_of_two_setups_at_once_one_builds_and_both_end_well(tmp_path: Path) -> None:
    """The other waits for it, says so, and finds what it built."""
    told: list[str] = []
    found: list[runtime.Runtime] = []

    async def build() -> None:
        found.append(await runtime.build(tmp_path, told.append))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(build)
        tasks.start_soon(build)
    assert found[0] == found[1]
    assert len([each for each in told if each.startswith("Copying Python")]) == 1
    assert len([each for each in told if "waiting for it" in each]) == 1


@pytest.mark.long
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    "damage",
    [
        lambda built: os.truncate(built.root.parent / "manifest.json", 20),
        lambda built: (built.root.parent / "manifest.json").unlink(),
        lambda built: (built.root / built.python.lstrip("/")).unlink(),
        lambda built: (built.root / "etc/passwd").write_text("sandbox:x:0:0::/tmp:/bin/sh\n"),
        lambda built: (built.root / "etc/shadow").write_text("added"),
        lambda built: next(built.guest.rglob("*.py")).write_text("raise SystemExit\n"),
    ],
    ids=["truncated manifest", "no manifest", "no python", "changed file", "added file", "changed guest"],
)
async def test_what_was_damaged_is_built_again(damage: Callable[[runtime.Runtime], None], tmp_path: Path) -> None:
    """To the same digest; the control is that what is whole is left alone."""
    told: list[str] = []
    built = await runtime.build(tmp_path, told.append)
    kept = built.root.stat().st_ino
    assert await runtime.build(tmp_path, told.append) == built
    assert built.root.stat().st_ino == kept
    damage(built)
    assert await runtime.build(tmp_path, told.append) == built
    assert built.root.stat().st_ino != kept
    assert "root" not in (built.root / "etc/passwd").read_text()
    assert "sandbox:x:65532" in (built.root / "etc/passwd").read_text()
    assert not (built.root / "etc/shadow").exists()


@pytest.mark.usefixtures("short")
def test_after_a_setup_that_was_killed_the_next_one_ends_well(tmp_path: Path) -> None:
    """Its lock went with it, and what it left half-built is no runtime."""
    killed = subprocess.Popen([sys.executable, "-c", SHORT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    assert killed.stdout.readline() == "half-way\n"
    killed.kill()
    killed.communicate()
    assert list(tmp_path.glob(".building-*"))  # the control: it was at work
    assert runtime.find(tmp_path) is None
    told: list[str] = []
    built = anyio.run(runtime.build, tmp_path, told.append)
    assert runtime.find(tmp_path) == built
    assert not [each for each in told if "waiting" in each]


async def test_no_worker_of_a_program_outlives_its_interruption(tmp_path: Path) -> None:
    """Ended as a whole, with what it had started; compileall's workers used to stay."""
    command = [sys.executable, "-c", WORKERS, str(tmp_path)]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(functools.partial(packages.output, command, cwd=str(tmp_path)))
        with anyio.fail_after(30):
            while not (tmp_path / "started").exists():  # noqa: ASYNC110 - another process makes it
                await anyio.sleep(0.01)
        assert len(_of(tmp_path)) == 2
        tasks.cancel_scope.cancel()
    assert [each for each in _of(tmp_path) if each.status() != psutil.STATUS_ZOMBIE] == []


def _of(place: Path) -> list[psutil.Process]:
    return [each for each in psutil.process_iter(["cmdline"]) if (each.info["cmdline"] or [""])[-1] == str(place)]


@pytest.mark.usefixtures("short")
async def test_the_digest_is_what_the_manifest_declares_and_setup_measures(tmp_path: Path) -> None:
    """A file that was changed changes no digest that is signed, hence its name; the control is the next set-up."""
    built = await runtime.build(tmp_path, lambda _: None)
    changed = built.root / "etc/passwd"
    changed.write_text("sandbox:x:0:0::/tmp:/nonexistent\n")
    declared = runtime.find(tmp_path)
    assert declared is not None
    assert declared.digest == built.digest
    told: list[str] = []
    await runtime.build(tmp_path, told.append)
    assert any("changed or removed" in each for each in told)
    assert (built.root / "etc/passwd").read_text().startswith("sandbox:x:65532:")
