"""Podman, Podman without root and Docker without root: the docker driver with another engine behind it.

All attempts and system calls of the suite, and of its programs those that show what another engine could do otherwise:
limits, places to write, ends. All the rest runs there by ``glovebox doctor --prove --driver docker``.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.fixtures import engines
from tests.fixtures.docker_sandboxes import TIMEOUT_SECONDS, program, python, read_all, sandboxes, spec
from tests.must_run import unusable

from glovebox_sandboxes.conformance import host as hosts
from glovebox_sandboxes.conformance import prove, trial
from glovebox_sandboxes.conformance.case import load
from glovebox_sandboxes.contract.errors import SandboxError, UnsupportedSpecError
from glovebox_sandboxes.drivers.docker import podman
from glovebox_sandboxes.drivers.docker.driver import DockerDriver
from glovebox_sandboxes.session import connection

#: The first test of each engine waits for the import of the image, 115 MiB without its packages.
pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parent.parent.parent
CASES = {case.id: case for case in load()}
PROGRAMS = (
    "fork-bomb", "scratch-full", "output-files-come-out", "overlay-writes-stay-inside", "kill-everything", "orphans",
)  # fmt: skip
PODMAN = ("podman", "podman-rootless")


@pytest.fixture(scope="session")
def image() -> Iterator[Path]:
    """The image as a file, once for all engines."""
    try:
        with engines.saved_image() as file:
            yield file
    except engines.UnavailableError as problem:
        unusable("podman", str(problem))


@pytest.fixture(scope="session", params=["podman", "podman-rootless", "docker-rootless"])
def started(request: pytest.FixtureRequest, image: Path) -> Iterator[engines.Engine]:
    """Each engine in turn; nothing of it is left."""
    name: str = request.param
    try:
        with engines.running(name, image) as engine:
            yield engine
    except engines.UnavailableError as problem:
        unusable("podman" if name == "podman" else "rootless", str(problem))
    assert engines.processes(engine.place) == []
    assert engines.mounts(engine.place) == []
    assert not engine.place.exists()


@pytest.fixture
def engine(started: engines.Engine, monkeypatch: pytest.MonkeyPatch) -> engines.Engine:
    """The engine, and the environment in which the driver finds it."""
    monkeypatch.setenv("DOCKER_HOST", started.host)
    return started


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory that other users may look into, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="gb-engine-") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


def names(driver: DockerDriver) -> tuple[str, ...]:
    """What the driver is called in the cases' gaps."""
    return prove.gap_names(driver.capabilities)


def failed(found: list[prove.CaseFinding]) -> dict[str, tuple[str, ...]]:
    """What was not as it must be, gaps that have closed among it."""
    return {each.id: each.seen or (each.reason,) for each in found if each.status in ("failed", "closed")}


async def test_what_is_measured_is_what_was_planned(engine: engines.Engine) -> None:
    """Every field from inside and from outside, limits among them where there are control groups."""
    async with hosts.planted() as planted, DockerDriver.connect() as driver:
        plan = driver.plan(spec(planted.workspace))
        async with driver.open(plan) as sandbox:
            attestation = (await connection.attest(sandbox, plan)).attestation
    rows = {row["field"]: row for row in attestation.rows}
    assert {row["verdict"] for row in rows.values()} == {"ok"}
    assert "outside" in rows["namespaces"]
    assert {"limit memory", "limit pids", "limit cpu"} <= set(rows) or engine.rootless
    assert ("Podman" in driver.capabilities.version) == (engine.name in PODMAN)


async def test_attempts_are_refused(engine: engines.Engine) -> None:
    """All of them, by the same guards as with the Docker Engine."""
    async with hosts.planted() as planted, DockerDriver.connect() as driver:
        attempts = [case for case in CASES.values() if case.attempt is not None]
        verdicts = await trial.judge_attempts(driver, attempts, planted)
        found = [prove.judged(each.case, each.problems, names(driver), 0) for each in verdicts]
    assert len(found) > 50
    assert failed(found) == {}


async def test_system_calls_are_refused(engine: engines.Engine) -> None:
    """The filter is ours, whole, though Podman takes it as a file: each refusal, and its allowed neighbour."""
    async with hosts.planted() as planted, DockerDriver.connect() as driver:
        found = await prove.system_calls(driver, planted)
    assert len(found) > 100
    assert failed(found) == {}


@pytest.mark.parametrize("case", PROGRAMS)
async def test_programs_end_as_they_must(engine: engines.Engine, case: str) -> None:
    """The call ends with the right word, the host is unchanged, and nothing is left."""
    async with hosts.planted() as planted, DockerDriver.connect() as driver:
        verdict = await trial.judge(driver, CASES[case], planted)
        found = prove.judged(verdict.case, verdict.problems, names(driver), 0)
    assert failed([found]) == {}
    assert driver.leaked == {}


