"""Whatever goes wrong with the Engine becomes SandboxError, with what was attempted and what helps."""

import socket
from pathlib import Path

import anyio
import docker.errors
import pytest
import requests
from tests.unit.test_docker_plan import SPEC

from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.drivers.docker.driver import DockerDriver
from glovebox_sandboxes.drivers.docker.engine import Engine, translated


def response(status: int) -> requests.Response:
    """An answer of the Engine with this status."""
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
        """It has ended."""
        return {"StatusCode": self.code}

    def inspect_container(self, _name: str) -> dict[str, object]:
        """Its state, as long as it is there."""
        if self.removed:
            raise docker.errors.NotFound("x", response(404), "No such container")
        return {"State": {"ExitCode": self.code, "OOMKilled": self.told}}

    def events(self, *, filters: dict[str, list[str]], **_options: object) -> list[dict[str, str]]:
        """What happened to it, as far as the Engine has heard."""
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
