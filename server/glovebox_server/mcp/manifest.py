"""The capability manifest: everything a caller can know before a call, as JSON for the command line and for MCP.

docs/use/capabilities.csv explains each field, and a test compares the two. It names no host path and no secret.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

import mcp_types as types
from mcp_types.version import SUPPORTED_PROTOCOL_VERSIONS

from glovebox_profiles.compile import to_spec
from glovebox_profiles.features import FEATURES
from glovebox_profiles.model import Profile, digest_of
from glovebox_sandboxes.conformance import case as cases
from glovebox_sandboxes.contract.base import Capabilities
from glovebox_sandboxes.contract.errors import UnsupportedSpecError
from glovebox_sandboxes.contract.spec import Limits
from glovebox_sandboxes.drivers.registry import DRIVERS, NAMES, Drivers
from glovebox_sandboxes.runtime.environments import Environment
from glovebox_server.core.rights import Rights
from glovebox_server.errors import without_paths
from glovebox_server.mcp import catalogue
from glovebox_server.mcp.delivery import MAX_MESSAGE_BYTES
from glovebox_server.tools.base import Tool
from glovebox_server.workspace import NOT_SERVED

URI: Final = "glovebox://capabilities"

FORMAT: Final = 1
"""Raised by changes that could break a reader; new fields do not."""

NETWORK_MODES: Final[Mapping[str, str]] = {
    "none": "An empty network namespace: loopback only, no route, no resolver.",
    "egress": "The same, and the host makes each connection that a rule names, decided and recorded one by one.",
}


Manifest = Mapping[str, Any]
"""JSON, with the fields of docs/use/capabilities.csv in their order."""


async def build_manifest(
    *,
    tools: Mapping[str, Tool],
    rights: Rights,
    environments: Mapping[str, Environment],
    drivers: Drivers,
    version: str,
) -> Manifest:
    """Return what a caller can use, by asking every driver and choosing for every tool as a call would."""
    profiles, workspace = rights.profiles, rights.workspace
    environments = catalogue.environments_of(profiles, environments)
    offered = [tools[name] for name in rights.offered(tools)]
    found = [(await drivers.get(name)).capabilities for name in NAMES]
    listed = {entry.name: entry for entry in catalogue.list_tools(offered, profiles, environments)}
    suite = cases.load()
    return {
        "format": FORMAT,
        "glovebox": version,
        "drivers": [_driver(capabilities) for capabilities in found],
        "network_modes": NETWORK_MODES,
        "features": [asdict(feature) for feature in FEATURES],
        "workspace": {"served": workspace is not None, "refused": "" if workspace else str(NOT_SERVED)},
        "role": rights.role or "",
        "policy_digest": rights.policy_digest or "",
        "tools": [
            await _tool(tools[name], entry, rights, environments.get(name), drivers) for name, entry in listed.items()
        ],
        "profiles_digest": profiles.digest,
        "tools_digest": catalogue.digest_tools(listed.values()),
        "protocol": {
            "versions": SUPPORTED_PROTOCOL_VERSIONS,
            "transports": ("stdio", "http", "sse"),
            "result_bytes": MAX_MESSAGE_BYTES,
        },
        "conformance": {"digest": cases.digest(suite), "cases": len(suite)},
    }


async def _choose(
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


async def _tool(
    tool: Tool, entry: types.Tool, rights: Rights, environment: Environment | None, drivers: Drivers
) -> dict[str, Any]:
    profile = rights.profiles.get(tool.name)
    driver, refused = await _choose(tool, profile, drivers, rights.workspace)
    limits = {}
    if profile is not None:
        values = to_spec(profile, workspace=None).limits
        # The broker enforces limits that no driver names: the number of artifacts.
        by = {field.name: driver.limits.get(field.name, "broker") if driver else "" for field in fields(Limits)}
        limits = {name: {"value": getattr(values, name), "by": mechanism} for name, mechanism in by.items()}
    return {
        "name": tool.name,
        "profile_digest": rights.profiles.digests[tool.name] if profile else "",
        "runs": not refused,
        "refused": refused,
        "driver": driver.driver if driver else "",
        "level": driver.level if driver else "",
        "network": profile.network.mode if profile else "none",
        "workspace": profile.files.workspace if profile else "none",
        "output": profile is not None and profile.files.output,
        "inputs": profile is not None and profile.files.inputs,
        "environment": environment.name if profile and environment else "",
        "packages": environment.modules if profile and environment and tool.imports else (),
        "limits": limits,
        "input_schema_digest": digest_of(entry.input_schema),
        "output_schema_digest": digest_of(entry.output_schema or {}),
    }


def _driver(found: Capabilities) -> dict[str, Any]:
    return {
        "name": found.driver,
        "level": found.level,
        "version": found.version,
        "usable": found.usable,
        "experimental": any(each.name == found.driver and each.experimental for each in DRIVERS),
        "limits": dict(found.limits) if found.usable else {},
        "missing": [
            {"what": without_paths(lack.what), "fix": without_paths(lack.fix), "fatal": lack.fatal}
            for lack in found.missing
        ],
    }
