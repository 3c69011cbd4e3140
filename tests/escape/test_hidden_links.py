"""What a link leads to that is named as a secret is closed to programs too, whatever its own name is."""

import ctypes
import mmap
import os
import subprocess  # noqa: TID251 - what is mounted for a test is mounted for another process alone
import sys
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
import pytest
from tests.escape.test_hidden_files import MARK
from tests.escape.test_hidden_from_programs import KEY, SWEEP, begun, indexed, ran, served, write
from tests.fixtures.brokered import DRIVERS, Heard, submitted

from glovebox_sandboxes.contract.errors import RefusedError, UnsupportedSpecError
from glovebox_sandboxes.drivers.registry import NAMES
from glovebox_sandboxes.hidden import index as indexes


def exchange(one: Path, other: Path) -> None:
    """Give each of two the other's name at once, with renameat2(2), as `mv --exchange` does."""
    libc, here, both = ctypes.CDLL(None, use_errno=True), -100, 2
    assert libc.renameat2(here, bytes(one), here, bytes(other), both) == 0, os.strerror(ctypes.get_errno())


def links(place: Path, those: Mapping[str, str]) -> None:
    """Put links into a workspace, or others in their place, as at once as `ln -sfT` does."""
    for name, leads in those.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "new-link").symlink_to(leads)
        (place / "new-link").rename(place / name)


@pytest.mark.parametrize("files", ["read", "overlay"])
@pytest.mark.parametrize("driver", DRIVERS)
async def test_no_program_reads_what_a_link_leads_to(tmp_path: Path, driver: str, files: str) -> None:
    """Whatever way it takes; the controls: ordinary files and links to them, and what a link that is shown leads to."""
    place = tmp_path / "workspace"
    closed = {
        "prod.env-real", "conf/above", "host", "guest", "chain", "conf/way", "climbed", "again", "keys/one", "twice",
    }  # fmt: skip
    shown = {"a.txt", "conf/a.txt", "public", "shown"}
    write(place, {**dict.fromkeys(closed | shown, MARK), "private": KEY})
    write(tmp_path, {"outside": MARK})
    links(
        place,
        {
            ".env": "prod.env-real",
            "a/.env": "../conf/above",
            ".env.host": f"{place}/./host",
            ".env.guest": "/workspace/guest",
            ".env.chain": "one",
            "one": "a/../two",
            "two": "./chain",
            ".env.way": "folder/way",
            "folder": "conf",
            ".env.climbs": "../workspace/climbed",
            "a/.env.climbs": f"../../{place.name}/again",
            ".ssh": "keys",
            "one.pem": "private",
            "two.pem": "public",
            "plain": "a.txt",
            ".env.outside": "../outside",
            ".env.gone": "gone/further",
            ".env.loop": ".env.loop",
            "service/.env.production": "../shown",
            ".env.twice": ".netrc",
            ".netrc": "twice",
        },
    )
    async with served(tmp_path, driver, files) as app:
        names = sorted({*closed, "private", ".env", ".env.way"})
        printed = (await ran(app, f"SECRETS = {names!r}\n{SWEEP}")).splitlines()
        assert set(printed[1:]) == {*shown, "two.pem", "plain", "service/.env.production", "folder/a.txt"}
        assert (await submitted(app, "run_python", {"code": "1"})).structured["hidden"] == len(closed) + 1


