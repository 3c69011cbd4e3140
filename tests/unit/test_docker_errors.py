"""Whatever goes wrong with the Engine becomes SandboxError; what the kernel accounts for is read from its groups."""

import signal
import socket
import sys
import tarfile
from pathlib import Path
from typing import Any

import anyio
import docker.errors
import pytest
import requests
from tests.unit.test_docker_plan import SPEC

from glovebox_sandboxes.contract.base import SandboxStats
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.drivers.docker import driver, usage
from glovebox_sandboxes.drivers.docker.driver import DockerDriver, Remover
from glovebox_sandboxes.drivers.docker.engine import Engine, translated
from glovebox_sandboxes.drivers.docker.image import build
from glovebox_sandboxes.drivers.docker.usage import bound_sockets, end, group, limits
from glovebox_sandboxes.host.cgroup import SOCKET_BYTES, GroupFiles


def response(status: int) -> requests.Response:
    answer = requests.Response()
    answer.status_code = status
    return answer


ERRORS: list[tuple[Exception, str, str]] = [
    (docker.errors.ImageNotFound("x", response(404), "No such image: sha256:ab"), "No such image", "glovebox setup"),
    (docker.errors.APIError("x", response(500), "no space left on device."), "no space left on device", "journalctl"),
    (requests.ConnectionError("refused"), "refused", "systemctl start docker"),
    (requests.ReadTimeout("20 s"), "20 s", "overloaded"),
    (PermissionError(13, "Permission denied"), "Permission denied", "usermod -aG docker"),
    (docker.errors.DockerException("odd"), "odd", "journalctl"),
]


@pytest.mark.parametrize(("problem", "reason", "fix"), ERRORS, ids=lambda value: type(value).__name__)
def test_each_kind_of_failure_is_told_with_its_fix(problem: Exception, reason: str, fix: str) -> None:
    """The Engine's own sentence is the reason; the fix depends on the kind."""
    with pytest.raises(SandboxError) as told, translated("Creating a container"):
        raise problem
    assert told.value.what == "Creating a container"
    assert reason in told.value.reason
    assert fix in told.value.fix
    assert not told.value.reason.endswith(".")


def test_a_mistake_of_ours_is_not_hidden_and_a_long_explanation_is_cut() -> None:
    """Control: what is not the Engine's passes as it is; the Engine may quote a whole request back."""
    with pytest.raises(ZeroDivisionError), translated("x"):
        raise ZeroDivisionError
    with pytest.raises(SandboxError) as told, translated("x"):
        raise docker.errors.APIError("x", response(400), "y" * 100_000)
    assert len(told.value.reason) == 500


@pytest.mark.parametrize("host", ["tcp://192.0.2.1:2375", "ssh://someone@host", "http+unix:///run/x", ""])
def test_an_engine_elsewhere_is_refused(host: str) -> None:
    """Workspace, limits and namespaces of another machine are not ours to vouch for."""
    with pytest.raises(SandboxError, match="DOCKER_HOST"):
        Engine(host)


async def test_without_an_engine_or_with_a_dead_one_the_driver_says_how_to_start_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No socket at all, or one where nobody listens: "installed" is not "working"."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    async with DockerDriver.connect() as driver:
        assert not driver.capabilities.usable
        assert driver.capabilities.missing[0].fix.startswith("Install and start it: `apt-get install docker.io")
        with pytest.raises(SandboxError, match="systemctl start docker"):
            driver.plan(SPEC)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/dead.sock")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/dead.sock")
    async with DockerDriver.connect() as driver:
        assert driver.capabilities.missing[0].fix == "Start it: systemctl start docker"


class Ended:
    """An Engine's client for a container that has ended; it has removed it by itself, or not yet."""

    def __init__(self, *, removed: bool, told: bool, events: list[str], code: int = 137, late: int = 0) -> None:
        self.removed, self.told, self.happened, self.code, self.late = removed, told, events, code, late
        self.asked = 0

    def wait(self, _name: str, **_options: object) -> dict[str, int]:
        return {"StatusCode": self.code}

    def inspect_container(self, _name: str) -> dict[str, object]:
        if self.removed:
            raise docker.errors.NotFound("x", response(404), "No such container")
        return {"State": {"ExitCode": self.code, "OOMKilled": self.told}}

    def events(self, *, filters: dict[str, list[str]], **_options: object) -> list[dict[str, str]]:
        self.asked += 1
        heard = self.happened if self.asked > self.late else []
        return [{"Action": event} for event in heard if event in filters["event"]]


