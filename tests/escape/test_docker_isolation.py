"""A container is what was planned, or it is noticed; what cases of conformance do not ask of it (E15, F2, F8, I13)."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.docker_sandboxes import MIB, instead_of_guest, program, python, read_all, spec

from glovebox_sandboxes.contract.base import Mount, Plan
from glovebox_sandboxes.contract.errors import SandboxError, UnsupportedSpecError
from glovebox_sandboxes.drivers.docker import plan as plans
from glovebox_sandboxes.drivers.docker.driver import DockerDriver
from glovebox_sandboxes.session import connection

pytestmark = pytest.mark.driver("docker")


async def finds(code: str, plan: Plan | None = None) -> Any:
    """What a program in a container prints, as JSON."""
    async with DockerDriver.connect() as driver, python(driver, code, plan) as sandbox:
        printed = await read_all(sandbox)
        assert printed, (await sandbox.stats()).detail
        return json.loads(printed)


@asynccontextmanager
async def planned(**changes: int) -> AsyncIterator[tuple[DockerDriver, Plan]]:
    """A driver and the plan for small limits with some of them changed."""
    async with DockerDriver.connect() as driver:
        yield driver, driver.plan(spec(None, **changes))


async def test_what_is_measured_inside_is_what_was_planned(tmp_path: Path) -> None:
    """Declared and effective isolation agree on this host, with a workspace, outputs and inputs."""
    tmp_path.chmod(0o755)
    async with DockerDriver.connect() as driver:
        outcome, _, differences = await program(driver, "print(1)", driver.plan(spec(tmp_path)))
    assert differences == ()
    assert (outcome.ended, outcome.stdout.text) == ("exited", "1\n")


@pytest.mark.parametrize(
    ("field", "value", "difference"),
    [
        ("SecurityOpt", ["seccomp=unconfined"], "seccomp"),
        ("SecurityOpt", ["seccomp=unconfined"], "no_new_privs"),
        ("CapDrop", [], "capabilities"),
        ("NetworkMode", "host", "interfaces"),
        ("IpcMode", "host", "namespaces shared with the host"),
        ("ReadonlyRootfs", False, "writable mounts beyond the plan"),
        ("Binds", ["/usr/share:/mnt:ro"], "mounts of host files"),
        ("Binds", ["/var/run:/var/run:ro"], "paths that must not exist"),
    ],
)
async def test_a_weaker_container_is_noticed(
    monkeypatch: pytest.MonkeyPatch, field: str, value: object, difference: str
) -> None:
    """Control for the measurement (E15): the Engine made something weaker than planned, and the guest finds it."""
    monkeypatch.setattr(plans, "check_closed", lambda _: None)
    async with planned() as (driver, plan):
        host = {**plan.action["HostConfig"], field: value}
        weaker = replace(plan, action={**plan.action, "HostConfig": host, "NetworkDisabled": field != "NetworkMode"})
        async with driver.open(weaker) as sandbox:
            attestation = (await connection.attest(sandbox, weaker)).attestation
    assert difference in {each.field for each in attestation.differences}


@pytest.mark.parametrize(
    ("field", "value", "difference"),
    [("PidsLimit", 500, "limit pids"), ("Memory", 256 * MIB, "limit memory"), ("NanoCpus", 10**8, "limit cpu")],
)
async def test_a_limit_that_the_engine_did_not_set_is_noticed(field: str, value: int, difference: str) -> None:
    """The guest cannot know; the host reads the container's control group. Control: without the change, nothing."""
    async with planned() as (driver, plan):
        host = {**plan.action["HostConfig"], field: value, "MemorySwap": 256 * MIB}
        for changed, expected in ((host, {difference}), (plan.action["HostConfig"], set())):
            other = replace(plan, action={**plan.action, "HostConfig": changed})
            async with driver.open(other) as sandbox:
                sandbox.action = plan.action
                attestation = (await connection.attest(sandbox, plan)).attestation
            assert {each.field for each in attestation.differences} == expected


async def test_a_container_among_the_hosts_processes_does_not_even_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """E15: the guest, which is to be process 1 of its own, finds that it is not, and ends before it measures."""
    monkeypatch.setattr(plans, "check_closed", lambda _: None)
    async with planned() as (driver, plan):
        weaker = replace(plan, action={**plan.action, "HostConfig": {**plan.action["HostConfig"], "PidMode": "host"}})
        async with driver.open(weaker) as sandbox:
            with pytest.raises(SandboxError, match="process 1"):
                await connection.attest(sandbox, weaker)


