"""Environments: what a file may say, when a lock is followed, what is made of wheels, and who may remove what."""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from click.testing import CliRunner, Result
from tests.fixtures import wheels

from glovebox_profiles.errors import ProfileError
from glovebox_sandboxes.contract.errors import MisnamedError, SandboxError
from glovebox_sandboxes.runtime import environments, guest_gc, packages, runtime
from glovebox_sandboxes.runtime.environments import Environment
from glovebox_server import app as apps
from glovebox_server.cli.main import main
from glovebox_server.settings import Settings
from glovebox_server.upkeep import keeping

pytestmark = pytest.mark.long

FILE = 'packages = ["tiny"]\n'


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    for name in ("profiles", "environments", "state", "data"):
        (tmp_path / name).mkdir(mode=0o700)
    places: dict[str, Any] = {f"{name}_dir": tmp_path / name for name in ("profiles", "data", "state")}
    return Settings(**places, workspace=None)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that pip can find: ``tiny`` in two versions, of which the newer needs ``other``."""
    directory = tmp_path_factory.mktemp("wheels")
    wheels.make(directory, "tiny", "1.0", {"tiny.py": "SIZE = 1\n"})
    wheels.make(directory, "tiny", "2.0", {"tiny.py": "SIZE = 2\n"}, needs=("other>=1",))
    wheels.make(directory, "other", "1.5", {"other.py": "SIZE = 3\n"})
    return directory


@pytest.fixture
def index(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    wheels.alone(monkeypatch, directory)
    return directory


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """No standard library and nothing compiled: the rest of a build is the real one."""

    async def nothing(*_: object, **__: object) -> None:
        await anyio.lowlevel.checkpoint()

    monkeypatch.setattr(runtime, "_LEFT_OUT", ("*",))
    monkeypatch.setattr(runtime, "_compile", nothing)
    monkeypatch.setattr(packages, "copy_libraries", nothing)


def written(settings: Settings, name: str = "own", text: str = FILE) -> Environment:
    (settings.environments_dir / f"{name}.toml").write_text(text)
    return environments.load(name, settings.environments_dir)


LOCKS: dict[tuple[str, str], str] = {}
"""Locks by what they are of: pip takes a second for each."""


async def locked(environment: Environment) -> str:
    of = environment.name, environment.path.read_text()
    if of not in LOCKS:
        await packages.write_lock(environment, runtime.base_python(), lambda _: None)
        LOCKS[of] = environment.lock.read_text()
    environment.lock.write_text(LOCKS[of])
    return LOCKS[of]


def asked(settings: Settings, *words: str) -> Result:
    places = [f"--{name}-dir={getattr(settings, f'{name}_dir')}" for name in ("profiles", "data", "state")]
    return CliRunner().invoke(main, [*words, *places])


@pytest.mark.parametrize(
    "package",
    [
        "tiny @ https://example.org/tiny.whl", "tiny @ file:///tmp/x", "./tiny", "/x/tiny", "-r /etc/passwd",
        "--index-url=http://example.org", "git+https://example.org/tiny", "tiny; python_version > '3'", "-e .", "",
        "tiny\n--pre", "..",
    ],
)  # fmt: skip
def test_a_file_names_packages_and_nothing_else(package: str, settings: Settings) -> None:
    """No address, path, marker or option of pip's; the control is a name with bounds."""
    assert written(settings, text='packages = ["Tiny[a,b] >=1, <3", "tiny2==1.0", "x~=1"]').packages[2] == "x~=1"
    with pytest.raises(MisnamedError, match=r"own\.toml: packages\.0: String should"):
        written(settings, text=f"packages = [{json.dumps(package)}]")


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda path: path.chmod(0o666), "is writable by every user"),
        (lambda path: path.parent.chmod(0o777), "environments: it is writable by every user"),
        (lambda path: (path.rename(f"{path}.real"), path.symlink_to(f"{path}.real")), "a symbolic link"),
        (lambda path: (path.unlink(), path.symlink_to("/dev/zero")), "a symbolic link"),
        (lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
        (lambda path: path.write_text("#" * 600_000), "at most 512 KiB"),
        (lambda path: path.write_text("packages = 3"), "packages: Input should be a valid"),
        (lambda path: path.write_text(FILE + "pakages = 1"), "pakages: Extra inputs"),
        (lambda path: path.write_text("packages = ["), "not TOML"),
    ],
    ids=["writable", "in a writable folder", "link", "device", "folder", "large", "type", "misspelt", "cut short"],
)
def test_an_unsafe_or_wrong_file_is_refused(spoil: Callable[[Path], object], problem: str, settings: Settings) -> None:
    """Which file, and why; the control is the same file before."""
    spoil(written(settings).path)
    with pytest.raises(MisnamedError, match=problem):
        environments.load("own", settings.environments_dir)


