"""Whatever goes wrong with the Engine becomes SandboxError, with what was attempted and what helps."""

import socket
import tarfile
from pathlib import Path

import anyio
import docker.errors
import pytest
import requests
from tests.unit.test_docker_plan import SPEC

from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.drivers.docker.driver import DockerDriver
from glovebox_sandboxes.drivers.docker.engine import Engine, translated
from glovebox_sandboxes.drivers.docker.image import build


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


def test_a_mistake_of_ours_is_not_hidden() -> None:
    """Control: anything that is not the Engine's passes as it is."""
    with pytest.raises(ZeroDivisionError), translated("x"):
        raise ZeroDivisionError


def test_a_long_explanation_is_cut() -> None:
    """The Engine may quote a whole request back."""
    with pytest.raises(SandboxError) as told, translated("x"):
        raise docker.errors.APIError("x", response(400), "y" * 100_000)
    assert len(told.value.reason) == 500


@pytest.mark.parametrize("host", ["tcp://192.0.2.1:2375", "ssh://someone@host", "http+unix:///run/x", ""])
def test_an_engine_elsewhere_is_refused(host: str) -> None:
    """Workspace, limits and namespaces of another machine are not ours to vouch for."""
    with pytest.raises(SandboxError, match="DOCKER_HOST"):
        Engine(host)


async def test_without_an_engine_the_driver_says_how_to_start_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No socket at all: capabilities name it, and planning is refused with the same fix."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    async with DockerDriver.connect() as driver:
        assert not driver.capabilities.usable
        assert driver.capabilities.missing[0].fix.startswith("Install and start it: `apt-get install docker.io")
        with pytest.raises(SandboxError, match="systemctl start docker"):
            driver.plan(SPEC)


async def test_a_dead_engine_that_left_its_socket_is_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The file is there and nobody listens: "installed" is not "working"."""
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
    ids=[
        "memory",
        "something-else",
        "memory-told-late",
        "no-end-by-memory",
        "memory-and-removed",
        "something-else-and-removed",
    ],
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
    """The Engine's error and the end of what the step printed before it."""
    answers = [{"stream": "x" * 10_000}, {"stream": "no numpy"}, {"error": "returned a non-zero code: 1"}]
    with pytest.raises(SandboxError, match=r"non-zero code: 1.*no numpy") as told:
        build._follow(answers)
    assert len(told.value.reason) < 2_000


def test_a_build_without_error_is_read_to_its_end() -> None:
    build._follow([{"stream": "Step 1"}, {"aux": {"ID": "sha256:ab"}}])


def test_every_locked_package_has_hashes() -> None:
    """Nothing can be installed that was not locked: pip refuses a requirement without a hash."""
    lines = build.LOCK.read_text().splitlines()
    pins = [line for line in lines if "==" in line and not line.startswith("#")]
    assert {pin.partition("==")[0] for pin in pins} >= {"numpy", "pandas", "matplotlib", "tzdata"}
    assert all(pin.endswith(" \\") for pin in pins)
    assert all("--hash=sha256:" in line for line in lines if line.startswith("    "))


def test_another_base_or_recipe_is_another_image() -> None:
    """The first step's image is named after everything that goes into it, the base's name included."""
    assert build.runtime_tag("a") == build.runtime_tag("a")
    assert build.runtime_tag("a") != build.runtime_tag("b")
