"""I13, F8: what a program leaves lying in sockets is bounded, so it cannot take it from the host's own connections."""

import os
from contextlib import closing

import anyio
import pytest
from tests.fixtures import docker_sandboxes

from glovebox_sandboxes.conformance.case import LIMITS
from glovebox_sandboxes.drivers.docker import usage
from glovebox_sandboxes.drivers.docker.driver import DockerDriver
from glovebox_sandboxes.host import cgroup
from glovebox_sandboxes.host.process import Spawner
from glovebox_sandboxes.runtime.runtime import base_python

DATAGRAMS = """
import socket
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
receivers = []
for number in range(800):
    each = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    each.bind(("127.0.0.1", 0))
    receivers.append(each)
    for datagram in range(3):
        try:
            sender.sendto(b"x" * 60000, socket.MSG_DONTWAIT, each.getsockname())
        except OSError:
            break
held = 0
for each in receivers:
    try:
        while True:
            held += len(each.recv(65536, socket.MSG_DONTWAIT))
    except OSError:
        pass
print(held)
"""


async def _held(tasks: tuple[str, ...]) -> int:
    """Bytes that the program could leave unread, born in these control groups."""
    null = os.open(os.devnull, os.O_WRONLY)
    with closing(Spawner(tuple(f"/sys/fs/cgroup/{name}/tasks" for name in ("memory", "pids", "cpu")))) as spawner:
        argv = [str(base_python()), "-I", "-S", "-c", DATAGRAMS]
        process = await spawner.start(argv, stderr=null, descriptors=(), tasks=tasks)
        printed = b""
        with anyio.fail_after(30):
            while not printed.endswith(b"\n"):
                printed += await process.stream.receive()
            await process.wait()
        await process.stream.aclose()
    os.close(null)
    return int(printed)


async def test_what_lies_in_sockets_is_bounded_on_v1() -> None:
    """Control groups v1 count sockets apart from memory, and only where they have a limit; the control has none."""
    hierarchy = cgroup.detect(f"sockets{os.getpid()}")
    if hierarchy is None or hierarchy.version != 1:
        pytest.skip("there are no control groups v1 here; v2 counts sockets as memory")
    group = cgroup.Cgroup(hierarchy, "bounded", cgroup.settings(1, LIMITS))
    free = cgroup.Cgroup(hierarchy, "control", {"memory.limit_in_bytes": str(LIMITS.memory_bytes)})
    try:
        assert await _held(group.tasks) <= cgroup.SOCKET_BYTES
        assert await _held(free.tasks) > 2 * cgroup.SOCKET_BYTES
    finally:
        await group.remove()
        await free.remove()
        for parent in hierarchy.parents:
            parent.rmdir()


@pytest.mark.driver("docker")
async def test_what_lies_in_a_containers_sockets_is_bounded_on_v1(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Engine's runtime sets no such limit, so the driver does, before the program runs; the control has none."""
    hierarchy = cgroup.detect(f"sockets{os.getpid()}")
    for parent in hierarchy.parents if hierarchy else ():
        parent.rmdir()
    if hierarchy is None or hierarchy.version != 1:
        pytest.skip("there are no control groups v1 here; v2 counts sockets as memory")
    held = []
    async with DockerDriver.connect() as driver:
        for bounded in (True, False):
            if not bounded:
                monkeypatch.setattr(usage, "bound_sockets", lambda _: False)
            outcome, _, differences = await docker_sandboxes.program(driver, DATAGRAMS)
            assert not differences
            held.append(int(outcome.stdout.text))
    assert held[0] <= cgroup.SOCKET_BYTES
    assert held[1] > 2 * cgroup.SOCKET_BYTES
