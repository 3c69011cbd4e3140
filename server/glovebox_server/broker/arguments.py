"""Raw arguments to validated ones, with errors a model can act on. No I/O and no MCP: the command line uses it too."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from glovebox_server.errors import InvalidArguments, UnknownTool
from glovebox_server.tools.base import Tool

#: Most problems named in one error; the first few are what a caller repairs.
MAX_PROBLEMS = 8

#: Longest field name repeated to the caller: names come from the caller too.
MAX_FIELD = 64


def tool_named(tools: Mapping[str, Tool], name: str, offered: Iterable[str] | None = None) -> Tool:
    """The tool of that name.

    Args:
        tools: all there are.
        name: as the caller gave it.
        offered: those that the caller is told of; else all.

    Raises:
        UnknownTool: there is none.
    """
    if name not in tools:
        raise UnknownTool(name, tuple(sorted(tools if offered is None else offered)))
    return tools[name]


def validated(tool: Tool, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``raw`` as the tool's argument model reads it, defaults filled in, JSON-compatible.

    Values are taken as they are: text that looks like JSON stays text, ``"5"`` is not 5.

    Raises:
        InvalidArguments: a field is unknown, missing, of the wrong type or out of bounds; names each with its bound.
    """
    try:
        # Through JSON, because strict models read an array as a tuple only there. Lone surrogates stay escaped.
        text = json.dumps(dict(raw))
        return tool.arguments.model_validate_json(text).model_dump(mode="json", exclude_unset=False)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
        problems = [_sentence(tool, item["type"], item["loc"], item["msg"]) for item in details[:MAX_PROBLEMS]]
        fields = dict.fromkeys(_field(item["loc"]) for item in details[:MAX_PROBLEMS])
        raise InvalidArguments(tool.name, tuple(problems), tuple(fields)) from None
    except (TypeError, ValueError, RecursionError):
        raise InvalidArguments(tool.name, ("arguments: must be one JSON object of ordinary depth",)) from None


def _sentence(tool: Tool, kind: str, location: tuple[int | str, ...], message: str) -> str:
    field = _field(location)
    if kind == "extra_forbidden":
        return f"{field}: unknown argument; this tool takes {', '.join(tool.arguments.model_fields)}"
    if kind == "missing":
        return f"{field}: required and missing"
    return f"{field}: {message[:1].lower()}{message[1:]}"


def _field(location: tuple[int | str, ...]) -> str:
    return ".".join(_shown(part) for part in location) or "arguments"


def _shown(part: int | str) -> str:
    text = str(part).encode("ascii", "backslashreplace").decode()
    return text if len(text) <= MAX_FIELD else f"{text[:MAX_FIELD]}…"
