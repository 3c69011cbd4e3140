"""F4, F5, F12: a program that may write in its workspace changes a copy; the host's own stays byte for byte as it was.

Each test is a whole call, as a client's would be, on every driver.
"""

import base64
import hashlib
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from tests.fixtures import brokered
from tests.fixtures.brokered import Called, Glovebox
from tests.must_run import GVISOR_DOCKER

from glovebox_sandboxes.contract.errors import UnsupportedSpecError
from glovebox_sandboxes.drivers.docker.driver import DockerDriver
from glovebox_sandboxes.drivers.gvisor import driver as gvisor
from glovebox_server import app as apps
from glovebox_server.settings import Settings

DRIVERS = [*brokered.DRIVERS, pytest.param(GVISOR_DOCKER, marks=pytest.mark.driver(GVISOR_DOCKER))]

PROFILE = """
tool = "run_python"
description = "For a test."
risk = "medium"
isolation = ["{driver}"]
approval = "none"
[files]
workspace = "{mode}"
output = true
[limits]
wall_seconds = 20
cpu_seconds = 10
memory = "256 MiB"
pids = 32
scratch = "4 MiB"
workspace = {{ bytes = "4 MiB", files = 200 }}
output = {{ bytes = "2 MiB", files = 8 }}
stream = "64 KiB"
enforce = "any"
"""


def fingerprint(root: Path) -> dict[str, tuple[int, int, str]]:
    """Mode, time of the last change and content (or target) of everything below ``root``, and of itself."""
    found = {}
    for path in (root, *sorted(root.rglob("*"))):
        status = path.lstat()
        content = os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(root))] = (status.st_mode, status.st_mtime_ns, hashlib.sha256(content).hexdigest())
    return found


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A small project: texts, a picture, a script, a link that leads out, and git's own folder."""
    root = tmp_path / "workspace"
    (root / "docs").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / ".git/config").write_text("[core]\n")
    (root / "notes.txt").write_text("one\ntwo\nthree\n")
    (root / "docs/old name.md").write_text("# Old\nno line feed at the end")
    (root / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "out").symlink_to("/etc/passwd")
    for folder in (root, *root.rglob("*")):
        if folder.is_dir():
            folder.chmod(0o755)
    return root


@asynccontextmanager
async def served(workspace: Path, directory: Path, driver: str, mode: str = "overlay") -> AsyncIterator[Glovebox]:
    """A server for this workspace."""
    own = directory / "profiles"
    own.mkdir()
    (own / "run_python.toml").write_text(PROFILE.format(driver=driver.partition("-")[0], mode=mode))
    settings = Settings(workspace=workspace, profiles_dir=own, state_dir=directory / "state")
    with pytest.MonkeyPatch.context() as patch:
        if driver == GVISOR_DOCKER:
            patch.setattr(gvisor, "connect", lambda *_: DockerDriver.connect("runsc"))
        async with apps.opened(settings, "cli") as app:
            yield Glovebox(app)


async def patch_of(glovebox: Glovebox, called: Called) -> bytes:
    """The patch artifact of a call."""
    uri = called.fields["changes"]["patch_uri"]
    (link,) = [each for each in called.fields["artifacts"] if each["uri"] == uri]
    assert link["name"] == "changes.patch"
    stored = (glovebox.app.settings.state_dir / "artifacts").rglob("*")
    (content,) = {
        path.read_bytes()
        for path in stored
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == link["sha256"]
    }
    return content


CHANGES = """
import os, mmap
open("notes.txt", "a").write("four\\n")
with open("picture.png", "r+b") as file, mmap.mmap(file.fileno(), 0) as view:
    view[20] = 255
os.utime("picture.png", (0, 0))
os.remove("docs/old name.md")
os.makedirs("new/folder")
open("new/folder/ü.txt", "w").write("new")
open("new/zeros.bin", "wb").write(bytes(1000))
os.chmod("run.sh", 0o644)
"""


