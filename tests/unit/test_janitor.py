"""What a dead server or another version left is removed, what a living one or a stranger owns is not."""

import os
import subprocess  # noqa: TID251 - a process to be killed
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.drivers.bubblewrap.driver import Bubblewrap
from glovebox_sandboxes.host.cgroup import Cgroup, Hierarchy, detect
from glovebox_sandboxes.host.owner import PREFIX, is_of_another_boot, is_orphan, kill_all, new_mark, reap, remove_all
from glovebox_sandboxes.runtime import guest_gc

BOOT, SPACE, PID, STARTED, NONCE = new_mark().split(":")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def dead_mark() -> str:
    """The mark of a server that was: this process's number, started at another time."""
    return f"{BOOT}:{SPACE}:{PID}:1:{NONCE}"


def tree(root: Path, *servers: str) -> list[Path]:
    """Two controllers, each with a group per server and in it a sandbox's group."""
    for controller in ("memory", "pids"):
        for server in servers:
            (root / controller / "glovebox" / server / "s1").mkdir(parents=True)
    return [root / controller / "glovebox" / new_mark() for controller in ("memory", "pids")]


def test_a_dead_servers_groups_are_removed_in_every_hierarchy(tmp_path: Path) -> None:
    """With the groups of its sandboxes; also on v2, where the names have a prefix."""
    mine = tree(tmp_path, dead_mark(), PREFIX + dead_mark())
    reap(mine)
    assert list(tmp_path.glob("*/glovebox/*")) == []


@pytest.mark.parametrize(
    "name",
    [
        # Named, for a worker of pytest's has other numbers in them than its neighbour.
        pytest.param(new_mark(), id="a living one: ours"),
        pytest.param(f"{BOOT}:1:1:0:{NONCE}", id="in another container"),
        pytest.param(f"another:{SPACE}:{PID}:{STARTED}:{NONCE}", id="before this boot"),
        "micro", "user.slice", "g1-1", "", ":::", "a:b:c:d:e",
    ],
)  # fmt: skip
def test_what_is_not_certainly_dead_is_left_alone(tmp_path: Path, name: str) -> None:
    """A living server, one that cannot be judged from here, and whatever else lies there."""
    mine = tree(tmp_path, PREFIX + name)
    reap(mine)
    assert len(list(tmp_path.glob(f"*/glovebox/{PREFIX}{name}/s1"))) == 2


def test_a_groups_processes_are_killed_and_no_others(tmp_path: Path, child: subprocess.Popen[bytes]) -> None:
    """0 (outside our namespace; to kill(2): our group) and ourselves are never meant; what is gone is no error."""
    (tmp_path / "cgroup.procs").write_text(f"0\n{os.getpid()}\n{child.pid}\n")
    kill_all(str(tmp_path))
    assert child.wait(10) == -9
    kill_all(str(tmp_path / "gone"))
    (tmp_path / "cgroup.procs").write_text(f"{2**22 - 1}\n")
    kill_all(str(tmp_path))


async def test_removing_a_group_that_does_not_empty_is_told(tmp_path: Path) -> None:
    """Bounded, and told as ours; a group removed half (v1) is removed whole in the end."""
    parents = (tmp_path / "memory", tmp_path / "pids")
    for parent in parents:
        parent.mkdir()
    group = Cgroup(Hierarchy(version=1, parents=parents), "s1", {})
    (parents[1] / "s1" / "busy").mkdir()
    with pytest.raises(SandboxError, match="processes stay in s1"):
        await group.remove()
    assert not (parents[0] / "s1").exists()
    (parents[1] / "s1" / "busy").rmdir()
    await group.remove()
    assert not (parents[1] / "s1").exists()


async def test_a_server_that_started_nothing_leaves_nothing(tmp_path: Path) -> None:
    parents = (tmp_path / "a", tmp_path / "b")
    for parent in parents:
        parent.mkdir()
    async with Bubblewrap(("bwrap",), "0.8.0", {}, Hierarchy(version=2, parents=parents)).running():
        pass
    assert list(tmp_path.iterdir()) == []


async def test_what_a_dead_server_left_running_is_ended(child: subprocess.Popen[bytes]) -> None:
    """With the kernel's own groups: the process in it is killed, the groups are gone, ours is not."""
    dead, mine = detect(dead_mark()), detect(new_mark())
    if dead is None or mine is None:
        pytest.skip("this host lets us make no control groups")
    group = Cgroup(dead, "s1", {})
    group.add(child.pid)
    await anyio.to_thread.run_sync(reap, mine.parents)
    assert child.wait(10) == -9
    assert not any(parent.exists() for parent in dead.parents)
    assert all(parent.exists() for parent in mine.parents)
    for parent in mine.parents:
        await anyio.to_thread.run_sync(remove_all, str(parent))
    assert not any(parent.exists() for parent in mine.parents)


