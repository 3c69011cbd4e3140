"""What the bubblewrap driver runs: exactly this; and a start that is refused half-way is told, with nothing left."""

import errno
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fixtures.specs import SPEC
from tests.unit.test_gvisor_plan import RUNTIME

from glovebox_sandboxes.contract.base import DEFAULT, WORKSPACE, Limits, Mount, Plan, SandboxSpec
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.contract.measure import Expected
from glovebox_sandboxes.drivers.bubblewrap.driver import Bubblewrap
from glovebox_sandboxes.host import identity
from glovebox_sandboxes.host.cgroup import Cgroup, Hierarchy
from glovebox_sandboxes.runtime import guest_tree
from glovebox_sandboxes.runtime.runtime import Runtime

GOLDEN = Path(__file__).parent / "golden" / "bubblewrap_plan.json"


def plan(spec: SandboxSpec = SPEC) -> Plan:
    """The plan of an imagined host's driver; nothing of it is started."""
    hierarchy = Hierarchy(version=1, parents=(Path("/groups"),))
    return Bubblewrap(("/usr/bin/bwrap",), "0.8.0", {DEFAULT: RUNTIME}, hierarchy).plan(spec)


def test_the_plan_is_exactly_the_golden_one() -> None:
    found = json.loads(json.dumps(plan().action))
    # Of the policy's content, which changes with it; and of process 1, where it was built.
    found.pop("seccomp")
    assert found.pop("process_1") == guest_tree.process_1()[0]
    zygote = found.pop("zygote")
    argv = found["argv"]
    wall, inside = argv.index("--") + 1, argv[argv.index("--") + 1 :]
    found["argv"] = argv[:wall]
    assert found == json.loads(GOLDEN.read_text())
    # Shared with the other drivers, and so not repeated in this one's golden file.
    assert inside[:-1] == list(guest_tree.command("/usr/bin/python3", SPEC, hidden=(), elsewhere={})[:-1])
    # What forks sandboxes has less to write to, and nobody's data.
    assert {"/output", "/input"} & set(zygote[: zygote.index("--")]) == set()
    assert ("--info-fd" in zygote) == identity.has_users()
    assert "--disable-userns" not in zygote


SMALL = SandboxSpec(
    limits=Limits(
        wall_seconds=1,
        cpu_seconds=1,
        memory_bytes=2**26,
        pids=8,
        scratch_bytes=2**20,
        output_bytes=2**20,
        output_files=1,
        stream_bytes=1024,
    )
)


@pytest.mark.parametrize("place", ["os.memfd_create", "os.pidfd_open", "subprocess.Popen"])
async def test_a_refused_step_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Out of descriptors at one step or another: the broker's kind of failure, no group, no process, no descriptor."""

    def fail(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    groups = tmp_path / "groups"
    groups.mkdir()
    runtime = Runtime(root=tmp_path, guest=tmp_path, python="/python", version="3.11.2", digest="sha256:0")
    driver = Bubblewrap(("/bin/cat",), "0.8.0", {DEFAULT: runtime}, Hierarchy(version=2, parents=(groups,)))
    if place != "subprocess.Popen":
        driver._janitor.start()
    plan = driver.plan(SMALL)
    monkeypatch.setattr("glovebox_sandboxes.host.cgroup.Cgroup._set", lambda *_: None)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patch:
        patch.setattr(place, fail)
        with pytest.raises(SandboxError, match="Too many open files"):
            async with driver.open(plan):
                pytest.fail("it must not open")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert list(groups.iterdir()) == []
    async with driver.running():
        pass


async def test_a_workspace_with_mounts_inside_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """One sentence that names the first of them and what to do; `/` is the one everybody has."""
    runtime = Runtime(root=tmp_path, guest=tmp_path, python="/python", version="3.11.2", digest="sha256:0")
    driver = Bubblewrap(("/bin/cat",), "0.8.0", {DEFAULT: runtime}, None)
    with pytest.raises(SandboxError, match=r"mounted inside it, at dev.* more\. Serve a directory"):
        async with driver.open(driver.plan(replace(SMALL, mounts=(Mount(source="/", target=WORKSPACE),)))):
            pytest.fail("it must not open")
    plain = Mount(source=str(tmp_path), target=WORKSPACE)
    async with driver.open(driver.plan(replace(SMALL, mounts=(plain,)))):
        pass  # the control
    async with driver.running():
        pass


@pytest.mark.parametrize("refused", [False, True])
async def test_on_v2_nothing_runs_before_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, refused: bool
) -> None:
    """It waits as a shell; one that cannot be put into its group never becomes the program. The groups are made up."""

    def add(_: Cgroup, pid: int) -> None:
        until = time.monotonic() + 30
        while Path(f"/proc/{pid}/comm").read_text() != "sh\n":  # on its way there, by setpriv
            assert time.monotonic() < until, "it does not wait"
        if refused:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(Cgroup, "add", add)
    runtime = Runtime(root=tmp_path, guest=tmp_path, python="/python", version="3.11.2", digest="sha256:0")
    (tmp_path / "groups").mkdir()
    hierarchy = Hierarchy(version=2, parents=(tmp_path / "groups",))
    driver = Bubblewrap(("/bin/echo",), "0.8.0", {DEFAULT: runtime}, hierarchy)
    plan = Plan(
        driver="bubblewrap",
        level="namespaces",
        spec=SMALL,
        action={"argv": ["/bin/echo", "ran"], "cgroup": {}},
        expected=Expected(uid=0, interfaces=(), writable=(), mounts=(), namespaces=(), hidden=()),
    )
    if refused:
        with pytest.raises(SandboxError, match="Device or resource busy"):
            async with driver._start(plan, {}):
                pytest.fail("it must not open")
    else:
        async with driver._start(plan, {}) as sandbox:
            assert await sandbox.channel.receive() == b"ran\n"
    assert list((tmp_path / "groups").iterdir()) == []
    async with driver.running():
        pass