@pytest.mark.parametrize(
    ("client", "told"),
    [
        (Ended(removed=False, told=True, events=[]), True),
        (Ended(removed=False, told=False, events=[]), False),
        (Ended(removed=False, told=False, events=["start", "die", "oom"], late=3), True),
        (Ended(removed=False, told=False, events=["oom"], code=1), False),
        (Ended(removed=True, told=True, events=["start", "oom", "die", "destroy"]), True),
        (Ended(removed=True, told=True, events=["start", "die", "destroy"]), False),
    ],
    ids=("memory", "else", "memory told late", "no end by memory", "memory and removed", "else and removed"),
)
async def test_that_memory_ended_a_container_is_known_after_its_end(client: Ended, told: bool) -> None:
    """Before, one that the Engine had removed, or heard of too late, was called a sandbox that died."""
    engine = Engine.__new__(Engine)
    engine._threads = anyio.CapacityLimiter(1)
    engine.api = client
    assert await engine.ran_out_of_memory("x") is told


def test_files_in_the_image_belong_to_root_and_are_writable_by_nobody_else() -> None:
    entry = tarfile.TarInfo("packages/evil")
    entry.mode, entry.uid, entry.gid, entry.uname, entry.mtime = 0o6777, 1000, 1000, "someone", 1_700_000_000
    made = build._as_root(entry)
    assert (made.mode, made.uid, made.gid, made.uname, made.mtime) == (0o644, 0, 0, "root", 0)
    entry.type = tarfile.DIRTYPE
    assert build._as_root(entry).mode == 0o755


def test_a_failed_step_is_told_with_its_last_words() -> None:
    """The Engine's error and the end of what the step printed before it; progress alone is fine (control)."""
    answers = [{"stream": "x" * 10_000}, {"stream": "no numpy"}, {"error": "returned a non-zero code: 1"}]
    with pytest.raises(SandboxError, match=r"non-zero code: 1.*no numpy") as told:
        build._follow(answers)
    assert len(told.value.reason) < 2_000
    build._follow([{"stream": "Step 1"}, {"aux": {"ID": "sha256:ab"}}])


def test_every_locked_package_has_hashes_and_another_base_is_another_image() -> None:
    """Pip refuses a requirement without a hash; the first step's image is named after all that goes into it."""
    lines = build.LOCK.read_text().splitlines()
    pins = [line for line in lines if "==" in line and not line.startswith("#")]
    assert {pin.partition("==")[0] for pin in pins} >= {"numpy", "pandas", "matplotlib", "tzdata"}
    assert all(pin.endswith(" \\") for pin in pins)
    assert all("--hash=sha256:" in line for line in lines if line.startswith("    "))
    assert build.runtime_tag("a") == build.runtime_tag("a")
    assert build.runtime_tag("a") != build.runtime_tag("b")


CONTAINER = "c0ffee" * 10


def tree(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


OWN, SCOPE = f"docker/{CONTAINER}", f"system.slice/docker-{CONTAINER}.scope"


@pytest.mark.parametrize(
    ("files", "stats"),
    [
        (
            {
                "proc/7/cgroup": f"9:name=systemd:/{OWN}\n4:memory:/{OWN}\n2:cpu,cpuacct:/{OWN}\n0::/\n",
                f"cg/memory/{OWN}/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
                f"cg/memory/{OWN}/memory.max_usage_in_bytes": "4096\n",
                f"cg/cpuacct/{OWN}/cpuacct.usage": "1500000000\n",
            },
            SandboxStats(out_of_memory=True, memory_peak_bytes=4096, cpu_seconds=1.5),
        ),
        (
            {
                "proc/7/cgroup": f"0::/{SCOPE}\n",
                f"cg/{SCOPE}/memory.events": "low 0\nhigh 0\nmax 3\noom 0\noom_kill 0\n",
                f"cg/{SCOPE}/cpu.stat": "usage_usec 2500000\nuser_usec 1\nsystem_usec 2\n",
            },
            SandboxStats(out_of_memory=False, memory_peak_bytes=None, cpu_seconds=2.5),
        ),
    ],
    ids=["version 1", "version 2"],
)
def test_each_version_is_read_from_its_own_groups(files: dict[str, str], stats: SandboxStats, tmp_path: Path) -> None:
    """Memory and processor time are in two hierarchies or one; a kernel before 5.19 has no memory.peak."""
    tree(tmp_path, files)
    assert group(7, CONTAINER, tmp_path / "cg", tmp_path / "proc").stats() == stats


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


class Removing:
    def __init__(self, *, gone: bool) -> None:
        self.gone = gone
        self.asked: list[str] = []

    async def remove(self, name: str) -> None:
        self.asked.append(name)
        if self.gone:
            raise SandboxError("Removing a container", "Connection refused", "Start it.")


async def test_a_removal_that_nobody_foresaw_ends_nothing_else() -> None:
    """It is told as one that failed; the containers after it are removed (the control)."""

    class Odd(Removing):
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
    engine: Any = Removing(gone=gone)
    remover = Remover(engine)
    async with remover.running():
        remover.take("glovebox-1", "c0ffee")
        remover.take("glovebox-2", "")
    assert ended == ["c0ffee"]
    assert {name for name in engine.asked if name} == {"glovebox-1", "glovebox-2"}
    assert set(remover.leaked) == ({"glovebox-1", "glovebox-2"} if gone else set())
