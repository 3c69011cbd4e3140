"""The capability manifest: all a caller can know before a call. One object, the same for the command line and for MCP.

docs/use/capabilities.csv explains each field; a test holds the two together. It names no host path and no secret.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from mcp_types.version import SUPPORTED_PROTOCOL_VERSIONS

from glovebox_profiles.compile import to_spec
from glovebox_profiles.features import FEATURES
from glovebox_profiles.model import Profile, digest_of
from glovebox_sandboxes.conformance import call as calls
from glovebox_sandboxes.conformance import case as cases
from glovebox_sandboxes.contract.base import Capabilities
from glovebox_sandboxes.contract.errors import UnsupportedSpecError
from glovebox_sandboxes.contract.spec import Limits
from glovebox_sandboxes.drivers.registry import NAMES, Drivers
from glovebox_sandboxes.runtime.environments import Environment
from glovebox_server.core.rights import Rights
from glovebox_server.mcp import catalogue
from glovebox_server.mcp.delivery import MAX_MESSAGE_BYTES
from glovebox_server.redaction import without_paths
from glovebox_server.tools.base import Tool
from glovebox_server.workspace import NOT_SERVED

URI: Final = "glovebox://capabilities"

FORMAT: Final = 1
"""A change that could break a reader raises it; more fields do not."""

NETWORK_MODES: Final[Mapping[str, str]] = {
    "none": "An empty network namespace: loopback only, no route, no resolver.",
    "egress": "The same, and the host makes each connection that a rule names, decided and recorded one by one.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lack:
    """Something this host lacks for a driver."""

    what: str
    fix: str
    fatal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverFacts:
    """One driver on this host, found out by trying."""

    name: str
    level: str
    version: str
    usable: bool
    experimental: bool
    limits: Mapping[str, str]
    missing: tuple[Lack, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lacking:
    """One value of a profile's key that is not simply there."""

    key: str
    value: str
    status: str
    reason: str
    instead: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """One limit of a tool's calls."""

    value: float
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFacts:
    """What one tool's calls get here."""

    name: str
    profile_digest: str
    runs: bool
    refused: str
    driver: str
    level: str
    network: str
    workspace: str
    output: bool
    inputs: bool
    environment: str
    packages: tuple[str, ...]
    limits: Mapping[str, Bound]
    input_schema_digest: str
    output_schema_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedWorkspace:
    """Whether the server has a workspace for its tools."""

    served: bool
    refused: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """How clients speak to this server."""

    versions: tuple[str, ...]
    transports: tuple[str, ...]
    result_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """The claims that ``glovebox doctor --prove`` tries."""

    digest: str
    cases: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything."""

    format: int
    glovebox: str
    drivers: tuple[DriverFacts, ...]
    network_modes: Mapping[str, str]
    features: tuple[Lacking, ...]
    workspace: ServedWorkspace
    role: str
    policy_digest: str
    tools: tuple[ToolFacts, ...]
    profiles_digest: str
    tools_digest: str
    protocol: Protocol
    conformance: Suite

    def as_json(self) -> dict[str, Any]:
        """Plain data, in the order of the fields."""
        return asdict(self)


async def manifest(
    *,
    tools: Mapping[str, Tool],
    rights: Rights,
    environments: Mapping[str, Environment],
    drivers: Drivers,
    version: str,
) -> Manifest:
    """Find out what a caller can have, by asking every driver and choosing for every tool as a call would.

    Args:
        tools: there are.
        rights: the caller's. Its workspace is not named.
        environments: of the tools.
        drivers: of this server; those that were not needed yet are probed now.
        version: of Glovebox.
    """
    profiles, workspace = rights.profiles, rights.workspace
    environments = catalogue.of_profiles(profiles, environments)
    offered = [tools[name] for name in rights.offered(tools)]
    found = [(await drivers.get(name)).capabilities for name in NAMES]
    experimental = {each.value for each in FEATURES if each.key == "isolation" and each.status == "experimental"}
    listed = {entry.name: entry for entry in catalogue.listed(offered, profiles, environments)}
    facts = []
    for name, entry in listed.items():
        profile = profiles.get(name)
        driver, refused = await _chosen(tools[name], profile, drivers, workspace)
        facts.append(
            _tool(name, profile, driver, refused)
            | {
                "environment": environments[name].name if profile else "",
                "packages": environments[name].modules if profile and tools[name].imports else (),
                "profile_digest": profiles.digest_for(name) if profile else "",
                "input_schema_digest": digest_of(entry.input_schema),
                "output_schema_digest": digest_of(entry.output_schema or {}),
            }
        )
    suite = (*cases.load(), *calls.load())
    return Manifest(
        format=FORMAT,
        glovebox=version,
        drivers=tuple(_driver(each, experimental) for each in found),
        network_modes=NETWORK_MODES,
        features=tuple(Lacking(**_fields(each, Lacking)) for each in FEATURES),
        workspace=ServedWorkspace(served=workspace is not None, refused="" if workspace else str(NOT_SERVED)),
        tools=tuple(ToolFacts(**each) for each in facts),
        role=rights.role or "",
        policy_digest=rights.policy_digest or "",
        profiles_digest=profiles.digest,
        tools_digest=catalogue.digest(listed.values()),
        protocol=Protocol(
            versions=tuple(SUPPORTED_PROTOCOL_VERSIONS),
            transports=("stdio", "http", "sse"),
            result_bytes=MAX_MESSAGE_BYTES,
        ),
        conformance=Suite(digest=cases.digest(suite), cases=len(suite)),
    )


async def _chosen(
    tool: Tool, profile: Profile | None, drivers: Drivers, workspace: Path | None
) -> tuple[Capabilities | None, str]:
    if profile is None:
        return None, "There is no profile for it, so it may do nothing."
    if "workspace" in tool.needs and workspace is None:
        return None, str(NOT_SERVED)
    try:
        driver, _ = await drivers.choose(profile.isolation, to_spec(profile, workspace=workspace))
    except UnsupportedSpecError as problem:
        return None, without_paths(str(problem))
    return driver.capabilities, ""


def _tool(name: str, profile: Profile | None, driver: Capabilities | None, refused: str) -> dict[str, Any]:
    limits: dict[str, Bound] = {}
    if profile is not None:
        spec = to_spec(profile, workspace=None)
        # What no driver names the broker itself holds: the number of files that come out.
        by = {each.name: driver.limits.get(each.name, "broker") if driver else "" for each in fields(Limits)}
        limits = {name: Bound(value=getattr(spec.limits, name), by=mechanism) for name, mechanism in by.items()}
    return {
        "name": name,
        "runs": not refused,
        "refused": refused,
        "driver": driver.driver if driver else "",
        "level": driver.level if driver else "",
        "network": profile.network.mode if profile else "none",
        "workspace": profile.files.workspace if profile else "none",
        "output": profile is not None and profile.files.output,
        "inputs": profile is not None and profile.files.inputs,
        "limits": limits,
    }


def _driver(found: Capabilities, experimental: Iterable[str]) -> DriverFacts:
    return DriverFacts(
        name=found.driver,
        level=found.level,
        version=found.version,
        usable=found.usable,
        experimental=found.driver in experimental,
        limits=dict(found.limits) if found.usable else {},
        missing=tuple(
            Lack(what=without_paths(each.what), fix=without_paths(each.fix), fatal=each.fatal) for each in found.missing
        ),
    )


def _fields(record: object, kind: type[Any]) -> dict[str, Any]:
    return {each.name: getattr(record, each.name) for each in fields(kind)}