@pytest.mark.parametrize("driver", DRIVERS)
async def test_changes_come_back_as_a_patch_and_the_host_is_as_it_was(
    driver: str, workspace: Path, tmp_path: Path
) -> None:
    """The workspace is the same by hash, mode and time; git applies the patch, and then it is what the program saw."""
    before = fingerprint(workspace)
    async with served(workspace, tmp_path, driver) as glovebox:
        called = await glovebox.call("run_python", code=CHANGES)
        assert called.fields["exit_code"] == 0, called.text
        patch = await patch_of(glovebox, called)
    assert fingerprint(workspace) == before
    (started,) = [record.data for record in called.records if record.kind == "sandbox.started"]
    assert ("(runsc)" in started["host"]["mechanism"]) == (driver == GVISOR_DOCKER)  # it is the way that was meant
    changes = called.fields["changes"]
    assert list(changes["created"]) == ["new/zeros.bin", "new/folder/ü.txt"]
    assert list(changes["changed"]) == ["notes.txt", "picture.png", "run.sh"]
    assert list(changes["deleted"]) == ["docs/old name.md"]
    assert "2 created, 3 changed, 1 deleted" in called.text
    assert {name: called.usage[f"workspace_{name}"] for name in ("created", "changed", "deleted")} == {
        "created": 2, "changed": 3, "deleted": 1,
    }  # fmt: skip
    receipt = json.loads(base64.b64decode(called.records[-1].data["envelope"]["payload"]))
    assert {"name": "artifact:changes.patch", "digest": {"sha256": hashlib.sha256(patch).hexdigest()}} in [
        {name: each[name] for name in ("name", "digest")} for each in receipt["subject"]
    ]
    measured = {each["field"]: each.get("inside") for each in started["fields"]}
    assert "/guest/workspace" in measured["mounts of host files"]
    assert "200 files and 4 MiB of workspace" in " ".join(receipt["predicate"]["withheld"])
    applied = tmp_path / "applied"
    shutil.copytree(workspace, applied, symlinks=True)
    git = [shutil.which("git") or "git", "apply", "--whitespace=nowarn", "-"]
    done = await anyio.run_process(git, input=patch, cwd=applied, check=False)
    assert done.returncode == 0, done.stderr
    assert (applied / "notes.txt").read_text() == "one\ntwo\nthree\nfour\n"
    assert (applied / "picture.png").read_bytes()[20] == 255
    assert (applied / "new/folder/ü.txt").read_text() == "new"
    assert (applied / "new/zeros.bin").read_bytes() == bytes(1000)
    assert not (applied / "docs/old name.md").exists()
    assert not (applied / "run.sh").stat().st_mode & 0o100


@pytest.mark.driver("bubblewrap")
async def test_without_the_overlay_the_same_program_is_refused_its_first_write(workspace: Path, tmp_path: Path) -> None:
    """The control: ``read`` mounts the workspace itself, read-only, and there are no changes to tell of."""
    async with served(workspace, tmp_path, "bubblewrap", "read") as glovebox:
        called = await glovebox.call("run_python", code=CHANGES)
    assert "Permission denied" in called.stderr or "Read-only file system" in called.stderr
    assert called.fields["changes"] is None


HOSTILE = """
import os
os.symlink("/etc/shadow", "evil")
os.remove("notes.txt"); os.symlink("/output", "notes.txt")
os.mkfifo("pipe")
open(b"\\xff\\xfe", "w").write("x")
open("a\\n+++ b.txt", "w").write("x")
os.remove(".git"); os.mkdir(".git"); open(".git/hook", "w").write("x")
os.makedirs(".GIT/hooks"); open(".GIT/hooks/pre-commit", "w").write("x")
with open("huge", "wb") as file:
    file.truncate(1 << 40)
open("/output/changes.patch", "w").write("forged")
open("good.txt", "w").write("good\\n")
os.chmod("good.txt", 0); os.chmod("docs", 0)
"""


