"""What the docker driver asks the Engine for: exactly this, and nothing that could open the host."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.specs import LIMITS
from tests.fixtures.specs import SPEC as BARE

from glovebox_sandboxes.contract.base import Mount, Plan, SandboxSpec
from glovebox_sandboxes.contract.errors import UnsupportedSpecError
from glovebox_sandboxes.drivers.docker.plan import Host, check_closed, make
from glovebox_sandboxes.runtime import guest_tree

GOLDEN = Path(__file__).parent / "golden" / "docker_plan.json"
SECCOMP = {"defaultAction": "SCMP_ACT_ERRNO", "syscalls": []}
IMAGE = "sha256:" + "ab" * 32
HOST = Host(image=IMAGE, image_environment=("PATH", "LD_PRELOAD", "PYTHONSTARTUP"))
SPEC = replace(BARE, preload=("json",), labels=(("profile", "run_python"),))


def plan(spec: SandboxSpec = SPEC) -> Plan:
    return make(spec, HOST, SECCOMP)


def body(spec: SandboxSpec = SPEC, host: Host = HOST) -> dict[str, Any]:
    return copy.deepcopy(dict(make(spec, host, SECCOMP).action))


def test_the_body_is_exactly_the_golden_one() -> None:
    found = body()
    entrypoint, env = found.pop("Entrypoint"), found.pop("Env")
    assert found == json.loads(GOLDEN.read_text())
    # Shared with the other drivers, and so not repeated in this one's golden file.
    assert entrypoint[0] == "/usr/bin/python3"
    assert [entry for entry in env if "=" in entry] == [f"{k}={v}" for k, v in sorted(guest_tree.ENVIRONMENT.items())]


def test_another_spec_has_another_digest_and_another_environment_another_image() -> None:
    """By its digest; one that is not built is refused by name, and does not become another. The default is as ever."""
    assert make(SPEC, HOST, SECCOMP).digest == make(SPEC, HOST, SECCOMP).digest
    other = replace(SPEC, limits=replace(LIMITS, pids=65))
    assert make(other, HOST, SECCOMP).digest != make(SPEC, HOST, SECCOMP).digest
    assert make(SPEC, HOST, {**SECCOMP, "syscalls": [1]}).digest != make(SPEC, HOST, SECCOMP).digest
    image = "sha256:" + "cd" * 32
    host = replace(HOST, environments={"science": image})
    assert body(replace(SPEC, environment="science"), host)["Image"] == image
    assert body(SPEC, host)["Image"] == IMAGE
    with pytest.raises(
        UnsupportedSpecError, match=r"viz is not built here\. Run `glovebox setup --docker --environment viz`"
    ):
        make(replace(SPEC, environment="viz"), host, SECCOMP)


def test_variables_of_the_image_are_taken_away_or_replaced() -> None:
    """I3: an image's LD_PRELOAD is removed (a name without "="), its PATH replaced by ours."""
    env = body()["Env"]
    assert "LD_PRELOAD" in env
    assert "PYTHONSTARTUP" in env
    assert [entry for entry in env if entry.startswith("PATH")] == ["PATH=/usr/bin:/bin"]