def test_a_living_server_keeps_its_containers_and_one_that_is_gone_leaves_orphans() -> None:
    """Its number, its start or its nonce differs: one that closes must not remove the other's containers."""
    assert not is_orphan(new_mark())
    assert is_orphan(f"{BOOT}:{SPACE}:{2**22 + 1}:{STARTED}:{NONCE}")
    assert is_orphan(f"{BOOT}:{SPACE}:{PID}:{int(STARTED) + 1}:{NONCE}")
    assert new_mark() != new_mark()


@pytest.mark.parametrize("world", [f"another-kernel:{SPACE}", f"{BOOT}:1"])
def test_a_server_of_another_world_is_never_judged(world: str) -> None:
    """Another kernel's or another pid namespace's server: we cannot see it, so its containers are not ours to take."""
    assert not is_orphan(f"{world}:{2**22 + 1}:{STARTED}:{NONCE}")


def test_another_boot_is_told_from_this_one_and_from_what_is_no_mark() -> None:
    """For what this machine alone writes: a server of an earlier boot is gone."""
    assert is_of_another_boot(f"another-kernel:{SPACE}:{PID}:{STARTED}:{NONCE}")
    assert not is_of_another_boot(new_mark())
    assert not is_of_another_boot(f"{BOOT}:1:{PID}:{STARTED}:{NONCE}")
    assert not is_of_another_boot("another-kernel:1")


@pytest.mark.parametrize(
    "mark",
    [
        "", ":", "a:b:c:d:e", "::::", pytest.param(f"x:y:{os.getpid()}", id="too short, with a living number"),
        "9" * 5000, "a:b:٣:1:e",
    ],
)  # fmt: skip
def test_a_mark_that_is_none_is_left_alone(mark: str) -> None:
    assert not is_orphan(mark)


TWO_DAYS = 2 * 24 * 3600


def guest(data: Path, name: str, *, age: float = TWO_DAYS) -> Path:
    path = data / name
    (path / "_glovebox_guest").mkdir(parents=True)
    (path / "_glovebox_guest" / "wire.py").write_text("")
    then = time.time() - age
    os.utime(path, (then, then))
    return path


def test_old_guests_go_and_the_current_one_stays(tmp_path: Path) -> None:
    current = guest(tmp_path, "guest-new")
    young = guest(tmp_path, "guest-young", age=60)
    for name in ("guest-old", ".building-killed"):
        guest(tmp_path, name)
    (tmp_path / "guest-file").write_text("mine")
    elsewhere = guest(tmp_path / "elsewhere", "kept")
    (tmp_path / "guest-link").symlink_to(elsewhere)
    assert guest_gc.remove(tmp_path, [current]) == 2
    kept = {"guest-new", young.name, "guest-file", "guest-link", "elsewhere"}
    assert {path.name for path in tmp_path.iterdir()} == kept
    assert (elsewhere / "_glovebox_guest" / "wire.py").exists()


def test_a_guest_a_server_uses_stays(tmp_path: Path) -> None:
    """Whatever its age; once the server is gone it goes (control)."""
    used = guest(tmp_path, "guest-used")
    with guest_gc.held([used]), guest_gc.held([used]):
        assert guest_gc.remove(tmp_path, [tmp_path / "guest-new"]) == 0
        assert used.is_dir()
    assert guest_gc.remove(tmp_path, [tmp_path / "guest-new"]) == 1
    assert not used.exists()
    with guest_gc.held([]):
        assert guest_gc.remove(tmp_path / "none", [tmp_path]) == 0


def test_runtimes_that_nothing_names_go_with_their_servers(tmp_path: Path) -> None:
    current = guest(tmp_path, "runtime-now")
    for name in ("runtime-old", "runtime-used", "guest-of-then"):
        guest(tmp_path, name)
    with guest_gc.held([tmp_path / "runtime-used", tmp_path / "guest-of-then"]):
        assert {path.name for path in guest_gc.removable(tmp_path, [current])} == {"runtime-old"}
        assert guest_gc.remove(tmp_path, [current]) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"runtime-now", "runtime-used", "guest-of-then"}
    assert guest_gc.remove(tmp_path, [current]) == 2


def test_a_guest_is_not_removed_under_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a guest must not look like a whole one, even if the removal is killed."""
    guest(tmp_path, "guest-old")

    def killed(_: Path) -> None:
        raise OSError

    monkeypatch.setattr("shutil.rmtree", killed)
    guest_gc.remove(tmp_path, [tmp_path / "guest-new"])
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".building-")