@pytest.mark.parametrize("driver", DRIVERS)
async def test_what_no_patch_may_carry_is_named_with_the_reason(driver: str, workspace: Path, tmp_path: Path) -> None:
    """Links, pipes, unreadable names, git's own folder and a file of a tebibyte stay behind; a forged patch too."""
    before = fingerprint(workspace)
    async with served(workspace, tmp_path, driver) as glovebox:
        called = await glovebox.call("run_python", code=HOSTILE)
        assert called.fields["exit_code"] == 0, called.text
        patch = await patch_of(glovebox, called)
    assert fingerprint(workspace) == before
    assert list(called.fields["changes"]["created"]) == ["good.txt"]
    assert not called.fields["changes"]["changed"]
    assert not called.fields["changes"]["deleted"]
    assert patch == (
        b"diff --git a/good.txt b/good.txt\nnew file mode 100644\n"
        b"index 0000000000000000000000000000000000000000..12799ccbe7ce445b11b7bd4833bcc2c2ce1b48b7\n"
        b"--- /dev/null\n+++ b/good.txt\n@@ -0,0 +1 @@\n+good\n"
    )
    for name, reason in (
        ("evil", "a symbolic link"),
        ("notes.txt", "a symbolic link"),
        ("pipe", "not a regular file"),
        ("udcff", "not plain text"),
        ("b.txt", "not plain text"),
        (".git/hook", "git runs"),
        (".GIT/hooks/pre-commit", "git runs"),
        ("huge", "larger than"),
        ("changes.patch", "this name"),
    ):
        assert any(name in note and reason in note for note in called.fields["notes"]), (name, called.text)


EMBEDDED = """
import os
for place in ("docs", "new/deep"):
    os.makedirs(place + "/objects", exist_ok=True); os.makedirs(place + "/refs")
    for name, text in (
        ("HEAD", "ref: refs/heads/main\\n"),
        ("config", "[core]\\n repositoryformatversion = 0\\n bare = false\\n worktree = .\\n"
                   " fsmonitor = \\"touch {ran}; false\\"\\n"),
        ("objects/keep", ""),
        ("refs/keep", ""),
    ):
        open(place + "/" + name, "w").write(text)
open(".gitattributes", "w").write("* filter=evil\\n")
open(".gitmodules", "w").write("[submodule \\"x\\"]\\n")
for name in (".envrc", "CLAUDE.md", "conftest.py", "plain.txt"):
    open(name, "w").write("x\\n")
"""


FOLDERS_OF_TOOLS = """
import errno, os
def tried(attempt):
    try:
        attempt()
        return "ok"
    except OSError as problem:
        return errno.errorcode[problem.errno]
print(open(".git/config").read().strip(), len(os.listdir("web/node_modules")))
print(tried(lambda: open("web/node_modules/new", "w")), tried(lambda: os.remove("web/node_modules/0.js")))
print(tried(lambda: open("web/new", "w")))
os.remove(".git")
"""