HARDENED = """
import json, os, signal
def first(path):
    try:
        return open(path, "rb").read(1)
    except OSError:
        return b""
children = 0
try:
    while children < 200:
        if os.fork() == 0:
            signal.pause()
        children += 1
except BlockingIOError:
    pass
print(json.dumps({
    "devices": sorted(os.listdir("/dev")),
    "told": [p for p in ("keys", "timer_list", "interrupts") if first(f"/proc/{p}")] + os.listdir("/sys/firmware"),
    "setuid": [os.path.join(d, f) for top in ("/usr", "/opt", "/etc") for d, _, fs in os.walk(top) for f in fs
               if os.lstat(os.path.join(d, f)).st_mode & 0o6000],
    "children": children,
}))"""


@pytest.mark.parametrize(("pids", "children"), [(32, 31), (300, 200)])
async def test_a_container_has_the_usual_devices_no_set_user_id_program_and_as_many_processes_as_planned(
    pids: int, children: int
) -> None:
    """I1, I10, I12: process 1 counts; the kernel's masked files say nothing. Control: with 300 allowed, 200 start."""
    async with planned(pids=pids) as (_, plan):
        found = await finds(HARDENED, plan)
    devices = "fd full mqueue null ptmx pts random shm stderr stdin stdout tty urandom zero"
    assert found == {"devices": devices.split(), "told": [], "setuid": [], "children": children}


async def test_a_link_into_the_host_is_not_a_workspace(tmp_path: Path) -> None:
    """F2: where the link leads counts, at the moment of use; control: a link to an ordinary directory is fine."""
    link = tmp_path / "project"
    async with DockerDriver.connect() as driver:
        plan = driver.plan(replace(spec(), mounts=(Mount(source=str(link), target="/workspace"),)))
        link.symlink_to("/var/run")
        with pytest.raises(UnsupportedSpecError, match="would show the sandbox the host's /run"):
            async with driver.open(plan):
                pytest.fail("opened")
        link.unlink()
        (tmp_path / "real").mkdir()
        link.symlink_to(tmp_path / "real")
        async with driver.open(plan):
            pass


FILL = """
import errno, json, os
def fill(path):
    total = 0
    try:
        with open(path, "wb", buffering=0) as file:
            while total < 64 << 20:
                total += file.write(bytes(1 << 20))
    except OSError as problem:
        os.unlink(path)
        return [errno.errorcode[problem.errno], total >> 20]
    return ["", total >> 20]
def many(folder):
    for number in range(100_000):
        try:
            os.close(os.open(f"{folder}/{number}", os.O_CREAT | os.O_WRONLY))
        except OSError as problem:
            return [errno.errorcode[problem.errno], number < 2100]
print(json.dumps([fill("/tmp/x"), fill("/output/x"), fill("/dev/shm/x"), many("/tmp"), many("/output")]))
"""


async def test_scratch_output_and_shared_memory_have_an_end() -> None:
    """F8: bytes and files are bounded in every place a program can write; control: up to the bound they are there."""
    assert await finds(FILL) == [["ENOSPC", 8], ["ENOSPC", 4], ["ENOSPC", 1], ["ENOSPC", True], ["ENOSPC", True]]


async def test_an_exhausted_guest_is_told_from_a_crashed_one() -> None:
    """When process 1 itself is killed for memory the Engine tells so; control: exit status 137 alone is not it."""
    async with DockerDriver.connect() as driver:
        async with python(driver, "block = bytearray(2**29)\nblock[::4096] = bytes(2**17)") as sandbox:
            await read_all(sandbox)
            assert (await sandbox.stats()).out_of_memory
        async with python(driver, "import os; os._exit(137)") as sandbox:
            await read_all(sandbox)
            assert not (await sandbox.stats()).out_of_memory


async def test_last_words_are_kept_and_bounded() -> None:
    """What process 1 says on standard error is for the operator: its end, at most 2,000 characters."""
    code = "import sys; sys.stderr.write('x' * 1_000_000 + 'the end'); sys.stderr.flush()"
    async with DockerDriver.connect() as driver, python(driver, code) as sandbox:
        assert await read_all(sandbox) == ""
        detail = (await sandbox.stats()).detail
    assert detail.endswith("the end")
    assert len(detail) == 2000


async def test_bytes_pass_both_ways_unchanged() -> None:
    """Eight MiB there and back, with standard error in between: the channel is clean in every direction."""
    size = 8 * MIB
    code = (
        "import os, sys\n"
        "left = int(sys.argv[1])\n"
        "while left:\n"
        "    data = os.read(0, 65536)\n"
        "    left -= len(data)\n"
        "    os.write(2, b'noise')\n"
        "    while data: data = data[os.write(1, data):]\n"
    )
    sent = bytes(range(256)) * (size // 256)
    received = bytearray()
    async with DockerDriver.connect() as driver:
        plan = instead_of_guest(driver.plan(spec()), ["/usr/bin/python3", "-I", "-c", code, str(size)])
        async with driver.open(plan) as sandbox:
            for at in range(0, size, MIB):
                await sandbox.channel.send(sent[at : at + MIB])
                while len(received) < at + MIB:
                    received += await sandbox.channel.receive(100_000)
    assert received == sent
