"""What the gvisor driver runs: exactly this, with a wall around gVisor's kernel that holds nothing of the host's."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.specs import LIMITS, SPEC

from glovebox_sandboxes.contract.base import DEFAULT, Missing, Plan, SandboxSpec
from glovebox_sandboxes.contract.errors import UnsupportedSpecError
from glovebox_sandboxes.drivers.gvisor.driver import Gvisor, config_file, version_of
from glovebox_sandboxes.host.cgroup import Hierarchy
from glovebox_sandboxes.runtime import guest_tree
from glovebox_sandboxes.runtime.runtime import Runtime

GOLDEN = Path(__file__).parent / "golden" / "gvisor_plan.json"
ROOT, GUEST = Path("/data/root"), Path("/data/guest")
RUNTIME = Runtime(root=ROOT, guest=GUEST, python="/usr/bin/python3", version="3.11.2", digest="sha256:0")


def driver(*, version: int | None = 1, missing: tuple[Missing, ...] = (), runtime: Runtime | None = RUNTIME) -> Gvisor:
    """A driver of an imagined host; nothing of it is started."""
    hierarchy = Hierarchy(version=version, parents=(Path("/groups"),)) if version else None
    programs, runtimes = ("/usr/bin/bwrap", "/usr/bin/runsc"), {DEFAULT: runtime} if runtime else {}
    return Gvisor(programs, "20240729.0", runtimes, hierarchy, missing)


def plan(spec: SandboxSpec = SPEC, *, version: int | None = 1) -> Plan:
    return driver(version=version).plan(spec)


def config(spec: SandboxSpec = SPEC) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(config_file(plan(spec)))
    return found


def test_the_plan_is_exactly_the_golden_one() -> None:
    found = json.loads(json.dumps(plan().action))
    process = found["config"]["process"]
    arguments, environment = process.pop("args"), process.pop("env")
    # Of the policy's content, which changes with it.
    found.pop("seccomp")
    assert found == json.loads(GOLDEN.read_text())
    # Shared with the other drivers, and so not repeated in this one's golden file.
    assert arguments[:-1] == list(guest_tree.command("/usr/bin/python3", SPEC, hidden=(), elsewhere={})[:-1])
    assert environment == [f"{name}={value}" for name, value in sorted(guest_tree.ENVIRONMENT.items())]


def test_the_same_spec_gives_the_same_digest_and_another_spec_another() -> None:
    assert plan().digest == plan().digest
    assert plan(replace(SPEC, limits=replace(LIMITS, pids=65))).digest != plan().digest


def test_what_a_spec_does_not_grant_is_not_there() -> None:
    """No output, no inputs, no workspace: none of them is mounted, inside or behind the wall."""
    bare = replace(SPEC, mounts=(), output=False, inputs=False)
    assert [mount["destination"] for mount in config(bare)["mounts"]] == [
        "/proc", "/sys", "/dev", "/guest", "/dev/shm", "/tmp",  # noqa: S108 - inside the sandbox
    ]  # fmt: skip
    assert not [part for part in plan(bare).action["argv"] if "/mounts/" in part or "mount0" in part]
    assert plan(bare).expected.mounts == ("/", "/guest")


def test_files_of_the_host_are_read_only_and_everything_else_has_a_size() -> None:
    for mount in config()["mounts"]:
        options = mount.get("options", ())
        if mount["type"] == "bind":
            assert "ro" in options
        elif mount["destination"] not in ("/proc", "/sys", "/dev"):
            assert [option for option in options if option.startswith("size=")]
    assert config()["root"]["readonly"] is True
    argv = plan().action["argv"]
    assert "--bind" not in argv
    assert "--dev-bind" not in argv


def test_the_guest_gets_both_filters_and_no_landlock_and_measures_gvisors_kernel() -> None:
    """Signals are kept off otherwise; no other gap is there than the two that this kernel is known for."""
    told = json.loads(config()["process"]["args"][-1])
    assert told["landlock"] is False
    assert plan().expected.landlock is False
    assert len(told["filter"]) > len(told["program_filter"]) > 0
    expected = plan().expected
    assert (expected.system, expected.unmeasured) == ("gvisor", ("CapAmb", "namespace cgroup"))


def test_limits_hold_outside_for_all_and_inside_for_what_only_its_kernel_counts() -> None:
    """Memory is the group's, gVisor's own included; the program's processes are counted where they are."""
    assert plan().action["cgroup"]["memory.limit_in_bytes"] == str(LIMITS.memory_bytes)
    assert int(plan().action["cgroup"]["pids.max"]) > LIMITS.pids
    assert plan().rlimits == ("pids",)
    assert plan(version=None).rlimits == ("memory_bytes", "pids")
    assert plan(version=None).action["cgroup"] == {}
    assert plan(version=2).action["argv"] == plan(version=1).action["argv"]
    assert plan(version=2).action["cgroup"] != plan(version=1).action["cgroup"]


def test_what_cannot_be_enforced_is_refused_with_the_field() -> None:
    """Too little memory for gVisor itself; groups demanded where there are none; something missing on the host."""
    little = replace(SPEC, limits=replace(LIMITS, memory_bytes=2**20))
    with pytest.raises(UnsupportedSpecError, match=r"limits\.memory_bytes: 1048576 is less"):
        plan(little)
    with pytest.raises(UnsupportedSpecError, match=r"limits\.enforce"):
        plan(replace(SPEC, require_cgroup=True), version=None)
    absent = Missing(what="runsc is not installed", fix="Install it.", fatal=True)
    with pytest.raises(UnsupportedSpecError, match=r"runsc is not installed\. Install it\."):
        driver(missing=(absent,)).plan(SPEC)
    with pytest.raises(UnsupportedSpecError, match="there is no runtime"):
        driver(runtime=None).plan(SPEC)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("runsc version 0.0~20240729.0\nspec: 1.2.0", "0.0~20240729.0"),
        ("runsc version release-20250407.0\nspec: 1.1.0-rc.1", "release-20250407.0"),
        ("runsc version release-20240101.0\nspec: 1.1.0", ""),
        ("runsc version VERSION_MISSING", ""),
        ("", ""),
    ],
)
def test_a_version_is_read_or_not_taken(words: str, found: str) -> None:
    """Debian's form and gVisor's own; one that is older than what was tried, or says none, is not used."""
    assert version_of(words) == found
