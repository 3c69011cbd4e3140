"""Files that are named as secrets reach no program that sees the workspace, whatever the host does meanwhile."""

import errno
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import pytest
from tests.escape.test_hidden_files import MARK, ORDINARY, REVEAL, SECRETS
from tests.fixtures.brokered import DRIVERS, Heard, profile, submitted

from _glovebox_guest.workspace.hidden import Kind
from glovebox_audit.chain import new_call_id
from glovebox_audit.read import records_of
from glovebox_sandboxes.contract.errors import RefusedError, UnsupportedSpecError
from glovebox_sandboxes.hidden.index import SecretFileIndex
from glovebox_sandboxes.host import mounts
from glovebox_server import app as apps
from glovebox_server.app import App
from glovebox_server.guards.watch.canaries import plant
from glovebox_server.settings import Settings

KEY = f"-----BEGIN PRIVATE KEY----- {MARK}"
SWEEP = """
import glob, mmap, os, pathlib, subprocess
print("begun")
mark = "planted-5f1c".encode()
found = set()
def look(how, path):
    try:
        if how == "open":
            data = open(path, "rb").read()
        elif how == "mmap":
            with open(path, "rb") as file:
                data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)[:]
        elif how == "cat":
            data = subprocess.run(["cat", path], capture_output=True).stdout
        elif how == "link":
            os.link(path, "/tmp/hard")
            data = open("/tmp/hard", "rb").read()
        else:
            if os.path.lexists("/tmp/soft"):
                os.unlink("/tmp/soft")
            os.symlink(path, "/tmp/soft")
            data = open("/tmp/soft", "rb").read()
    except (OSError, ValueError):
        return
    if mark in data:
        found.add(path)
hows = ["open", "mmap", "soft", "link"]
for top in ("/workspace", "/guest/workspace", "/proc/self/root/workspace", "/proc/1/root/workspace"):
    for folder, _, names in os.walk(top):
        for name in names:
            for how in hows:
                look(how, f"{folder}/{name}")
    for name in SECRETS:
        for how in [*hows, *(["cat"] if top == "/workspace" else [])]:
            look(how, f"{top}/{name}")
for path in glob.glob("/workspace/**/*", recursive=True, include_hidden=True):
    look("open", path)
print("\\n".join(sorted({path.split("workspace/", 1)[1] for path in found})))
"""


@contextmanager
def indexed(place: Path) -> Iterator[SecretFileIndex]:
    """The index of a directory."""
    index = SecretFileIndex(str(place))
    try:
        index.rebuild()
        yield index
    finally:
        index.close()


def write(place: Path, files: dict[str, str]) -> None:
    """Put files into a workspace, readable for everybody."""
    for name, content in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(f"{content}\n")


@asynccontextmanager
async def served(
    tmp_path: Path, driver: str, files: str = "read", *, start: str = "cold", worker: bool = False
) -> AsyncIterator[App]:
    """A server whose programs see a workspace."""
    own = tmp_path / "profiles"
    own.mkdir()
    text = profile("run_python", driver, wall=60) + 'workspace = { bytes = "8 MiB", files = 500 }\n'
    more = f'[python]\nstart = "{start}"\n[files]\nworkspace = "{files}"'
    (own / "run_python.toml").write_text(text.replace("[network]", f"{more}\noutput = true\n{REVEAL}"))
    settings = Settings(workspace=tmp_path / "workspace", profiles_dir=own, state_dir=tmp_path / "state")
    async with apps.opened(settings, "cli", worker=worker) as app:
        yield app


async def ran(app: App, code: str, heard: Heard | None = None) -> str:
    """What a program prints that ends well."""
    result = await submitted(app, "run_python", {"code": textwrap.dedent(code)}, heard)
    assert not result.failed, result.content
    text: str = result.structured["stdout"]["text"]
    return text


