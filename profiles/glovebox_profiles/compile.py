"""The profiles in effect, and the driver-neutral sandbox spec of one of them. Pure."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from glovebox_profiles.model import Profile, digest, digest_of
from glovebox_sandboxes.contract.base import ORIGINAL, WORKSPACE, Limits, Mount, SandboxSpec

CHANGES = "propose_changes"
"""The one tool that changes files of the host: the server does so after an approval, not the sandbox."""


class ProfileSet(Mapping[str, Profile]):
    """All profiles in effect, by tool name; immutable."""

    def __init__(self, profiles: Mapping[str, Profile], sources: Mapping[str, Path]) -> None:
        self.by_tool = MappingProxyType({tool: profiles[tool] for tool in sorted(profiles)})
        self.digests = MappingProxyType({tool: digest(profile) for tool, profile in self.by_tool.items()})
        """Of each tool's profile, computed once at load."""
        self._sources = dict(sources)
        self.digest = digest_of(self.digests)
        """``sha256:…`` over the digests of all profiles."""

    def __getitem__(self, tool: str) -> Profile:
        return self.by_tool[tool]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_tool)

    def __len__(self) -> int:
        return len(self.by_tool)

    def source(self, tool: str) -> Path:
        """Return the file of one tool's profile: for the operator, never for a client."""
        return self._sources[tool]

    def with_narrower(self, profiles: Mapping[str, Profile]) -> "ProfileSet":
        """Return other profiles of the same files: those of a role, which narrows them and may omit some."""
        return ProfileSet(profiles, self._sources)


def to_spec(profile: Profile, *, workspace: Path | None) -> SandboxSpec:
    """Return what a driver has to enforce for one call under ``profile``.

    Args:
        profile: in effect for this call.
        workspace: Absolute host directory that the operator serves. With None nothing is mounted, whatever the profile
            says. No part of a profile or call can name another.

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
