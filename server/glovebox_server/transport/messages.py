"""What a client said, as one JSON-RPC message or as the error it gets for it: over stdio as over HTTP. No I/O.

Source: JSON-RPC 2.0, sections 4 and 5, https://www.jsonrpc.org/specification
"""

from typing import Any

import mcp_types as types
from anyio.abc import ObjectSendStream
from mcp.shared.message import SessionMessage
from mcp_types import PROTOCOL_VERSION_META_KEY

from glovebox_sandboxes import strict_json
from glovebox_server.mcp.claims import SERVED


class Malformed(Exception):  # noqa: N818 - it names what the text is
    """A text is no message."""

    def __init__(self, code: int, message: str, identity: str | int | None = None, data: object = None) -> None:
        """Take the answer's code, text, id and data (section 5.1)."""
        super().__init__(message)
        error = types.ErrorData(code=code, message=message)
        if data is not None:
            error = types.ErrorData(code=code, message=message, data=data)
        self.answer = types.JSONRPCError(jsonrpc="2.0", id=identity, error=error)


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


def revision_of(value: Any) -> object:
    """Return the revision of the protocol that a message names in its envelope; None where it names none."""
    params = value.get("params") if isinstance(value, dict) else None
    meta = params.get("_meta") if isinstance(params, dict) else None
    return meta.get(PROTOCOL_VERSION_META_KEY) if isinstance(meta, dict) else None


def require_served(value: Any, revision: object) -> None:
    """Refuse a message in a revision that is not served, naming all that are.

    The SDK would name those with an envelope alone, and hold a stream to them from its first message on; a client that
    picks an older one from the list shakes hands.

    Raises:
        Malformed: it is not served.
    """
    if isinstance(revision, str) and revision not in SERVED:
        data = {"supported": list(SERVED), "requested": revision}
        raise Malformed(types.UNSUPPORTED_PROTOCOL_VERSION, "Unsupported protocol version", known_id(value), data)


class NamingServed(ObjectSendStream[SessionMessage]):
    """A stream to the client whose errors name every revision served: the SDK names those with an envelope alone."""

    def __init__(self, inner: ObjectSendStream[SessionMessage]) -> None:
        """Take the stream that it goes on to."""
        self._inner = inner

    async def send(self, item: SessionMessage) -> None:
        """Send a message."""
        message = item.message
        if isinstance(message, types.JSONRPCError) and message.error.code == types.UNSUPPORTED_PROTOCOL_VERSION:
            message.error.data = {**(message.error.data or {}), "supported": list(SERVED)}
        await self._inner.send(item)

    async def aclose(self) -> None:
        """Close the stream."""
        await self._inner.aclose()


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
