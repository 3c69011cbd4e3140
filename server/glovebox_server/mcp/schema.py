"""JSON Schemas of tools, from the pydantic models alone; no I/O. Small, because every connected model pays for them."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from glovebox_server.tools.base import ToolResult

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
