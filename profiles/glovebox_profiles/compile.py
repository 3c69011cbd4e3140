"""From a profile to the driver-neutral spec of its sandbox. Pure: looks at nothing but its arguments."""

from pathlib import Path

from glovebox_profiles.model import Profile
from glovebox_sandboxes.contract.spec import ORIGINAL, WORKSPACE, Limits, Mount, SandboxSpec


def to_spec(profile: Profile, *, workspace: Path | None) -> SandboxSpec:
    """Return what a driver has to enforce for one call under ``profile``.

    Args:
        profile: The profile in force for this call.
        workspace: Absolute host directory that the operator serves; None when there is none, and then nothing is
            mounted whatever the profile says. No part of a profile or call can name another.

    Raises:
        ValueError: The workspace is not an absolute path without ``..``.
    """
    overlay = workspace is not None and profile.files.workspace == "overlay"
    mounts: tuple[Mount, ...] = ()
    if workspace is not None and profile.files.workspace != "none":
        if not workspace.is_absolute() or ".." in workspace.parts:
            raise ValueError(f"The workspace must be an absolute path without '..', not {workspace}.")
        mounts = (Mount(source=str(workspace), target=ORIGINAL if overlay else WORKSPACE),)
    limits = profile.limits
    return SandboxSpec(
        limits=Limits(
            wall_seconds=limits.wall_seconds,
            cpu_seconds=limits.cpu_seconds,
            memory_bytes=limits.memory,
            pids=limits.pids,
            processors=limits.processors,
            scratch_bytes=limits.scratch,
            output_bytes=limits.output.bytes,
            output_files=limits.output.files,
            stream_bytes=limits.stream,
            workspace_bytes=limits.workspace.bytes,
            workspace_files=limits.workspace.files,
        ),
        mounts=mounts,
        overlay=overlay,
        network=profile.network.mode,
        output=profile.files.output,
        inputs=profile.files.inputs,
        environment=profile.python.environment,
        preload=profile.python.preload,
        require_cgroup=limits.enforce == "cgroup",
    )