def test_the_guest_must_find_what_the_body_asks_for_and_nothing_writable_besides() -> None:
    """What is to be measured follows from the plan; a user namespace is expected only where the Engine makes one."""
    least = make(replace(SPEC, output=False, inputs=False), HOST, SECCOMP)
    most = make(SPEC, HOST, SECCOMP)
    assert set(least.action["HostConfig"]["Tmpfs"]) == {"/tmp"}  # noqa: S108 - inside the sandbox
    assert set(most.expected.writable) - set(least.expected.writable) == {"/output", "/input"}
    expected = make(SPEC, HOST, SECCOMP).expected
    assert expected.mounts == ("/", "/etc/hostname", "/workspace")
    assert "user" not in expected.namespaces
    assert "user" in make(SPEC, replace(HOST, user_namespace=True), SECCOMP).expected.namespaces


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("memory_bytes", 0),
        ("memory_bytes", -1),
        ("memory_bytes", 2**20),
        ("pids", 0),
        ("pids", -1),
        ("cpu_seconds", 0),
        ("scratch_bytes", 0),
        ("output_bytes", 0),
    ],
)
def test_a_limit_that_means_no_limit_is_refused(field: str, value: int) -> None:
    """I13: 0 and -1 are "unlimited" to the Engine and to tmpfs; the refusal names the field."""
    with pytest.raises(UnsupportedSpecError) as refusal:
        make(replace(SPEC, limits=replace(LIMITS, **{field: value})), HOST, SECCOMP)
    assert refusal.value.what == f"limits.{field}"
    assert "no limit" in refusal.value.reason


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("/var/run/docker.sock", "/var/run"),
        ("/run", "/run"),
        ("/var", "/var/lib/containerd"),
        ("/", "/boot"),
        ("/proc/1/root", "/proc"),
        ("/dev/dri", "/dev"),
        ("/sys", "/sys"),
        ("/etc", "/etc"),
        ("/var/lib/docker/overlay2", "/var/lib/docker"),
        ("/srv/engine", "/srv/engine/docker.sock"),
    ],
)
def test_a_mount_that_opens_the_host_is_refused(source: str, shown: str) -> None:
    """I1: the Engine's socket (wherever it is), devices, kernel interfaces, and directories that hold them."""
    spec = replace(SPEC, mounts=(Mount(source=source, target="/workspace"),))
    with pytest.raises(UnsupportedSpecError) as refusal:
        make(spec, replace(HOST, socket="/srv/engine/docker.sock"), SECCOMP)
    assert refusal.value.what == "mounts.source"
    assert f"the host's {shown}" in refusal.value.reason


@pytest.mark.parametrize("source", ["/home/someone", "/srv/data", "/var/lib/jenkins/project", "/runner/work", "/devel"])
def test_an_ordinary_directory_is_mounted(source: str) -> None:
    """Control: directories of users, also those whose names only begin like a refused one's."""
    mounts = body(replace(SPEC, mounts=(Mount(source=source, target="/workspace"),)))["HostConfig"]["Mounts"]
    assert [(mount["Source"], mount["ReadOnly"]) for mount in mounts] == [(source, True)]


@pytest.mark.parametrize(
    ("source", "target", "field"),
    [
        ("relative", "/workspace", "mounts.source"),
        ("/home/../run", "/workspace", "mounts.source"),
        ("/home/a\0b", "/workspace", "mounts.source"),
        ("/home/a", "/workspace/", "mounts.target"),
        ("/home/a", "/usr", "mounts.target"),
        ("/home/a", "/guest", "mounts.target"),
    ],
)
def test_an_unclear_path_is_refused(source: str, target: str, field: str) -> None:
    """Only plain absolute paths, and only the workspace's place: nothing of the image can be covered."""
    with pytest.raises(UnsupportedSpecError) as refusal:
        make(replace(SPEC, mounts=(Mount(source=source, target=target),)), HOST, SECCOMP)
    assert refusal.value.what == field


def test_two_mounts_cannot_share_a_target() -> None:
    """The second would cover the first."""
    mounts = (Mount(source="/home/a", target="/workspace"), Mount(source="/home/b", target="/workspace"))
    with pytest.raises(UnsupportedSpecError, match="same target"):
        make(replace(SPEC, mounts=mounts), HOST, SECCOMP)


