"""A workspace that may be written, in each plan: the original read-only beside it, a tmpfs in its place."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.profile_texts import profile
from tests.unit.test_docker_plan import HOST, SECCOMP
from tests.unit.test_gvisor_plan import plan as gvisor_plan

from glovebox_profiles.compile import to_spec
from glovebox_sandboxes.contract.base import Plan
from glovebox_sandboxes.drivers.docker.plan import make

OVERLAY = '[files]\nworkspace = "overlay"\n[limits.workspace]\nbytes = "8 MiB"\nfiles = 100\n'
SPEC = to_spec(profile(OVERLAY), workspace=Path("/srv/project"))


def test_a_profile_with_an_overlay_mounts_the_workspace_out_of_the_way() -> None:
    """The one mount of the host is the original's; without a workspace there is nothing to copy."""
    assert [(mount.source, mount.target) for mount in SPEC.mounts] == [("/srv/project", "/guest/workspace")]
    assert SPEC.overlay
    assert (SPEC.limits.workspace_bytes, SPEC.limits.workspace_files) == (8 << 20, 100)
    assert not to_spec(profile(OVERLAY), workspace=None).overlay
    assert not to_spec(profile('[files]\nworkspace = "read"'), workspace=Path("/srv/project")).overlay


def test_docker_mounts_the_original_read_only_and_bounds_the_copy() -> None:
    """The tmpfs is of the profile's size; the guest must find both, the copy writable and the original not."""
    plan = make(SPEC, HOST, SECCOMP)
    host: dict[str, Any] = dict(plan.action["HostConfig"])
    assert [(each["Target"], each["ReadOnly"]) for each in host["Mounts"]] == [("/guest/workspace", True)]
    assert f"size={8 << 20}," in host["Tmpfs"]["/workspace"]
    _finds_both(plan)
    _finds_both(gvisor_plan(SPEC))


@pytest.mark.parametrize("overlay", [True, False])
def test_the_place_of_the_copy_is_writable_only_where_there_is_one(*, overlay: bool) -> None:
    """The control: the same spec without an overlay expects no writable workspace."""
    plan = make(replace(SPEC, overlay=overlay), HOST, SECCOMP)
    assert ("/workspace" in plan.expected.writable) == overlay


def _finds_both(plan: Plan) -> None:
    assert "/workspace" in plan.expected.writable
    assert "/guest/workspace" in plan.expected.mounts
    assert "/guest/workspace" not in plan.expected.writable
