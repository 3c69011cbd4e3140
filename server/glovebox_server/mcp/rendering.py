"""Results as MCP shows them: complete in ``content`` and in ``structuredContent``, never larger than clients take.

Only ``glovebox_server.mcp.server`` imports this.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import mcp_types as types

from glovebox_server.calls import CallResult, Content, Image, Link, Text

#: Largest result, in bytes of JSON. SDK clients reject a server-sent event above 1 MiB, and a model cannot use more;
#: what is larger is an artifact with a resource link.
MAX_MESSAGE_BYTES = 256 * 1024

#: Where the facts of a call stand in a result's ``_meta``.
CALL_META_KEY = "dev.glovebox/call"

#: Where an artifact's digest stands in a resource link's ``_meta``.
SHA256_META_KEY = "dev.glovebox/sha256"

#: Where the reasons not to open a file unseen stand, in the ``_meta`` of its link and of its content.
RISKS_META_KEY = "dev.glovebox/risks"

#: Text is never cut below this many characters; by then only something absurd in number is left to drop.
_LEAST_TEXT = 256


def tool_result(result: CallResult) -> types.CallToolResult:
    """Turn a broker's result into MCP's, within ``MAX_MESSAGE_BYTES``.

    What does not fit goes in this order: images (each is also an artifact, or can be asked for again), then the middle
    of the longest texts, with the number of characters that were left out in their place.
    """
    blocks = [_block(item) for item in result.content]
    structured: Any = dict(result.structured)
    meta = {CALL_META_KEY: dict(result.meta)} if result.meta else None
    rendered = _assembled(blocks, structured, meta, failed=result.failed)
    if _size(rendered) <= MAX_MESSAGE_BYTES:
        return rendered
    blocks = _without_images(blocks)
    longest = MAX_MESSAGE_BYTES // 2
    while True:
        shorter = [_cut_block(block, longest) for block in blocks]
        rendered = _assembled(shorter, _cut(structured, longest), meta, failed=result.failed)
        if _size(rendered) <= MAX_MESSAGE_BYTES:
            return rendered
        if longest <= _LEAST_TEXT:
            return _hopeless(meta)
        longest //= 2


def failure(text: str, structured: Mapping[str, Any] | None = None) -> types.CallToolResult:
    """Return an error the model can read (``isError``), not one of the protocol."""
    content: list[types.ContentBlock] = [types.TextContent(text=text)]
    return types.CallToolResult(content=content, structured_content=structured and dict(structured), is_error=True)


def _assembled(
    blocks: Sequence[types.ContentBlock], structured: Any, meta: dict[str, Any] | None, *, failed: bool
) -> types.CallToolResult:
    return types.CallToolResult(content=list(blocks), structured_content=structured, is_error=failed, _meta=meta)


def _block(item: Content) -> types.ContentBlock:
    match item:
        case Text():
            return types.TextContent(text=item.text)
        case Image():
            return types.ImageContent(data=base64.b64encode(item.data).decode(), mime_type=item.media_type)
        case Link():
            meta = {SHA256_META_KEY: item.sha256, **risks_meta(item.risks)}
            return types.ResourceLink(
                uri=item.uri, name=item.name, mime_type=item.media_type, size=item.bytes, _meta=meta
            )


def risks_meta(risks: Sequence[str]) -> dict[str, Any]:
    """The ``_meta`` of a file with risks; nothing for one without."""
    return {RISKS_META_KEY: list(risks)} if risks else {}


def _size(result: types.CallToolResult) -> int:
    return len(json.dumps(result.model_dump(by_alias=True, mode="json", exclude_none=True)))


def _without_images(blocks: Sequence[types.ContentBlock]) -> list[types.ContentBlock]:
    """Leave out images, largest first, until the rest of them takes at most half of a message."""
    kept: list[types.ContentBlock] = list(blocks)
    sizes = sorted(((len(b.data), n) for n, b in enumerate(kept) if isinstance(b, types.ImageContent)), reverse=True)
    total = sum(size for size, _ in sizes)
    for size, place in sizes:
        if total <= MAX_MESSAGE_BYTES // 2:
            break
        total -= size
        kept[place] = types.TextContent(text=f"[image of {size * 3 // 4} bytes left out: too large for one message]")
    return kept


def _cut_block(block: types.ContentBlock, longest: int) -> types.ContentBlock:
    return types.TextContent(text=_cut(block.text, longest)) if isinstance(block, types.TextContent) else block


def _cut(value: Any, longest: int) -> Any:
    """Keep head and tail of every text longer than ``longest`` characters, wherever it stands."""
    if isinstance(value, str):
        if len(value) <= longest:
            return value
        half = longest // 2
        return f"{value[:half]}\n[… {len(value) - 2 * half} characters left out …]\n{value[-half:]}"
    if isinstance(value, Mapping):
        return {key: _cut(item, longest) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_cut(item, longest) for item in value]
    return value


def _hopeless(meta: dict[str, Any] | None) -> types.CallToolResult:
    text = f"The result has too many parts for one message of {MAX_MESSAGE_BYTES} bytes. Ask for less at a time."
    return types.CallToolResult(content=[types.TextContent(text=text)], is_error=True, _meta=meta)