@pytest.mark.parametrize("name", ["..", "a/b", "A", "", "x" * 40, "own.toml"])
def test_a_name_leads_nowhere_else_and_the_default_is_nobody_elses(name: str, settings: Settings) -> None:
    """A file of that name would not be in effect; said, not ignored. One of another shipped name replaces it."""
    with pytest.raises(MisnamedError, match="that is no name for one"):
        environments.load(name, settings.environments_dir)
    with pytest.raises(MisnamedError, match=r"none of that name. There are: default, science, viz\. Or write"):
        environments.load("nobody", settings.environments_dir)
    assert written(settings, "viz").path == settings.environments_dir / "viz.toml"
    with pytest.raises(MisnamedError, match="default is the shipped environment's name"):
        written(settings, "default")


@pytest.mark.parametrize("name", ["default", "science", "viz"])
def test_the_shipped_ones_are_locked_as_their_files_say(name: str) -> None:
    """Also on a clone nobody set up; and each has what the default has."""
    found, default = (environments.load(each, environments.SHIPPED) for each in (name, "default"))
    assert len(found.locked()) == 64
    assert set(default.packages) <= set(found.packages)
    assert set(default.modules) <= set(found.modules)


@pytest.mark.parametrize("module", ["pypdf", "tqdm", "xlsxwriter", "psutil", "requests"])
def test_science_has_what_ordinary_programs_import(module: str, tmp_path: Path) -> None:
    """Locked by hash; a program that has the default is told where it is."""
    science = environments.load("science", environments.SHIPPED)
    assert module in science.modules
    assert re.search(rf"^{module}==\S+ \\\n    --hash=sha256:", science.lock.read_text(), re.MULTILINE)
    assert environments.elsewhere(tmp_path)[module] == "science"


async def test_a_lock_names_every_file_by_hash_until_the_file_changes(index: Path, settings: Settings) -> None:
    """Dependencies too, for each Python that is asked for; after an edit it says to run update, and then it fits."""
    environment = written(settings, text='packages = ["tiny"]\npython = ["3.11", "3.12"]\nmachines = ["aarch64"]')
    text = await locked(environment)
    assert [line for line in text.splitlines() if "==" in line] == ["other==1.5 \\", "tiny==2.0 \\"]
    assert text.count("--hash=sha256:") == 2
    assert str(index) not in text
    first = environment.locked()
    with environment.path.open("a") as file:
        file.write("# a note\n")
    assert environments.load("own", settings.environments_dir).locked() == first
    edited = written(settings, text='packages = ["tiny<2"]')
    with pytest.raises(MisnamedError, match=r"made before own\.toml .* Run `glovebox environment update own`"):
        edited.locked()
    assert "tiny==1.0" in await locked(edited)
    assert edited.locked() != first


@pytest.mark.parametrize(
    "line",
    ["--index-url https://example.org", "-r other.txt", "tiny @ https://example.org/t.whl", "./tiny.whl", "tiny"],
)
async def test_a_lock_that_says_anything_else_is_refused(line: str, index: Path, settings: Settings) -> None:
    """It is handed to pip, which would follow it; the line is named."""
    environment = written(settings)
    count = len((await locked(environment)).splitlines())
    with environment.lock.open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(MisnamedError, match=rf"own\.lock:{count + 1}: it is neither a package"):
        environment.locked()


async def test_only_wheels_are_taken_and_nothing_of_them_runs(index: Path, settings: Settings, tmp_path: Path) -> None:
    """A source archive, whose set-up would run, is not looked at: its version is not there."""
    trace = tmp_path / "ran"
    (index / "tiny-9.0.tar.gz").write_bytes(b"")
    wheels.make(
        index, "hostile", "1.0",
        {"hostile.pth": f"import os; open({str(trace)!r}, 'w')\n", "hostile.py": f"open({str(trace)!r}, 'w')\n"},
    )  # fmt: skip
    assert "tiny==2.0" in await locked(written(settings, text=f"# beside it\n{FILE}"))
    with pytest.raises(SandboxError, match=r"tiny==9\.0"):
        await locked(written(settings, text='packages = ["tiny==9.0"]'))
    environment = written(settings, "hostile", 'packages = ["hostile"]')
    await locked(environment)
    target = tmp_path / "target"
    await packages.install(target, environment.lock, "3.11", pythons=[runtime.base_python()])
    await runtime._compile(runtime.base_python(), [target])
    assert list(target.glob("__pycache__/hostile.*.pyc"))
    assert not trace.exists()