Change = Callable[[dict[str, Any], dict[str, Any]], object]
OPENINGS: dict[str, Change] = {
    "Privileged": lambda _, host: host.update(Privileged=True),
    "CapAdd": lambda _, host: host.update(CapAdd=["SYS_ADMIN"]),
    "CapDrop": lambda _, host: host.update(CapDrop=[]),
    "Devices": lambda _, host: host.update(Devices=[{"PathOnHost": "/dev/kvm"}]),
    "DeviceRequests": lambda _, host: host.update(DeviceRequests=[{"Driver": "nvidia"}]),
    "NetworkMode": lambda _, host: host.update(NetworkMode="host"),
    "NetworkDisabled": lambda body, _: body.update(NetworkDisabled=False),
    "PidMode": lambda _, host: host.update(PidMode="host"),
    "IpcMode": lambda _, host: host.update(IpcMode="host"),
    "CgroupnsMode": lambda _, host: host.update(CgroupnsMode="host"),
    "UsernsMode": lambda _, host: host.update(UsernsMode="host"),
    "Binds": lambda _, host: host.update(Binds=["/var/run/docker.sock:/docker.sock"]),
    "Volumes": lambda body, _: body.update(Volumes={"/data": {}}),
    "Mounts writable": lambda _, host: host["Mounts"][0].update(ReadOnly=False),
    "Mounts volume": lambda _, host: host["Mounts"][0].update(Type="volume"),
    "no-new-privileges": lambda _, host: host["SecurityOpt"].remove("no-new-privileges"),
    "seccomp": lambda _, host: host.update(SecurityOpt=["no-new-privileges", "seccomp=unconfined"]),
    "apparmor": lambda _, host: host["SecurityOpt"].append("apparmor=unconfined"),
    "ReadonlyRootfs": lambda _, host: host.update(ReadonlyRootfs=False),
    "User": lambda body, _: body.update(User=""),
    "Image": lambda body, _: body.update(Image="python:latest"),
}


@pytest.mark.parametrize("name", OPENINGS)
def test_a_body_that_opens_the_host_does_not_pass_the_last_look(name: str) -> None:
    """I1: whatever made the body, the look just before it is used refuses each opening by its field."""
    opened = body()
    OPENINGS[name](opened, opened["HostConfig"])
    with pytest.raises(UnsupportedSpecError, match="open the host") as refusal:
        check_closed(opened)
    assert refusal.value.what.startswith("plan.")


def test_the_body_itself_passes_the_last_look_and_a_plan_changed_in_place_does_not() -> None:
    """Control for the look; the lists of a plan are its own, not those that it is compared with."""
    action = make(SPEC, HOST, SECCOMP).action
    action["HostConfig"]["CapAdd"].append("SYS_ADMIN")
    with pytest.raises(UnsupportedSpecError, match="CapAdd"):
        check_closed(action)
    check_closed(make(SPEC, HOST, SECCOMP).action)
    check_closed(body())


def test_with_gvisors_runtime_containers_have_a_kernel_of_their_own() -> None:
    """The same container but for its runtime, its removal, the filters, and room for the threads of gVisor's kernel."""
    plan = make(SPEC, replace(HOST, runtime="runsc"), SECCOMP)
    assert (plan.driver, plan.level, plan.expected.system) == ("gvisor", "userspace-kernel", "gvisor")
    assert plan.expected.landlock is False
    assert plan.rlimits == ("pids",)
    other, usual = copy.deepcopy(dict(plan.action)), body()
    told = json.loads(other.pop("Entrypoint")[-1])
    assert told["landlock"] is False
    assert len(told["filter"]) > len(told["program_filter"]) > 0
    usual.pop("Entrypoint")
    assert other["HostConfig"].pop("Runtime") == "runsc"
    assert usual["HostConfig"].pop("Runtime") == "runc"
    # The cause of its end is told late, and only of what is still there.
    assert (other["HostConfig"].pop("AutoRemove"), usual["HostConfig"].pop("AutoRemove")) == (False, True)
    assert other["HostConfig"].pop("PidsLimit") > usual["HostConfig"].pop("PidsLimit") == LIMITS.pids
    assert other == usual
    assert make(SPEC, HOST, SECCOMP).expected.system == "linux"
