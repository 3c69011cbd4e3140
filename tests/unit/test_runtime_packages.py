"""Building the runtime: where pip comes from, what is checked, which libraries come along, and the trial at the end."""

import base64
import hashlib
import importlib.util
import subprocess  # noqa: TID251 - makes the environment that is tried
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, cast

import anyio
import pytest

from _glovebox_guest.main import _import_failure
from glovebox_sandboxes.contract.base import Capabilities, Driver, Missing, SandboxSpec
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.drivers.bubblewrap import driver as bubblewrap
from glovebox_sandboxes.runtime import environments, packages, runtime, trial
from glovebox_sandboxes.runtime.runtime import Runtime

ENVIRONMENT = environments.load("default", environments.SHIPPED)
SERIES = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock of one tiny wheel, which is the only one pip can find."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "tiny-1.0-py3-none-any.whl"
    record = ""
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in (
            ("tiny.py", "SIZE = 1\n"),
            ("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n"),
            (
                "tiny-1.0.dist-info/WHEEL",
                "Wheel-Version: 1.0\nGenerator: us\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            ),
        ):
            archive.writestr(name, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
            record += f"{name},sha256={digest},{len(text)}\n"
        archive.writestr("tiny-1.0.dist-info/RECORD", f"{record}tiny-1.0.dist-info/RECORD,,\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    path = tmp_path / "one.lock"
    path.write_text(f"tiny==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
    return path


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """The Python of an environment without pip, as uv and pipx make it."""
    if importlib.util.find_spec("ensurepip") is None:
        pytest.skip("this Python has no ensurepip (on Debian: apt-get install python3-venv)")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    return tmp_path / "bare/bin/python"


@pytest.mark.long
async def test_an_environment_without_pip_uses_the_one_in_the_standard_library(
    bare: Path, lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What uv and pipx make has none; the wheel of ensurepip installs as well. The control: there is really none."""
    none = await anyio.run_process([bare, "-I", "-m", "pip"], check=False)
    assert b"No module named pip" in none.stderr
    monkeypatch.setattr(sys, "executable", str(bare))
    await packages.install(tmp_path / "target", lock, SERIES)
    assert (tmp_path / "target/tiny.py").read_text() == "SIZE = 1\n"


async def test_a_package_that_is_not_the_locked_one_is_not_installed(lock: Path, tmp_path: Path) -> None:
    """The hash decides, whatever the index says. The same lock with the right hash: see above."""
    lock.write_text(f"tiny==1.0 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(SandboxError, match="DO NOT MATCH THE HASHES"):
        await packages.install(tmp_path / "target", lock, SERIES)
    assert not (tmp_path / "target/tiny.py").exists()


async def test_without_pip_and_uv_one_sentence_says_what_to_install(
    lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's Python without python3-venv has neither pip nor ensurepip."""
    monkeypatch.setattr(packages, "_FIND_PIP", "print([])")
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("UV", raising=False)
    with pytest.raises(SandboxError, match="apt-get install python3-pip-whl"):
        await packages.install(tmp_path / "target", lock, SERIES)


def test_libraries_go_by_the_name_they_are_looked_for(tmp_path: Path) -> None:
    """A libpython below a home directory is found by name inside; the linker keeps its path; the tree's own stay."""
    root, home = tmp_path / "root", tmp_path / "home"
    for path in (root / "opt/libown.so", home / "libpython3.13.so.1.0", home / "ld-linux.so.2"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    told = f"""{home}/bin/python3.13:
\tlinux-vdso.so.1 (0x00007ffc)
\tlibpython3.13.so.1.0 => {home}/bin/../libpython3.13.so.1.0 (0x00007fdd)
\tlibown.so => {root}/opt/libown.so (0x00007fdd)
\tlibgone.so.1 => not found
\t{home}/ld-linux.so.2 (0x00007fdd)
"""
    (home / "bin").mkdir()
    assert {name: path.resolve() for name, path in packages._named(told, root).items()} == {
        "libpython3.13.so.1.0": home / "libpython3.13.so.1.0",
        f"{home}/ld-linux.so.2": home / "ld-linux.so.2",
    }


class _Broken:
    """A driver whose sandboxes do not start, or that cannot be used."""

    name = "bubblewrap"

    def __init__(self, *, usable: bool) -> None:
        missing = () if usable else (Missing(what="bwrap is not installed", fix="Install it.", fatal=True),)
        self.capabilities = Capabilities(
            driver=self.name, level="namespaces", version="0.8.0", limits={}, missing=missing
        )

    def plan(self, spec: SandboxSpec) -> SandboxSpec:
        return spec

    def open(self, _: SandboxSpec) -> NoReturn:
        raise SandboxError("Starting", "libpython3.13.so.1.0: cannot open shared object file", "Run it again.")


async def test_a_runtime_no_sandbox_can_run_is_taken_back(tmp_path: Path) -> None:
    """Set-up says why and what to do instead of "Ready", and the next one builds anew."""
    manifest = tmp_path / "runtime-0123/manifest.json"
    manifest.parent.mkdir()
    manifest.write_text("{}")
    built = Runtime(
        root=manifest.parent / "root", guest=tmp_path, python="/python", version="3.11.2", digest="sha256:0"
    )
    unusable, broken = (cast("Driver", _Broken(usable=usable)) for usable in (False, True))
    await trial.check(unusable, built, Path("/usr/bin/python3"), ENVIRONMENT)
    assert manifest.exists(), "the control: where no sandbox can be made at all, that says nothing about the runtime"
    with pytest.raises(SandboxError, match=r"from /usr/bin/python3: libpython3\.13\.so\.1\.0: cannot open") as told:
        await trial.check(broken, built, Path("/usr/bin/python3"), ENVIRONMENT)
    assert "Install the distribution's own Python" in str(told.value)
    assert not manifest.exists()


@pytest.mark.long
@pytest.mark.driver("bubblewrap")
async def test_a_runtime_whose_packages_do_not_load_is_taken_back(runtime_dir: Path, tmp_path: Path) -> None:
    """Set-up tries every package: one library less is noticed. The same tree with it passes: the control."""
    data = tmp_path / "data"
    await anyio.run_process(["cp", "-a", str(runtime_dir), str(data)])
    built = runtime.find(data)
    assert built is not None
    async with bubblewrap.connect(data, "trial") as driver:
        await trial.check(driver, built, runtime.base_python(), ENVIRONMENT)
        gone = next(built.root.rglob("libstdc++.so.6"))
        gone.unlink()
        # The import, its exception, and the last line of the traceback; nothing is wrong with the host's Python.
        words = r"^An import of the environment default failed: numpy: ImportError: [^\n]*libstdc[^\n]*$"
        with pytest.raises(SandboxError, match=words):
            await trial.check(driver, built, runtime.base_python(), ENVIRONMENT)
    assert runtime.find(data) is None


@pytest.mark.parametrize(("bad", "named"), [("b", "b: the guest ended before it was ready"), ("", "a fails with b")])
async def test_an_import_that_ends_python_is_named(
    bad: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves no traceback, so each module is tried alone; what fails only with others is reported as it was."""
    environment = ENVIRONMENT.model_copy(
        update={"name": "own", "modules": ("a", "b", "c"), "path": tmp_path / "own.toml"}
    )
    tried: list[tuple[str, ...]] = []

    async def trouble(_driver: Driver, _environment: str, modules: Sequence[str] = ()) -> str:
        tried.append(tuple(modules))
        if len(modules) > 1:
            return "the guest ended before it was ready" if bad else "a fails with b"
        return "the guest ended before it was ready" if bad and bad in modules else ""

    monkeypatch.setattr(trial, "find_trouble", trouble)
    built = Runtime(root=tmp_path / "root", guest=tmp_path, python="/python", version="3.11.2", digest="sha256:0")
    driver = cast("Driver", _Broken(usable=True))
    with pytest.raises(SandboxError, match=f"An import of the environment own failed: {named}") as told:
        await trial.check(driver, built, Path("/usr/bin/python3"), environment)
    assert str(tmp_path / "own.toml") in told.value.fix
    assert tried == [("a", "b", "c"), (), ("a",), ("b",), ("c",)][: 4 if bad else 5]


class _Panics:
    """A driver of a runsc that says first what is wrong."""

    def plan(self, _: SandboxSpec) -> NoReturn:
        raise SandboxError("Starting", "panic: no futex\ngoroutine 1:\nmain.go:12", "")


@pytest.mark.parametrize(("modules", "told"), [((), "panic: no futex goroutine 1: main.go:12"), (("a",), "main.go:12")])
async def test_a_trial_tells_what_hinders_it_in_one_line(modules: tuple[str, ...], told: str) -> None:
    """All of it, as of a panic of runsc's; where modules are imported the last line, before which they may warn."""
    assert await trial.find_trouble(cast("Driver", _Panics()), modules=modules) == told


def test_a_failed_import_is_one_line() -> None:
    """The module, the exception, and of a message of many lines the last; the type where there is no message."""
    problem = ImportError("\n\nPLEASE READ\nOriginal error was: libx.so: no such file\n")
    assert _import_failure("numpy", problem) == "numpy: ImportError: Original error was: libx.so: no such file"
    assert _import_failure("quits", SystemExit("bye")) == "quits: SystemExit: bye"
    assert _import_failure("a.b", KeyError()) == "a.b: KeyError"