BEFORE = {
    ".env": "one", ".env.way": "folder/real", "folder": "conf", "a.pem": "maybe", ".env.out": "../outside",
    "x/.netrc": "../y/../two", "ordinary": "two", "shown/.env": "../three",
}  # fmt: skip
CHANGES: Mapping[str, tuple[Callable[[Path], object], bool, set[str]]] = {
    "led elsewhere": (lambda place: links(place, {".env": "two"}), True, {"two", "conf/real"}),
    "led outside": (lambda place: links(place, {".env": "/nowhere"}), True, {"conf/real"}),
    "target replaced": (lambda place: (place / "two").rename(place / "one"), True, {"one", "conf/real"}),
    "target is a folder": (lambda place: exchange(place / "one", place / "other"), True, {"one/", "conf/real"}),
    "on its way": (lambda place: links(place, {"folder": "other"}), True, {"one", "other/real"}),
    "folder on its way": (lambda place: exchange(place / "conf", place / "other"), True, {"one", "conf/real"}),
    "comes inside": (lambda place: links(place, {".env.out": "two"}), True, {"one", "two", "conf/real"}),
    "new": (lambda place: links(place, {"other/.env": "../two"}), True, {"one", "two", "conf/real"}),
    "renamed": (lambda place: (place / "ordinary").rename(place / ".netrc"), True, {"one", "two", "conf/real"}),
    "folder renamed": (lambda place: (place / "x").rename(place / "y"), True, {"one", "two", "conf/real"}),
    "content": (lambda place: write(place, {"maybe": KEY}), True, {"one", "conf/real", "maybe"}),
    "removed": (lambda place: (place / ".env").unlink(), False, {"conf/real"}),
    "target removed": (lambda place: (place / "one").unlink(), False, {"conf/real"}),
    "way removed": (lambda place: (place / "folder").unlink(), False, {"one"}),
    "written": (lambda place: write(place, {"one": "more", "maybe": "no key"}), False, {"one", "conf/real"}),
    "shown": (lambda place: links(place, {"shown/.env": "../two"}), False, {"one", "conf/real"}),
    "ordinary": (lambda place: links(place, {"ordinary": "three"}), False, {"one", "conf/real"}),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_link_that_leads_elsewhere_ends_programs(tmp_path: Path, how: str) -> None:
    """Itself or by what is on its way; what is covered then is what a server that begins would. Controls: the last."""
    place = tmp_path / "workspace"
    write(place, dict.fromkeys(("one", "two", "three", "conf/real", "other/real", "maybe", "shown/a", "x/a"), "a"))
    links(place, BEFORE)
    change, breaks, covered = CHANGES[how]
    revealed = frozenset({"shown"})
    with indexed(place) as index, index.guarding(revealed, lambda: None) as guard:
        assert guard.holds
        change(place)
        index.drain()
        assert (guard.broken, set(index.masks(revealed))) == (breaks, covered)
        with indexed(place) as other:
            assert other.masks(revealed) == index.masks(revealed)


@pytest.mark.driver("bubblewrap")
async def test_a_program_that_waits_for_a_link_to_lead_elsewhere_is_ended_and_withheld(tmp_path: Path) -> None:
    """A deployment turns it to the next file, which was an ordinary one so far. The control: before that it runs."""
    place = tmp_path / "workspace"
    write(place, {"one": MARK, "two": MARK})
    links(place, {".env": "one", "current": "two"})
    async with served(tmp_path, "bubblewrap") as app:
        heard = Heard()

        async def turn() -> None:
            await begun(heard)
            links(place, {".env": "two"})

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(turn)
            code = "print(open('/workspace/two').read(), flush=True)\nimport time\ntime.sleep(30)"
            with pytest.raises(RefusedError) as caught:
                await submitted(app, "run_python", {"code": code}, heard)
        assert caught.value.rule == "workspace.secret"
        assert await ran(app, "print(open('/workspace/one').read().strip())") == f"{MARK}\n"
        assert (await submitted(app, "run_python", {"code": "open('/workspace/two').read()"})).failed


def one_of_two_names_gone(place: Path) -> None:
    """Remove one name of a file, and write a key into what is left."""
    (place / "other" / "two.pem").unlink()
    write(place, {"one.pem": KEY})


def folder_of_one_moved(place: Path) -> None:
    """Move the folder in which a file has its other name, and write a key into it."""
    (place / "other").rename(place / "another")
    write(place, {"one.pem": KEY})


ROOT = frozenset({".env", ".netrc"})
SOME = ROOT | {"conf/.env"}
CHANGED: Mapping[str, tuple[Callable[[Path], object], AbstractSet[str]]] = {
    "folders exchanged": (lambda place: exchange(place / "conf", place / "other"), ROOT | {"other/.env"}),
    "secrets exchanged": (lambda place: exchange(place / ".env", place / ".netrc"), SOME),
    "with an ordinary one": (lambda place: exchange(place / "plain", place / ".env"), SOME),
    "file and folder": (lambda place: exchange(place / ".env", place / "conf"), {".env/", ".netrc"}),
    "two names": (lambda place: write(place, {"one.pem": KEY}), SOME | {"one.pem", "other/two.pem"}),
    "one of two names gone": (one_of_two_names_gone, SOME | {"one.pem"}),
    "new": (lambda place: write(place, {"deep/.env": MARK}), SOME | {"deep/.env"}),
    "new folder": (lambda place: write(place, {"other/more/.ssh/id": MARK}), SOME | {"other/more/.ssh/"}),
    "renamed": (lambda place: (place / "plain").rename(place / "id_rsa"), SOME | {"id_rsa"}),
    "folder renamed": (lambda place: (place / "cloud").rename(place / ".aws"), SOME | {".aws/credentials"}),
    "linked": (lambda place: (place / "id_rsa").hardlink_to(place / "plain"), SOME | {"id_rsa"}),
    "ordinary": (lambda place: write(place, {"new/folder/a.txt": MARK, "one.pem": "a certificate"}), SOME),
    "folder of one moved": (folder_of_one_moved, SOME | {"one.pem", "another/two.pem"}),
}


@pytest.mark.parametrize("how", CHANGED)
def test_whatever_makes_a_secret_of_a_file_ends_programs(tmp_path: Path, how: str) -> None:
    """Made, moved, written under any of its names: covered as by a server that begins. The control: ordinary files."""
    files = (".env", ".netrc", "plain", "conf/.env", "other/a.txt", "one.pem", "cloud/credentials")
    write(tmp_path, dict.fromkeys(files, "x"))
    (tmp_path / "other" / "two.pem").hardlink_to(tmp_path / "one.pem")
    change, covered = CHANGED[how]
    with indexed(tmp_path) as index, index.guarding(frozenset(), lambda: None) as guard:
        assert set(index.masks(frozenset())) == SOME
        change(tmp_path)
        index.drain()
        assert (guard.broken, set(index.masks(frozenset()))) == (how != "ordinary", covered)


EXCHANGED = (
    *("folders exchanged", "secrets exchanged", "with an ordinary one", "file and folder", "two names"),
    *("one of two names gone", "folder of one moved"),
)


@pytest.mark.parametrize(
    ("driver", "how"),
    [
        pytest.param(driver, how, marks=pytest.mark.driver(driver))
        for driver in NAMES
        for how in (EXCHANGED if driver == "bubblewrap" else ("file and folder", "two names"))
    ],
)
async def test_no_later_program_reads_what_two_names_were_exchanged_for(tmp_path: Path, driver: str, how: str) -> None:
    """Nor a file with two names of which a key is written into one: all is covered as a server that begins would."""
    place = tmp_path / "workspace"
    write(place, {".env": MARK, ".netrc": MARK, "plain": "x", "conf/.env": MARK, "other/a.txt": "a", "one.pem": "x"})
    (place / "other" / "two.pem").hardlink_to(place / "one.pem")
    change, covered = CHANGED[how]
    async with served(tmp_path, driver) as app:
        assert await ran(app, f"SECRETS = []\n{SWEEP}") == "begun\n\n"
        change(place)
        result = await submitted(app, "run_python", {"code": f"SECRETS = []\n{SWEEP}"})
        read = set(result.structured["stdout"]["text"].splitlines()[1:]) - {""}
        ordinary = {"with an ordinary one": {"plain"}, "file and folder": {"conf"}}.get(how, set())
        assert (read, result.structured["hidden"]) == (ordinary, len(covered))


@pytest.mark.driver("bubblewrap")
@pytest.mark.parametrize("leads", [".", "/workspace", "a/../a/.."])
async def test_a_link_that_leads_to_all_of_it_is_named(tmp_path: Path, leads: str) -> None:
    """Nothing would be left: no program runs. The control is the same link under an ordinary name."""
    place = tmp_path / "workspace"
    write(place, {"a/a.txt": MARK})
    links(place, {"plain": leads})
    async with served(tmp_path, "bubblewrap") as app:
        assert await ran(app, "print(open('/workspace/a/a.txt').read().strip())") == f"{MARK}\n"
        links(place, {"a/.env": f"../{leads}" if not leads.startswith("/") else leads})
        with pytest.raises(UnsupportedSpecError, match=r"the link a/\.env is named as a secret"):
            await submitted(app, "run_python", {"code": "1"})


def deepen(place: Path) -> None:
    """Make folders within folders, in each a secret and an ordinary file, deeper than a path can tell."""
    at = os.open(place, os.O_RDONLY)
    for number in range(40):
        name = f"{number:02d}{'d' * 198}"
        os.mkdir(name, dir_fd=at)
        above, at = at, os.open(name, os.O_RDONLY, dir_fd=at)
        os.close(above)
        for each in (".env", "b.txt"):
            descriptor = os.open(each, os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=at)
            os.write(descriptor, MARK.encode())
            os.close(descriptor)
    os.close(at)


@pytest.mark.driver("bubblewrap")
async def test_folders_too_deep_to_be_named_are_closed(tmp_path: Path) -> None:
    """What no path of the kernel's reaches is covered from where it begins; the control lies above."""
    place = tmp_path / "workspace"
    write(place, {"a/a.txt": MARK})
    deepen(place / "a")
    code = f"""
        import os
        print(open("/workspace/a/a.txt").read().strip())
        os.chdir("/workspace/a")
        for number in range(40):
            try:
                os.chdir(f"{{number:02d}}{"d" * 198}")
                print(open("b.txt").read() == "{MARK}", number)
                print(open(".env").read())
            except PermissionError:
                continue
            except FileNotFoundError:
                break
    """
    async with served(tmp_path, "bubblewrap") as app:
        printed = (await ran(app, code)).splitlines()
    assert printed[0] == MARK
    assert 10 < len(printed) < 20
    assert MARK not in "".join(printed[1:])


def test_a_key_that_is_written_through_a_mapping_counts_once_the_mapping_ends(tmp_path: Path) -> None:
    """Not before: the kernel tells nobody. What is covered by its name stays so, whoever writes how: the control."""
    write(tmp_path, {"a.pem": "-" * len(KEY), ".env": "-" * len(MARK), "ordinary": "-" * len(MARK)})
    with indexed(tmp_path) as index, index.guarding(frozenset(), lambda: None) as guard:
        for name, text in ((".env", MARK), ("ordinary", MARK)):
            with (tmp_path / name).open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
                mapped[: len(text)] = text.encode()
        index.drain()
        assert (guard.holds, index.masks(frozenset())) == (True, (".env",))
        with (tmp_path / "a.pem").open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
        mapped[: len(KEY)] = KEY.encode()
        mapped.flush()
        index.drain()
        assert (guard.holds, index.masks(frozenset())) == (True, (".env",))
        mapped.close()
        index.drain()
        assert (guard.broken, index.masks(frozenset())) == (True, (".env", "a.pem"))


MOUNTED = """
import ctypes, os, sys
from pathlib import Path
from glovebox_sandboxes.hidden.index import SecretFileIndex
place, *points = sys.argv[1:]
mount = ctypes.CDLL(None, use_errno=True).mount
index = SecretFileIndex(place)
index.rebuild()
for point in points:
    with index.guarding(frozenset(), lambda: None) as guard:
        before = guard.holds
        assert mount(b"none", os.fsencode(point), b"tmpfs", 0, None) == 0, os.strerror(ctypes.get_errno())
        after = guard.holds
        index.drain()
        print(before, after, guard.broken, index.masks(frozenset()))
"""


def test_what_is_mounted_in_it_ends_programs(tmp_path: Path) -> None:
    """Below it and over it, before a result is given; the control is mounted beside it."""
    place = tmp_path / "workspace"
    write(place, {"data/a.txt": "a", ".env": MARK})
    (tmp_path / "beside").mkdir()
    points = (tmp_path / "beside", place / "data", place)
    command = ["unshare", "--mount", sys.executable, "-c", MOUNTED, str(place), *map(str, points)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if ran.returncode and "Operation not permitted" in ran.stderr:
        pytest.skip("nothing can be mounted here")
    assert ran.stdout.splitlines() == [
        "True True False ('.env',)",
        "True False True ('.env', 'data/')",
        "True False True ()",
    ], ran.stderr


@pytest.mark.parametrize("how", ["removed", "renamed", "opened"])
def test_what_a_change_costs_does_not_grow_with_what_else_is_known(tmp_path: Path, how: str) -> None:
    """Counted in lines that are executed, for as many folders as there are: twice as many take twice as long."""

    def lines(folders: int) -> int:
        place = tmp_path / str(folders)
        write(place, {f"{number}/.env": "a" for number in range(folders)})
        counted = 0

        def trace(frame: FrameType, event: str, _argument: object) -> Any:
            nonlocal counted
            counted += event == "line"
            return trace if frame.f_code.co_filename == indexes.__file__ else None

        with indexed(place) as index:
            for number in range(folders):
                if how == "removed":
                    (place / str(number) / ".env").unlink()
                    (place / str(number)).rmdir()
                elif how == "renamed":
                    (place / str(number)).rename(place / f"{number}-renamed")
                else:
                    (place / str(number)).chmod(0o755)
            before = sys.gettrace()
            sys.settrace(trace)
            try:
                index.drain()
            finally:
                sys.settrace(before)
            assert index.count == (0 if how == "removed" else folders)
        return counted

    assert lines(200) < 2.5 * lines(100)
