"""The list of tools every model pays for."""

import json

from glovebox_server.mcp import catalogue
from glovebox_server.tools import TOOLS

#: What issue-sized models are promised: bytes of JSON, and tokens by the usual four bytes each.
MAX_BYTES = 6_000
MAX_TOKENS = 1_500


def _json() -> str:
    tools = [
        tool.model_dump(by_alias=True, mode="json", exclude_none=True) for tool in catalogue.listed(TOOLS.values())
    ]
    return json.dumps({"tools": tools}, separators=(",", ":"))


def test_the_whole_list_is_small() -> None:
    """Every schema, description and hint of every tool together."""
    size = len(_json().encode())
    assert size < MAX_BYTES
    assert size / 4 < MAX_TOKENS


def test_the_list_is_the_same_every_time() -> None:
    """M9: same order and same digest, whatever order the tools come in."""
    forwards = catalogue.listed(TOOLS.values())
    backwards = catalogue.listed(reversed(list(TOOLS.values())))
    assert forwards == backwards
    assert catalogue.digest(forwards) == catalogue.digest(backwards)
    assert [tool.name for tool in forwards] == sorted(TOOLS)
    if len(forwards) > 1:
        assert catalogue.digest(forwards[1:]) != catalogue.digest(forwards)


def test_every_tool_refuses_what_it_does_not_know_and_says_what_it_is() -> None:
    """M4: no schema is open; every tool has a title, a description, hints and an output schema."""
    for tool in catalogue.listed(TOOLS.values()):
        assert tool.input_schema["additionalProperties"] is False
        assert tool.output_schema is not None
        assert tool.title
        assert tool.description
        assert tool.annotations is not None
        assert tool.annotations.read_only_hint is True
        assert tool.annotations.destructive_hint is False