@pytest.mark.parametrize("driver", DRIVERS)
async def test_folders_of_tools_are_seen_and_neither_copied_nor_changed(
    driver: str, workspace: Path, tmp_path: Path
) -> None:
    """More files than may be copied, and a program reads them; the control is a folder of another name."""
    (workspace / "web/node_modules").mkdir(parents=True)
    for number in range(300):
        (workspace / f"web/node_modules/{number}.js").write_bytes(bytes(20_000))
    for folder in (workspace / "web", workspace / "web/node_modules"):
        folder.chmod(0o755)
    before = fingerprint(workspace)
    async with served(workspace, tmp_path, driver) as glovebox:
        called = await glovebox.call("run_python", code=FOLDERS_OF_TOOLS)
        read, *denied, written = called.stdout.split("\n")[:-1]
        assert read == "[core] 300", called.text
        assert set(" ".join(denied).split()) <= {"EROFS", "EACCES"}
        assert written == "ok"
        assert list(called.fields["changes"]["created"]) == ["web/new"]
        assert not called.fields["changes"]["deleted"]
        assert any(".git" in note and "link" in note for note in called.fields["notes"])
        assert fingerprint(workspace) == before
        (workspace / "web/node_modules").rename(workspace / "web/modules")
        with pytest.raises(UnsupportedSpecError, match="200 with 4194304 bytes may be"):
            await glovebox.call("run_python", code=FOLDERS_OF_TOOLS)


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_patch_brings_no_repository_and_is_marked_by_what_it_touches(
    driver: str, workspace: Path, tmp_path: Path
) -> None:
    """An embedded repository whose config runs a program stays behind; agents' and shells' files are marked by path.

    After ``git apply``, ``git status`` in each folder runs nothing; in the folder as the program left it, it does
    (the control).
    """
    ran = tmp_path / "ran"
    before = {"docs/HEAD": "ref: refs/heads/main\n", "docs/objects/keep": ""}
    for name, text in before.items():  # part of it lay there
        (workspace / name).parent.mkdir(mode=0o755, exist_ok=True)
        (workspace / name).write_text(text)
    shutil.rmtree(workspace / ".git")
    async with served(workspace, tmp_path, driver) as glovebox:
        called = await glovebox.call("run_python", code=EMBEDDED.replace("{ran}", str(ran)))
        assert called.fields["exit_code"] == 0, called.text
        patch = await patch_of(glovebox, called)
    assert sorted(called.fields["changes"]["created"]) == [".envrc", "CLAUDE.md", "conftest.py", "plain.txt"]
    for name, reason in (
        ("docs/config", "takes its folder for a repository"),
        ("new/deep/HEAD", "takes its folder for a repository"),
        (".gitattributes", "git runs or obeys"),
        (".gitmodules", "git runs or obeys"),
    ):
        assert any(name in note and reason in note for note in called.fields["notes"]), (name, called.text)
    (link,) = called.fields["artifacts"]
    (record,) = [each.data for each in called.records if each.kind == "artifact.collected"]
    assert list(link["risks"]) == record["risks"]
    for why in ("'.envrc': the shell", "'CLAUDE.md': agents", "'conftest.py': test"):
        assert any(why in risk for risk in link["risks"])
        assert why in called.text
    assert "plain.txt" not in " ".join(link["risks"])

    async def git(*words: str, cwd: Path, given: bytes = b"") -> None:
        own = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "GIT_CEILING_DIRECTORIES": str(cwd.parent)}
        await anyio.run_process(["git", *words], input=given, cwd=cwd, env=own, check=False)

    await git("apply", "-", cwd=workspace, given=patch)
    assert (workspace / "plain.txt").exists()
    for folder in (workspace, workspace / "docs", workspace / "new"):
        if folder.is_dir():
            await git("status", cwd=folder)
    assert not ran.exists()
    await anyio.run_process([sys.executable, "-c", EMBEDDED.replace("{ran}", str(ran))], cwd=workspace)
    await git("status", cwd=workspace / "docs")
    assert ran.exists()


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_workspace_over_the_limits_is_refused_with_the_numbers_before_the_program(
    driver: str, workspace: Path, tmp_path: Path
) -> None:
    """One file more than may be copied, or a page: the program does not run, and the reason counts."""
    code = "print('ran')"
    for number in range(193):
        (workspace / f"{number}.txt").touch()
    async with served(workspace, tmp_path, driver) as glovebox:
        assert (await glovebox.call("run_python", code=code)).stdout == "ran\n"  # the control: 200 exactly
        (workspace / "one-more.txt").touch()
        with pytest.raises(
            UnsupportedSpecError, match=r"it holds 201 files and folders .* 200 with 4194304 bytes may be"
        ):
            await glovebox.call("run_python", code=code)
        (workspace / "one-more.txt").unlink()
        (workspace / "0.txt").write_bytes(bytes(4 << 20))
        with pytest.raises(UnsupportedSpecError, match=r"it holds 200 files and folders with 5009408 bytes"):
            await glovebox.call("run_python", code=code)


@pytest.mark.parametrize("driver", DRIVERS)
async def test_the_copy_has_an_end_and_the_original_cannot_be_written(
    driver: str, workspace: Path, tmp_path: Path
) -> None:
    """A program that fills its workspace gets ENOSPC; where the workspace itself is mounted it gets EROFS or EACCES.

    What was written then is in no patch, which would put it in the place of what is whole; the control is.
    """
    code = """
import errno, os
open("first.txt", "w").write("whole")
try:
    with open("flood", "wb") as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
except OSError as problem:
    print(errno.errorcode[problem.errno])
for attempt in (lambda: open("/guest/workspace/notes.txt", "w"), lambda: os.remove("/guest/workspace/notes.txt")):
    try:
        attempt()
        print("ok")
    except OSError as problem:
        print(errno.errorcode[problem.errno])
"""
    before = fingerprint(workspace)
    async with served(workspace, tmp_path, driver) as glovebox:
        called = await glovebox.call("run_python", code=code)
    first, *rest = called.stdout.split()
    assert first == "ENOSPC"
    assert set(rest) <= {"EROFS", "EACCES"}
    assert len(rest) == 2
    assert fingerprint(workspace) == before
    assert list(called.fields["changes"]["created"]) == ["first.txt"]
    cut = "not in the patch: its end may be missing, the workspace was full when it was written"
    assert f"'/workspace/flood': not collected, {cut}" in called.fields["notes"]
