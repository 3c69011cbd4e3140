"""The tools as MCP ``Tool`` records, small and in a fixed order; and the capability manifest. Imports the SDK.

The list stays under 6,000 bytes of JSON (about 1,500 tokens), which a test checks: every connected model pays for it.
The manifest is everything a caller can know before a call, as JSON for the command line and for MCP. It names no host
path and no secret. docs/use/capabilities.csv explains each field, and a test compares the two.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

import mcp_types as types
import rfc8785
from mcp_types.version import SUPPORTED_PROTOCOL_VERSIONS
from pydantic import BaseModel

from glovebox_profiles import words
from glovebox_profiles.compile import to_spec
from glovebox_profiles.features import FEATURES
from glovebox_profiles.model import Profile, digest_of
from glovebox_sandboxes.conformance import case as cases
from glovebox_sandboxes.contract.base import DEFAULT, Capabilities, Limits
from glovebox_sandboxes.contract.errors import UnsupportedSpecError
from glovebox_sandboxes.drivers.registry import DRIVERS, NAMES, Drivers
from glovebox_sandboxes.runtime.environments import SHIPPED, Environment, load
from glovebox_server.core.rights import Rights
from glovebox_server.errors import without_paths
from glovebox_server.mcp.delivery import MAX_MESSAGE_BYTES
from glovebox_server.tools.base import PACKAGES, Tool, ToolResult
from glovebox_server.workspace import NOT_SERVED

MAX_PACKAGES = 400
"""Characters of the packages in a tool's description: about forty of them."""
MAX_HOSTS = 80
"""Characters of the hosts in a description: about five. A refusal names all that are allowed."""
_NETWORKED = {"requests"}
_WORKSPACE = {
    "read": "The workspace is in /workspace, the current directory, read-only.",
    "overlay": "A copy of the workspace is in /workspace, the current directory; its changes come back as a patch.",
    "none": "No workspace.",
}


_Environments = Mapping[str, Environment]


def list_tools(
    tools: Iterable[Tool], profiles: Mapping[str, Profile], environments: _Environments | None = None
) -> list[types.Tool]:
    """Return the tools sorted by name, bounded by their ``profiles``.

    ``environments`` has the packages of programs, by tool; others have the default environment.
    """
    has = environments or {}
    return [
        _entry(tool, profiles.get(tool.name), _packages(has.get(tool.name), profiles.get(tool.name)))
        for tool in sorted(tools, key=lambda tool: tool.name)
        if not tool.proposes or tool.name in profiles  # as ``Rights.shown`` has it
    ]


def environments_of(profiles: Mapping[str, Profile], environments: _Environments) -> _Environments:
    """Return the environment of each profile's programs: a role may have narrowed it to the default."""
    default = load(DEFAULT, SHIPPED)
    return {
        tool: environments[tool] if environments[tool].name == profile.python.environment else default
        for tool, profile in profiles.items()
        if tool in environments
    }


def _grants(tool: Tool, profile: Profile) -> list[str]:
    said: list[str] = []
    if tool.imports:
        said.append(_WORKSPACE[profile.files.workspace])
        said.append("Files in /output come back as artifacts." if profile.files.output else "No files come back.")
        said += [] if profile.files.inputs else ["It takes no inputs."]
    if tool.imports or tool.open_world:
        hosts = list(dict.fromkeys(rule.host for rule in profile.network.allow))
        text = ", ".join(hosts)
        if len(text) > MAX_HOSTS:
            text = text[:MAX_HOSTS].rpartition(", ")[0]
            text += f" and {len(hosts) - text.count(', ') - 1} more"
        said.append(f"Network: {text}." if hosts else "No network.")
    elif "workspace" in tool.needs and profile.files.workspace == "none":
        said.append("Its profile grants no workspace.")
    if tool.imports:
        limits = profile.limits
        said.append(f"At most {words.number(limits.wall_seconds)} s, {words.size(limits.memory)} of memory.")
    if profile.approval == "ask" and not tool.proposes:
        said.append("A person must approve each call.")
    return said


def _packages(environment: Environment | None, profile: Profile | None) -> str:
    offline = profile is None or profile.network.mode == "none"
    modules = (environment or load(DEFAULT, SHIPPED)).modules
    text = ", ".join(module for module in modules if not (offline and module in _NETWORKED))
    return text if len(text) <= MAX_PACKAGES else f"{text[:MAX_PACKAGES].rpartition(', ')[0]}, …"


def digest_tools(entries: Iterable[types.Tool]) -> str:
    """Return ``sha256:…`` over the canonical JSON of the list, for clients to pin and audits to compare."""
    plain = [entry.model_dump(by_alias=True, mode="json", exclude_none=True) for entry in entries]
    return "sha256:" + hashlib.sha256(rfc8785.dumps(plain)).hexdigest()