async def test_limits_are_said_to_hold_as_they_do(engine: engines.Engine) -> None:
    """Without control groups: by rlimit, said as missing, and refused to a profile that asks for more. Else neither."""
    async with DockerDriver.connect() as driver:
        strict = replace(spec(), require_cgroup=True)
        said = {each.what for each in driver.capabilities.missing}
        grouped = driver.capabilities.limits["memory_bytes"].startswith("cgroup")
        assert grouped or engine.rootless, "root may always make control groups"
        if grouped:
            assert "Memory" in driver.plan(strict).action["HostConfig"]
            assert not said
        else:
            assert said == {"no control groups: limits hold per process"}
            assert driver.plan(spec()).rlimits == ("memory_bytes", "pids")
            assert not {"Memory", "PidsLimit", "NanoCpus"} & set(driver.plan(spec()).action["HostConfig"])
            with pytest.raises(UnsupportedSpecError, match=r"limits\.enforce.*no control groups"):
                driver.plan(strict)


# Shown once for Podman; for the Engine's own words in tests/escape/test_docker_isolation.py.
@pytest.mark.engines("podman")
@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"seccomp_profile_path": "unconfined"}, "seccomp"),
        ({"no_new_privileges": False, "seccomp_profile_path": "unconfined"}, "no_new_privs"),
        ({"cgroupns": {"nsmode": "host"}}, "namespaces shared with the host"),
        ({"netns": {"nsmode": "host"}}, "interfaces"),
        ({"read_only_filesystem": False}, "writable mounts beyond the plan"),
        ({"use_image_hosts": False}, "mounts of host files"),
        ({"cap_drop": [], "cap_add": ["NET_RAW"]}, "capabilities"),
    ],
)
async def test_a_weaker_container_of_podmans_is_noticed(
    engine: engines.Engine, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], difference: str
) -> None:
    """Control for the measurement: Podman made something weaker than planned. Its own defaults are among these."""
    original = podman.specification
    monkeypatch.setattr(podman, "specification", lambda *asked: {**original(*asked), **change})
    async with DockerDriver.connect() as driver:
        plan = driver.plan(spec())
        async with driver.open(plan) as sandbox:
            attestation = (await connection.attest(sandbox, plan)).attestation
    assert difference in {each.field for each in attestation.differences}


@pytest.mark.engines("podman-rootless")  # no other warns
async def test_a_limit_that_podman_leaves_out_is_refused(
    engine: engines.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for a limit it cannot set, Podman makes the container without and warns: the call is refused."""
    original = podman.specification
    limited = {"resource_limits": {"memory": {"limit": 2**27}}}
    monkeypatch.setattr(podman, "specification", lambda *asked: {**original(*asked), **limited})
    async with DockerDriver.connect() as driver:
        if driver.capabilities.limits["memory_bytes"] != "rlimit":
            pytest.skip("this host lets it make control groups")
        with pytest.raises(SandboxError, match="Podman would not do all of it"):
            await program(driver, "print(1)")
    assert sandboxes(driver) == set()


async def test_kill_returns_when_every_process_is_gone(engine: engines.Engine) -> None:
    """Twice, and after it has ended by itself: none of these is an error."""
    async with DockerDriver.connect() as driver, python(driver, "import signal; signal.pause()") as sandbox:
        with anyio.fail_after(TIMEOUT_SECONDS):
            await sandbox.kill()
            await sandbox.kill()
            assert await read_all(sandbox) == ""
    assert sandboxes(driver) == set()
    assert driver.leaked == {}


@pytest.mark.parametrize("state", ["running", "created"])
async def test_a_killed_server_leaves_nothing(engine: engines.Engine, scratch: Path, state: str) -> None:
    """SIGKILL: no container, and no file with a filter."""
    command = [sys.executable, "-m", "tests.fixtures.docker_victim", state]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(scratch)}
    async with await anyio.open_process(command, cwd=ROOT, env=environment, stderr=None) as process:
        if process.stdout is None:
            raise TypeError("a process without a pipe")
        with anyio.fail_after(TIMEOUT_SECONDS):
            await process.stdout.receive()
        assert bool(list(scratch.iterdir())) == (engine.name in PODMAN)
        process.kill()
        await process.wait()
    with anyio.fail_after(TIMEOUT_SECONDS):
        while sandboxes() or list(scratch.iterdir()):  # noqa: ASYNC110 - nothing tells of either
            await anyio.sleep(0.05)
