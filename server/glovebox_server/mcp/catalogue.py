"""The tools as MCP ``Tool`` records, small and in a fixed order. Only for ``mcp.server``.

The list stays under 6,000 bytes of JSON (about 1,500 tokens), which a test checks: every connected model pays for it.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import mcp_types as types
import rfc8785
from pydantic import BaseModel

from glovebox_profiles import words
from glovebox_profiles.model import Profile
from glovebox_sandboxes.contract.spec import DEFAULT
from glovebox_sandboxes.runtime.environments import SHIPPED, Environment, load
from glovebox_server.tools.base import PACKAGES, Tool, ToolResult

MAX_PACKAGES = 400
"""Characters of the packages in a tool's description: about forty of them."""
MAX_HOSTS = 80
"""Characters of the hosts in a description: about five. A refusal names all that are allowed."""

_NETWORKED = {"requests"}
"""Modules that are useless without a network."""
_WORKSPACE = {
    "read": "The workspace is in /workspace, the current directory, read-only.",
    "overlay": "A copy of the workspace is in /workspace, the current directory; its changes come back as a patch.",
    "none": "No workspace.",
}


def list_tools(
    tools: Iterable[Tool], profiles: Mapping[str, Profile], environments: Mapping[str, Environment] | None = None
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


def environments_of(
    profiles: Mapping[str, Profile], environments: Mapping[str, Environment]
) -> Mapping[str, Environment]:
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
