"""The profiles in effect, and the driver-neutral sandbox spec of one of them. Pure."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from glovebox_profiles import words
from glovebox_profiles.model import Profile, digest, digest_of
from glovebox_sandboxes.contract.spec import ORIGINAL, WORKSPACE, Limits, Mount, SandboxSpec

CHANGES = "propose_changes"
"""The one tool that changes files of the host: the server does so after an approval, not the sandbox."""


class ProfileSet(Mapping[str, Profile]):
    """All profiles in effect, by tool name; immutable."""

    def __init__(self, profiles: Mapping[str, Profile], sources: Mapping[str, Path]) -> None:
        self._profiles = {tool: profiles[tool] for tool in sorted(profiles)}
        self._sources = dict(sources)
        self._digests = {tool: digest(profile) for tool, profile in self._profiles.items()}
        self._digest = digest_of(self._digests)

    def __getitem__(self, tool: str) -> Profile:
        return self._profiles[tool]

    def __iter__(self) -> Iterator[str]:
        return iter(self._profiles)

    def __len__(self) -> int:
        return len(self._profiles)

    @property
    def digest(self) -> str:
        """Return ``sha256:…`` over the digests of all profiles."""
        return self._digest

    def digest_for(self, tool: str) -> str:
        """Return the digest of one tool's profile, computed once at load."""
        return self._digests[tool]

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


def withheld(profile: Profile) -> tuple[str, ...]:
    """Return what this profile withholds from a call, for its receipt: network, files, limits."""
    limits, network = profile.limits, profile.network
    hosts = ", ".join(dict.fromkeys(rule.host for rule in network.allow))
    files = ["Files: of the host everything but the workspace, which could be read and not changed."]
    if profile.files.workspace == "overlay":
        files = ["Files: of the host everything but the workspace, of which a copy could be changed."]
    elif profile.files.workspace == "none":
        files = ["Files: everything of the host, the workspace included."]
    if profile.tool == CHANGES:
        files = ["Files: everything of the host but the change that a person was shown, and said yes to."]
    files += [] if profile.files.inputs else ["Files: those of earlier calls."]
    files += [] if profile.files.output else ["Files: none could be given back."]
    spend = f"{words.number(limits.wall_seconds)} s of real time, {limits.cpu_seconds} s of processor time, "
    spend += f"{words.size(limits.memory)} of memory, {limits.pids} processes and threads, "
    spend += f"{words.size(limits.scratch)} of scratch space"
    if profile.files.output:
        spend += f", {limits.output.files} files and {words.size(limits.output.bytes)} given back"
    if profile.files.workspace == "overlay":
        spend += f", {limits.workspace.files} files and {words.size(limits.workspace.bytes)} of workspace"
    return (
        "Network: all of it."
        if network.mode == "none"
        else f"Network: every host but {hosts}; every address that is not public.",
        *files,
        f"Limits: more than {spend}.",
        "The host's processes, environment and secrets; every privilege and capability; anything after the call.",
    )
