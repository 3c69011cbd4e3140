"""What a client said, as one JSON-RPC message or as the error it gets for it: over stdio as over HTTP. No I/O.

Source: JSON-RPC 2.0, sections 4 and 5, https://www.jsonrpc.org/specification
"""

from typing import Any

import mcp_types as types

from glovebox_sandboxes import strict_json


class Malformed(Exception):  # noqa: N818 - it names what the text is
    """A text is no message."""

    def __init__(self, code: int, message: str, identity: str | int | None = None) -> None:
        """Take the answer's code, text and id (section 5.1)."""
        super().__init__(message)
        self.answer = types.JSONRPCError(jsonrpc="2.0", id=identity, error=types.ErrorData(code=code, message=message))


def value_of(text: bytes) -> Any:
    """The JSON value of a message.

    Raises:
        Malformed: it has no meaning that every reader sees, is out of bounds, or asks under what is no id. The SDK
            would take the last for a notification, to which nobody gets an answer.
    """
    try:
        value = strict_json.check(text)
    except ValueError as error:
        raise Malformed(types.PARSE_ERROR, f"Parse error: {error}") from None
    if isinstance(value, dict) and "method" in value and "id" in value and known_id(value) is None:
        raise Malformed(types.INVALID_REQUEST, "Invalid request: an id is a text or an integer")
    return value


def is_call(value: Any) -> bool:
    """Whether a message asks for a tool to be called."""
    return isinstance(value, dict) and value.get("method") == "tools/call"


def tool_of(value: Any) -> str | None:
    """The tool that a message asks for; None where it asks for none."""
    params = value.get("params") if is_call(value) else None
    name = params.get("name") if isinstance(params, dict) else None
    return name if isinstance(name, str) else None


def known_id(value: Any) -> str | int | None:
    """The id of what may be a message; None where it has none that could be answered to."""
    identity = value.get("id") if isinstance(value, dict) else None
    return identity if isinstance(identity, str | int) and not isinstance(identity, bool) else None