def elf(*names: bytes) -> bytes:
    """A library that needs these, of nothing but headers."""
    strings = b"\0" + b"\0".join(names) + b"\0"
    at, offsets = 64 + 2 * 56, [1 + sum(len(each) + 1 for each in names[:index]) for index in range(len(names))]
    table = b"".join(struct.pack("<QQ", 1, offset) for offset in offsets)
    table += struct.pack("<QQQQ", 5, 0x1000 + at, 0, 0)
    size = at + len(strings) + len(table)
    rest = struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    head = b"\x7fELF\x02\x01".ljust(16, b"\0") + rest
    load = struct.pack("<II6Q", 1, 4, 0, 0x1000, 0, size, size, 0)
    dynamic = struct.pack("<II6Q", 2, 4, at + len(strings), 0x1000 + at + len(strings), 0, len(table), len(table), 8)
    return head + load + dynamic + strings + table


def test_what_a_library_needs_is_read_and_not_tried(tmp_path: Path) -> None:
    """Names of libraries alone: no path, as which a wheel could have any file of the host's copied in."""
    path = tmp_path / "a.so"
    path.write_bytes(elf(b"libm.so.6", b"../../../etc/shadow", b"/etc/shadow", b"", b"..", b"liby-1.so"))
    assert list(packages.needed(path)) == ["libm.so.6", "liby-1.so"]
    whole = path.read_bytes()
    for cut in range(0, len(whole), 7):
        path.write_bytes(whole[:cut])
        assert set(packages.needed(path)) <= {"libm.so.6", "liby-1.so"}
    path.write_bytes(b"#!/bin/sh\n")
    assert list(packages.needed(path)) == []


@pytest.mark.usefixtures("short", "index")
async def test_each_environment_has_a_runtime_of_its_own(settings: Settings) -> None:
    """Named after its lock: other packages, another directory and digest; the same again, the same."""
    first, second = written(settings, "first", 'packages = ["tiny<2"]'), written(settings, "second")
    built = {}
    for each in (first, second):
        await locked(each)
        built[each.name] = await runtime.build(settings.data_dir, lambda _: None, each)
    assert await runtime.build(settings.data_dir, lambda _: None, first) == built["first"]
    assert built["first"].digest != built["second"].digest
    assert built["first"].root != built["second"].root
    assert not (built["first"].root / "opt/packages/other.py").exists()
    assert (built["second"].root / "opt/packages/other.py").exists()
    assert runtime.find(settings.data_dir, "second") == built["second"]
    assert environments.elsewhere(settings.data_dir)["tiny"] in {"first", "second"}
    assert environments.elsewhere(settings.data_dir)["sklearn"] == "science"
    assert environments.elsewhere(settings.data_dir)["openpyxl"] == "default"  # science and viz have it too
    assert environments.elsewhere(settings.data_dir)["joblib"] == "science"  # which scikit-learn needs


PROFILE = 'tool = "run_python"\ndescription = "x"\nrisk = "low"\nisolation = ["bubblewrap"]\napproval = "none"\n'


def named(settings: Settings, environment: str) -> None:
    text = f'{PROFILE}[python]\nenvironment = "{environment}"\n'
    (settings.profiles_dir / "run_python.toml").write_text(text)


