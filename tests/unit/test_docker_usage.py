"""What the kernel accounts for a container is read from its own groups, on both versions, and from nobody else's."""

import signal
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from glovebox_sandboxes.contract.base import SandboxStats
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.drivers.docker import driver, usage
from glovebox_sandboxes.drivers.docker.driver import Remover
from glovebox_sandboxes.drivers.docker.usage import bound_sockets, end, group, limits
from glovebox_sandboxes.host.cgroup import SOCKET_BYTES, GroupFiles

CONTAINER = "c0ffee" * 10


def tree(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def test_version_1_is_read_per_controller(tmp_path: Path) -> None:
    """Memory and processor time are in two hierarchies; nanoseconds become seconds."""
    own = f"docker/{CONTAINER}"
    tree(
        tmp_path,
        {
            "proc/7/cgroup": f"9:name=systemd:/{own}\n4:memory:/{own}\n2:cpu,cpuacct:/{own}\n0::/\n",
            f"cg/memory/{own}/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
            f"cg/memory/{own}/memory.max_usage_in_bytes": "4096\n",
            f"cg/cpuacct/{own}/cpuacct.usage": "1500000000\n",
        },
    )
    found = group(7, CONTAINER, tmp_path / "cg", tmp_path / "proc").stats()
    assert found == SandboxStats(out_of_memory=True, memory_peak_bytes=4096, cpu_seconds=1.5)


def test_version_2_is_read_from_one_group(tmp_path: Path) -> None:
    """Microseconds become seconds; a kernel before 5.19 has no memory.peak."""
    own = f"system.slice/docker-{CONTAINER}.scope"
    tree(
        tmp_path,
        {
            "proc/7/cgroup": f"0::/{own}\n",
            f"cg/{own}/memory.events": "low 0\nhigh 0\nmax 3\noom 0\noom_kill 0\n",
            f"cg/{own}/cpu.stat": "usage_usec 2500000\nuser_usec 1\nsystem_usec 2\n",
        },
    )
    found = group(7, CONTAINER, tmp_path / "cg", tmp_path / "proc").stats()
    assert found == SandboxStats(out_of_memory=False, memory_peak_bytes=None, cpu_seconds=2.5)


@pytest.mark.parametrize("line", ["4:memory:/docker/another\n", "0::/user.slice\n", ""])
def test_groups_of_another_process_are_not_read(tmp_path: Path, line: str) -> None:
    """A number seen from another pid namespace is somebody else's here: its groups lack the container's name."""
    tree(tmp_path, {"proc/7/cgroup": line, "cg/memory/docker/another/memory.oom_control": "oom_kill 9\n"})
    assert group(7, CONTAINER, tmp_path / "cg", tmp_path / "proc").stats() is None


def test_a_process_that_is_gone_has_no_usage(tmp_path: Path) -> None:
    assert group(7, CONTAINER, tmp_path, tmp_path).stats() is None


HOST = {"Memory": 4096, "PidsLimit": 7, "NanoCpus": 10**9}


def test_sockets_are_bounded_where_memory_does_not_count_them(tmp_path: Path) -> None:
    """On v1 the limit is written and read back; on v2, and where the group cannot be written, nothing is claimed."""
    tree(tmp_path, {"memory.kmem.tcp.limit_in_bytes": "9223372036854771712\n"})
    own = GroupFiles({"memory": str(tmp_path)})
    assert "limit sockets" not in limits(own, HOST, bounded=False)
    assert bound_sockets(own)
    assert limits(own, HOST, bounded=True)["limit sockets"] == (str(SOCKET_BYTES), str(SOCKET_BYTES))
    for other in ({"": str(tmp_path)}, {"memory": str(tmp_path / "gone")}, {}):
        assert not bound_sockets(GroupFiles(other))


@pytest.mark.parametrize(
    "group", ["pids/docker/{}", "docker/{}", "pids/system.slice/docker-{}.scope", "system.slice/docker-{}.scope"]
)
async def test_what_an_engine_left_in_a_containers_groups_is_killed(tmp_path: Path, group: str) -> None:
    """Wherever the groups are, and nothing in another container's (control)."""
    command = [sys.executable, "-c", "input()"]
    async with await anyio.open_process(command) as left, await anyio.open_process(command) as other:
        files = {CONTAINER: f"0\n{left.pid}\n", "beef" * 16: f"{other.pid}\n"}
        tree(tmp_path, {f"{group.format(name)}/cgroup.procs": text for name, text in files.items()})
        assert end("dead" * 16, tmp_path) == 0
        assert end(CONTAINER, tmp_path) == 1
        assert await left.wait() == -signal.SIGKILL
        assert other.returncode is None
        other.kill()


class Engine:
    """One that removes, or one that is gone."""

    def __init__(self, *, gone: bool) -> None:
        self.gone = gone
        self.asked: list[str] = []

    async def remove(self, name: str) -> None:
        self.asked.append(name)
        if self.gone:
            raise SandboxError("Removing a container", "Connection refused", "Start it.")


async def test_a_removal_that_nobody_foresaw_ends_nothing_else() -> None:
    """It is told as one that failed; the containers after it are removed (the control)."""

    class Odd(Engine):
        async def remove(self, name: str) -> None:
            await super().remove(name)
            if name == "glovebox-1":
                raise KeyError("what a library did not expect")

    engine: Any = Odd(gone=False)
    remover = Remover(engine)
    async with remover.running():
        remover.take("glovebox-1", "")
        remover.take("glovebox-2", "")
    assert engine.asked == ["glovebox-1", "glovebox-2"]
    assert list(remover.leaked) == ["glovebox-1"]


@pytest.mark.parametrize("gone", [False, True])
async def test_what_the_engine_left_in_a_container_is_killed(gone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the Engine had its chance, whether or not it took it; a container that was never made has nothing in it."""
    ended: list[str] = []

    def end(container: str) -> int:
        ended.append(container)
        return 1

    monkeypatch.setattr(usage, "end", end)
    monkeypatch.setattr(driver, "_RETRY_SECONDS", 0)
    engine: Any = Engine(gone=gone)
    remover = Remover(engine)
    async with remover.running():
        remover.take("glovebox-1", "c0ffee")
        remover.take("glovebox-2", "")
    assert ended == ["c0ffee"]
    assert {name for name in engine.asked if name} == {"glovebox-1", "glovebox-2"}
    assert set(remover.leaked) == ({"glovebox-1", "glovebox-2"} if gone else set())