async def begun(heard: Heard) -> None:
    """Return when a program has printed its first line."""
    while not heard.text:  # noqa: ASYNC110 - its listener only keeps what it hears
        await anyio.sleep(0.01)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A workspace with some forty secrets, and files whose names are only like them."""
    place = tmp_path / "workspace"
    write(place, {**SECRETS, **ORDINARY})
    return place


@pytest.mark.parametrize("files", ["read", "overlay"])
@pytest.mark.parametrize("driver", DRIVERS)
async def test_no_program_reads_any_in_any_way(tmp_path: Path, workspace: Path, driver: str, files: str) -> None:
    """Opened, mapped, linked, listed and handed to another; the controls are ordinary files, and one that is shown."""
    canary = plant(tmp_path / "state", workspace, "deploy-credentials.env")
    async with served(tmp_path, driver, files) as app:
        printed = (await ran(app, f"SECRETS = {sorted(SECRETS)!r}\n{SWEEP}")).splitlines()
        assert set(printed[1:]) == {*ORDINARY, "service/.env.production"}
        caught = await submitted(app, "run_python", {"code": f"print(open('/workspace/{canary.path}').read())"})
        assert "Stopped by the operator's rules." in str(caught.content)
        result = await submitted(app, "run_python", {"code": "print(open('/workspace/.env').read())"})
        assert result.structured["hidden"] > 30
        assert MARK not in str(result)


@pytest.mark.parametrize("driver", ["bubblewrap", "gvisor"])
async def test_what_is_closed_on_purpose_is_not_said_to_be_closed_by_mistake(
    tmp_path: Path, workspace: Path, driver: str
) -> None:
    """Nobody is told to open a secret to everybody; the control is a file that the host keeps to itself."""
    (workspace / "kept.txt").write_text("kept")
    (workspace / "kept.txt").chmod(0o600)
    async with served(tmp_path, driver) as app:
        for name, hint, other in (
            (".env", "files.reveal", "chmod"),
            (".ssh/id_ed25519", "files.reveal", "chmod"),
            ("kept.txt", "chmod", "files.reveal"),
        ):
            result = await submitted(app, "run_python", {"code": f"print(open('/workspace/{name}').read())"})
            assert hint in str(result.content), (name, result.content)
            assert other not in str(result.content), (name, result.content)


READER = """
import glob, os, time
print("begun", flush=True)
until = time.monotonic() + 30
while time.monotonic() < until:
    for path in ("/workspace/.env", "/guest/workspace/.env"):
        try:
            with open(path) as file:
                if text := file.read():
                    print(text, flush=True)
        except OSError:
            pass