@pytest.mark.usefixtures("short", "index")
async def test_a_profile_names_what_is_there_and_built(settings: Settings) -> None:
    """Else the check of profiles and the server's start say so, with the command; once it is built, neither does."""

    def told() -> str:
        with pytest.raises(ProfileError) as problem:
            keeping.required(settings, apps.load_profiles(settings))
        done = asked(settings, "profiles", "check")
        assert done.exit_code == 2
        assert str(problem.value) in done.output.replace("\n", "")
        return str(problem.value)

    named(settings, "own")
    assert "none of that name" in (unknown := told())
    assert "glovebox setup --environment own" in unknown
    environment = written(settings)
    await locked(environment)
    assert "it is not built here. Run `glovebox setup --environment own`" in told()
    await runtime.build(settings.data_dir, lambda _: None, environment)
    found = keeping.required(settings, apps.load_profiles(settings))
    assert {tool for tool, each in found.items() if each.name == "own"} == {"run_python"}
    assert asked(settings, "profiles", "check").exit_code == 0
    manifest = runtime.place(settings.data_dir, environment.locked()) / "manifest.json"
    content = manifest.read_text()
    manifest.unlink()  # as set-up does where an import fails
    assert "its last build failed or was removed. Run `glovebox setup --environment own`" in told()
    assert (await anyio.to_thread.run_sync(asked, settings, "serve")).exit_code == 2
    manifest.write_text(content)
    assert asked(settings, "profiles", "check").exit_code == 0
    await locked(written(settings, text='packages = ["tiny<2"]'))
    assert "built from another lock" in told()


@pytest.mark.usefixtures("short", "index")
async def test_what_is_preloaded_is_in_the_environment(settings: Settings) -> None:
    """As in a copy of a shipped profile that names another environment; the control's modules are there."""
    environment = written(settings)
    await locked(environment)
    await runtime.build(settings.data_dir, lambda _: None, environment)
    for preload, lacks in (('"tiny", "json"', ""), ('"tiny", "numpy.linalg"', "numpy.linalg")):
        named(settings, "own")
        with (settings.profiles_dir / "run_python.toml").open("a") as file:
            file.write(f'start = "warm"\npreload = [{preload}]\n')
        words = f"names {lacks}, which the environment own does not have"
        for command in (("check",), ("explain", "run_python"), ("explain", "run_python", "--json")):
            done = asked(settings, "profiles", *command)
            assert done.exit_code == (2 if lacks else 0)
            assert (words in done.output.replace("\n", "")) == bool(lacks)
            assert ("Name modules that it has, or leave the key out." in done.output.replace("\n", "")) == bool(lacks)


@pytest.mark.usefixtures("short", "index")
async def test_what_a_profile_names_is_not_removed_by_mistake(settings: Settings) -> None:
    """Nor under a server that uses it; then `clean` has it once that has ended."""
    environment = written(settings)
    await locked(environment)
    built = await runtime.build(settings.data_dir, lambda _: None, environment)
    named(settings, "own")
    refused = await anyio.to_thread.run_sync(asked, settings, "environment", "remove", "own")
    assert refused.exit_code == 2
    assert "the profile of run_python names it" in refused.output
    assert built.root.exists()
    listed = json.loads((await anyio.to_thread.run_sync(asked, settings, "environment", "list", "--json")).stdout)
    (row,) = (each for each in listed["environments"] if each["name"] == "own")
    assert (row["state"], row["tools"], row["digest"]) == ("built", ["run_python"], built.digest)
    with guest_gc.held([built.root.parent]):
        command = ("environment", "remove", "own", "--force", "--json")
        done = await anyio.to_thread.run_sync(asked, settings, *command)
        assert json.loads(done.stdout) == {"removed": "own", "bytes": 0, "images": []}
        assert built.root.exists()
    await runtime.build(settings.data_dir, lambda _: None, environment)
    freed = json.loads((await anyio.to_thread.run_sync(asked, settings, *command)).stdout)["bytes"]
    assert freed > 0
    assert not built.root.exists()
    gone = await anyio.to_thread.run_sync(asked, settings, *command)
    assert "it is not built here" in gone.output


@pytest.mark.usefixtures("index")
def test_update_says_what_it_made_and_locks_no_shipped_one_anew(settings: Settings) -> None:
    """An operator has a file of his own for that; nothing is written among the package's files."""
    before = environments.load("viz", environments.SHIPPED).lock.read_bytes()
    done = asked(settings, "environment", "update", "viz")
    assert done.exit_code == 2
    assert "it is shipped with its lock. Copy" in done.output
    assert environments.load("viz", environments.SHIPPED).lock.read_bytes() == before
    environment = written(settings)
    done = asked(settings, "environment", "update", "own")
    assert done.exit_code == 0, done.output
    assert "2 packages. Build it: `glovebox setup --environment own`" in done.output.replace("\n", " ")
    said = json.loads(asked(settings, "environment", "update", "own", "--json").stdout)
    assert said["digest"] == f"sha256:{environment.locked()}"
