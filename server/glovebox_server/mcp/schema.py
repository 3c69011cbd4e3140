"""JSON Schemas of tools, as small as they can be and still say what a caller needs: every model that connects pays.

Made from the pydantic models and nothing else; no I/O.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from glovebox_server.tools.base import ToolResult

_NOT_SAID = frozenset({"title", "$defs"})
#: What of a field of a result is said: enough to check it, and what its parts are is in the documentation.
_OUTPUT = frozenset({"type", "enum", "const"})
_COMMON = frozenset(ToolResult.model_fields) - {"call_id", "refused"}


def input_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of a tool's arguments: every bound, no titles, references inlined.

    An argument that may be left out is not shown as one that may also be null, although null is taken too.
    """
    whole = model.model_json_schema(mode="validation")
    fields = {name: _inlined(field, whole.get("$defs", {})) for name, field in whole.get("properties", {}).items()}
    schema: dict[str, Any] = {"type": "object", "properties": fields}
    if whole.get("required"):
        schema["required"] = whole["required"]
    return schema | {"additionalProperties": False}


def output_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of a tool's result: its fields and their types, one level deep.

    A result fits the model, so it fits this weaker schema. Of what all results have in common it names the call and
    the refusal, which a caller has to look for.
    """
    whole = model.model_json_schema(mode="serialization")
    definitions = whole.get("$defs", {})
    fields = {name: _shallow(field, definitions) for name, field in whole["properties"].items() if name not in _COMMON}
    required = [name for name, field in model.model_fields.items() if field.is_required()]
    return {"type": "object", "properties": fields, "required": required}


def _inlined(node: Any, definitions: Mapping[str, Any]) -> Any:
    """Leave out titles and null, and put what is referred to in its place. The models have no cycles."""
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