"""


@pytest.mark.parametrize("files", ["read", "overlay"])
@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_program_that_waits_for_an_atomic_save_is_ended_and_withheld(
    tmp_path: Path, driver: str, files: str
) -> None:
    """The cover is gone with the file it lay on: program and result are too; the control is a save of another file."""
    place = tmp_path / "workspace"
    write(place, {".env": MARK, "a.txt": "a"})
    call_id = new_call_id()
    async with served(tmp_path, driver, files) as app:
        heard = Heard()

        async def save(name: str) -> None:
            await begun(heard)
            write(place, {"draft": MARK})
            (place / "draft").replace(place / name)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(save, "a.txt")
            code = READER.replace("+ 30", "+ 1")
            assert await ran(app, code, heard) == "begun\n"
        heard.text = ""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(save, ".env")
            with pytest.raises(RefusedError) as caught:
                await submitted(app, "run_python", {"code": READER}, heard, call_id)
        assert caught.value.rule == "workspace.secret"
        assert heard.text == "begun\n"
        assert await ran(app, READER.replace("+ 30", "+ 0.2")) == "begun\n"  # it is covered again
    last = [each for each in records_of(tmp_path / "state" / "audit", call_id) if each.kind == "call.failed"]
    assert [each.data["error"] for each in last] == ["RefusedError"]
    assert "named as secrets are" in last[0].data["reason"]
    assert MARK not in "".join(path.read_text() for path in (tmp_path / "state" / "audit").rglob("*.jsonl"))


APPEARS: Mapping[str, Callable[[Path], object]] = {
    "new": lambda place: write(place, {"deep/.env": MARK}),
    "new folder": lambda place: write(place, {"other/further/.ssh/id": MARK}),
    "renamed": lambda place: (place / "deep" / "plain").rename(place / "deep" / "id_rsa"),
    "folder renamed": lambda place: (place / "conf").rename(place / ".aws"),
    "content": lambda place: write(place, {"deep/chain.pem": "-----BEGIN PRIVATE KEY-----"}),
    "linked": lambda place: (place / "deep" / "id_rsa").hardlink_to(place / "deep" / "plain"),
}


@pytest.mark.driver("bubblewrap")
@pytest.mark.parametrize("how", APPEARS)
async def test_whatever_makes_a_secret_of_a_file_ends_a_program(tmp_path: Path, how: str) -> None:
    """Made, moved or written while it runs; the controls are the same under other names, and what is shown."""
    place = tmp_path / "workspace"
    write(place, {"deep/plain": MARK, "deep/chain.pem": "-----BEGIN CERTIFICATE-----", "conf/credentials": MARK})
    async with served(tmp_path, "bubblewrap") as app:
        heard = Heard()

        async def change() -> None:
            await begun(heard)
            write(place, {"deep/more": MARK, "new/folder/a.txt": MARK, "service/.env.production": MARK})
            (place / "new").rename(place / "newer")
            write(place, {"deep/chain.pem": "-----BEGIN CERTIFICATE----- of another"})
            heard.text += "changed"
            await anyio.sleep(0.3)
            APPEARS[how](place)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(change)
            with pytest.raises(RefusedError):
                await submitted(
                    app, "run_python", {"code": "print('begun', flush=True)\nimport time\ntime.sleep(30)"}, heard
                )
        assert "changed" in heard.text
        assert (await submitted(app, "run_python", {"code": "1"})).structured["hidden"] == 1


@pytest.mark.driver("bubblewrap")
async def test_sixty_saves_beside_programs_that_read_show_nothing(tmp_path: Path) -> None:
    """Sandboxes that stand ready among them; each call ends well without it, or is refused."""
    place = tmp_path / "workspace"
    write(place, {".env": f"{MARK}-0"})
    (tmp_path / "beside").mkdir()
    over = False
    ended, rules = {"well": 0, "refused": 0}, set[str]()

    async def save() -> None:
        nonlocal over
        for number in range(60):
            write(tmp_path / "beside", {"draft": f"{MARK}-{number}"})
            (tmp_path / "beside" / "draft").replace(place / ".env")
            await anyio.sleep(0.03)
        over = True

    async def call(app: App) -> None:
        while not over:
            heard = Heard()
            code = READER.replace("+ 30", "+ 0.02")
            try:
                result = await submitted(app, "run_python", {"code": code}, heard)
            except RefusedError as refused:
                rules.add(refused.rule)
                ended["refused"] += 1
            else:
                assert MARK not in str(result)
                ended["well"] += not result.failed
            assert MARK not in heard.text

    async with served(tmp_path, "bubblewrap", start="warm", worker=True) as app, anyio.create_task_group() as tasks:
        tasks.start_soon(save)
        for _ in range(2):
            tasks.start_soon(call, app)
    assert ended["refused"]
    assert rules == {"workspace.secret"}
    assert MARK not in "".join(path.read_text() for path in (tmp_path / "state" / "audit").rglob("*.jsonl"))


@pytest.mark.driver("bubblewrap")
async def test_more_than_a_sandbox_can_cover_is_covered_by_folders_or_refused(tmp_path: Path) -> None:
    """Many in one folder cover that folder; as many beside each other at the top, and no program runs."""
    place = tmp_path / "workspace"
    write(
        place, {f"certs/{number}.key": MARK for number in range(400)} | {".env": MARK, "certs/a.txt": "a", "b.txt": "b"}
    )
    async with served(tmp_path, "bubblewrap") as app:
        assert await ran(
            app, "import os; print(os.path.exists('/workspace/certs/a.txt'), os.path.exists('/workspace/b.txt'))"
        ) == ("False True\n")
        write(place, {f"{number}.key": MARK for number in range(400)})
        with pytest.raises(UnsupportedSpecError, match="too much of it is named as secrets are"):
            await submitted(app, "run_python", {"code": "1"})


@pytest.mark.driver("bubblewrap")
async def test_what_cannot_be_watched_is_not_shown_to_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the kernel's limit no program runs, and it is said how to raise it; jobs of our own go on."""
    place = tmp_path / "workspace"
    write(place, {"a/a.txt": "a"})
    add = mounts.Inotify.add

    def full(self: mounts.Inotify, path: str, mask: int) -> int:
        if path.endswith("/a"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return add(self, path, mask)

    async with served(tmp_path, "bubblewrap") as app:
        with monkeypatch.context() as broken:
            broken.setattr(mounts.Inotify, "add", full)
            with pytest.raises(UnsupportedSpecError, match=r"sysctl fs\.inotify\.max_user_watches"):
                await submitted(app, "run_python", {"code": "1"})
            assert not (await submitted(app, "list_workspace_files", {})).failed
        assert not (await submitted(app, "run_python", {"code": "1"})).failed


@pytest.mark.driver("bubblewrap")
@pytest.mark.parametrize("name", [".env\n", "line\n/.env"])
async def test_a_name_at_the_top_that_no_record_can_hold_is_refused_with_why(tmp_path: Path, name: str) -> None:
    """Only its folder could be covered, and that is the workspace."""
    write(tmp_path / "workspace", {name: MARK})
    async with served(tmp_path, "bubblewrap") as app:
        with pytest.raises(UnsupportedSpecError, match="characters that cannot be printed"):
            await submitted(app, "run_python", {"code": "1"})


@pytest.mark.driver("bubblewrap")
async def test_odd_names_are_covered_too(tmp_path: Path) -> None:
    """Those that a table of mounts writes otherwise, and those that no record can hold."""
    names = ["a b/.env", "back\\slash/.env", "ümlaut/.env", "a/tab\t/.env", "a/line\n/.env", "a/return\r/.env"]
    write(tmp_path / "workspace", dict.fromkeys([*names, "a.txt", "a b/a.txt"], MARK))
    async with served(tmp_path, "bubblewrap") as app:
        code = f"""
            for name in {[*names, "a.txt", "a b/a.txt"]!r}:
                try:
                    print(open(f"/workspace/{{name}}").read().strip())
                except OSError:
                    print("closed")
        """
        assert await ran(app, code) == "closed\n" * len(names) + f"{MARK}\n" * 2


def test_a_key_that_nobody_could_read_is_covered_once_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner opened it: that ends the programs that see it. The control: a file that holds none."""
    write(tmp_path, {"a.pem": KEY, "b.pem": "-----BEGIN CERTIFICATE-----"})
    add = mounts.Inotify.add

    def only_folders(self: mounts.Inotify, path: str, mask: int) -> int:
        if mask == mounts.FILE:
            raise PermissionError
        return add(self, path, mask)

    with indexed(tmp_path) as index:
        with monkeypatch.context() as unreadable:
            unreadable.setattr(Kind, "held_at", lambda *_: False)
            unreadable.setattr(mounts.Inotify, "add", only_folders)
            index.rebuild()
        with index.guarding(frozenset(), lambda: None) as guard:
            (tmp_path / "b.pem").chmod(0o644)
            index.drain()
            assert (guard.broken, index.masks(frozenset())) == (False, ())
            (tmp_path / "a.pem").chmod(0o644)
            index.drain()
            assert (guard.broken, index.masks(frozenset())) == (True, ("a.pem",))


def test_changes_that_the_kernel_could_not_keep_end_every_program(tmp_path: Path) -> None:
    """Where the queue overflowed nothing is known: all is looked at anew, and what ran meanwhile is withheld."""
    write(tmp_path, {"a/.env": MARK})
    told: list[str] = []
    with indexed(tmp_path) as index, index.guarding(frozenset(), lambda: told.append("broken")) as guard:
        assert guard.holds
        write(tmp_path, {"b/plain": MARK})
        index.drain()
        assert guard.holds
        index._take(-1, mounts.IN_Q_OVERFLOW, "")
        assert (guard.broken, told) == (True, ["broken"])
        assert index.masks(frozenset()) == ("a/.env",)
        assert index.masks(frozenset({"a"})) == ()