def _entry(tool: Tool, profile: Profile | None, packages: str) -> types.Tool:
    schema = input_schema(tool.arguments)
    if profile is not None and "timeout_seconds" in schema["properties"]:
        schema["properties"]["timeout_seconds"]["maximum"] = profile.limits.wall_seconds
    # Nothing outlives a call and the workspace is read-only, so only a tool that proposes changes can destroy anything.
    # Fetches and programs may differ from one time to the next, but calling either twice changes nothing.
    reads = not tool.proposes
    hints = types.ToolAnnotations(
        read_only_hint=reads, destructive_hint=not reads, idempotent_hint=reads, open_world_hint=tool.open_world
    )
    granted = _grants(tool, profile) if profile else ()
    return types.Tool(
        name=tool.name,
        title=tool.title,
        description=" ".join((tool.description.replace(PACKAGES, packages), *granted)),
        input_schema=schema,
        output_schema=output_schema(tool.result),
        annotations=hints,
    )


_NOT_SAID = frozenset({"title", "$defs"})
#: Parts of a result's field that are shown: enough to check it; the documentation has the rest.
_OUTPUT = frozenset({"type", "enum", "const"})
_COMMON = frozenset(ToolResult.model_fields) - {"call_id", "refused"}


def input_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of a tool's arguments: every bound, no titles, references inlined.

    Optional arguments are not shown as nullable, although null is accepted.
    """
    whole = model.model_json_schema(mode="validation")
    fields = {name: _inlined(field, whole.get("$defs", {})) for name, field in whole.get("properties", {}).items()}
    schema: dict[str, Any] = {"type": "object", "properties": fields}
    if whole.get("required"):
        schema["required"] = whole["required"]
    return schema | {"additionalProperties": False}


def output_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of a tool's result: its fields and their types, one level deep.

    A result fits the model, so it fits this weaker schema. Of the common fields it names the call and the refusal,
    which callers need.
    """
    whole = model.model_json_schema(mode="serialization")
    definitions = whole.get("$defs", {})
    fields = {name: _shallow(field, definitions) for name, field in whole["properties"].items() if name not in _COMMON}
    required = [name for name, field in model.model_fields.items() if field.is_required()]
    return {"type": "object", "properties": fields, "required": required}


def _inlined(node: Any, definitions: Mapping[str, Any]) -> Any:
    """Drop titles and null, and inline references. The models have no cycles."""
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if not isinstance(node, Mapping):
        return node
    node = _resolved(node, definitions)
    kept = {key: _inlined(value, definitions) for key, value in node.items() if key not in _NOT_SAID}
    if "default" in kept and kept["default"] in (None, []):
        del kept["default"]
    choices = [choice for choice in kept.pop("anyOf", []) if choice != {"type": "null"}]
    if len(choices) == 1:
        return kept | choices[0]
    return kept | {"anyOf": choices} if choices else kept


def _shallow(field: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    choices = [_resolved(choice, definitions) for choice in field.get("anyOf", [field])]
    said: dict[str, Any] = {}
    types = [choice["type"] for choice in choices if "type" in choice]
    if types:
        said["type"] = types[0] if len(types) == 1 else types
    if len(choices) == 1:
        said |= {key: value for key, value in choices[0].items() if key in _OUTPUT}
    return said


def _resolved(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = node.get("$ref")
    if reference is None:
        return node
    rest = {key: value for key, value in node.items() if key != "$ref"}
    found = {key: value for key, value in definitions[reference.rpartition("/")[2]].items() if key != "description"}
    return found | rest


CAPABILITIES_URI: Final = "glovebox://capabilities"
FORMAT: Final = 1
"""Raised by changes that could break a reader; new fields do not."""

NETWORK_MODES: Final[Mapping[str, str]] = {
    "none": "An empty network namespace: loopback only, no route, no resolver.",
    "egress": "The same, and the host makes each connection that a rule names, decided and recorded one by one.",
}


Manifest = Mapping[str, Any]
"""JSON, with the fields of docs/use/capabilities.csv in their order."""


async def build_manifest(
    *, tools: Mapping[str, Tool], rights: Rights, environments: _Environments, drivers: Drivers, version: str
) -> Manifest:
    """Return what a caller can use, by asking every driver and choosing for every tool as a call would."""
    profiles, workspace = rights.profiles, rights.workspace
    environments = environments_of(profiles, environments)
    offered = [tools[name] for name in rights.offered(tools)]
    found = [(await drivers.get(name)).capabilities for name in NAMES]
    listed = {entry.name: entry for entry in list_tools(offered, profiles, environments)}
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
            await _describe_tool(tools[name], entry, rights, environments.get(name), drivers)
            for name, entry in listed.items()
        ],
        "profiles_digest": profiles.digest,
        "tools_digest": digest_tools(listed.values()),
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


async def _describe_tool(
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
