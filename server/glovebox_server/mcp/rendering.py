"""Results as MCP shows them: complete in ``content`` and in ``structuredContent``, never larger than clients take.

Only ``glovebox_server.mcp.server`` imports this.
"""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
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

#: Where the kinds of secrets that were replaced in a file's content stand, with their numbers, in its ``_meta``.
REDACTED_META_KEY = "dev.glovebox/redacted"

#: Revisions without resource links: their clients refuse a whole result for a block that they do not know.
WITHOUT_LINKS = frozenset({"2024-11-05", "2025-03-26"})

#: Text is never cut below this many characters; by then only something absurd in number is left to drop.
_LEAST_TEXT = 256


def tool_result(result: CallResult, revision: str | None = None) -> types.CallToolResult:
    """Turn a broker's result into MCP's, within ``MAX_MESSAGE_BYTES``, of blocks that ``revision`` has.

    What does not fit goes in this order: images beyond half of it (each has its original elsewhere), then the middle
    of the longest texts, with the number of characters that were left out in their place. What cannot fit is told by
    its length: nothing is encoded that is left out, for everybody waits meanwhile.
    """
    items: Sequence[Content] = result.content
    if revision in WITHOUT_LINKS:
        items = [_said(item) if isinstance(item, Link) else item for item in items]
    structured: Any = dict(result.structured)
    meta = {CALL_META_KEY: dict(result.meta)} if result.meta else None
    if sum(map(_encoded, items)) > MAX_MESSAGE_BYTES:
        items = _without_images(items)
    longest = MAX_MESSAGE_BYTES
    while longest > _LEAST_TEXT // 2:
        if sum(min(length, longest) for length in _lengths([structured, items])) <= MAX_MESSAGE_BYTES:
            blocks = [_block(item, longest) for item in items]
            rendered = types.CallToolResult(
                content=blocks, structured_content=_cut(structured, longest), is_error=result.failed, _meta=meta
            )
            if _size(rendered) <= MAX_MESSAGE_BYTES:
                return rendered
        if longest == MAX_MESSAGE_BYTES:
            items = _without_images(items)
        longest //= 2
    return _hopeless(meta)


def failure(text: str, structured: Mapping[str, Any] | None = None) -> types.CallToolResult:
    """Return an error the model can read (``isError``), not one of the protocol."""
    content: list[types.ContentBlock] = [types.TextContent(text=text)]
    return types.CallToolResult(content=content, structured_content=structured and dict(structured), is_error=True)


def _block(item: Content, longest: int) -> types.ContentBlock:
    match item:
        case Text():
            return types.TextContent(text=_cut(item.text, longest))
        case Image():
            return types.ImageContent(data=base64.b64encode(item.data).decode(), mime_type=item.media_type)
        case Link():
            meta = {SHA256_META_KEY: item.sha256, **risks_meta(item.risks)}
            return types.ResourceLink(
                uri=item.uri, name=item.name, mime_type=item.media_type, size=item.bytes, _meta=meta
            )


def _said(link: Link) -> Text:
    return Text(text=f"[{link.name}: {link.media_type}, {link.bytes} bytes, {link.uri}]")


def risks_meta(risks: Sequence[str]) -> dict[str, Any]:
    """The ``_meta`` of a file with risks; nothing for one without."""
    return {RISKS_META_KEY: list(risks)} if risks else {}


def _encoded(item: Content) -> int:
    """Characters that an image takes in JSON; 0 for what is none."""
    return (len(item.data) + 2) // 3 * 4 if isinstance(item, Image) else 0


def _lengths(value: Any) -> Iterator[int]:
    """Characters of every text, wherever it stands: each takes at least as many bytes."""
    waiting = [value]
    while waiting:
        match waiting.pop():
            case str() as text:
                yield len(text)
            case Text(text=text):
                yield len(text)
            case Mapping() as table:
                waiting += table.values()
            case list() | tuple() as row:
                waiting += row


def _size(result: types.CallToolResult) -> int:
    return len(json.dumps(result.model_dump(by_alias=True, mode="json", exclude_none=True)))


def _without_images(items: Sequence[Content]) -> list[Content]:
    """Leave out images, largest first, until the rest of them takes at most half of a message."""
    kept = list(items)
    sizes = sorted(((_encoded(item), n) for n, item in enumerate(kept) if isinstance(item, Image)), reverse=True)
    total = sum(size for size, _ in sizes)
    for size, place in sizes:
        if total <= MAX_MESSAGE_BYTES // 2:
            break
        total -= size
        kept[place] = Text(text=f"[image of {size * 3 // 4} bytes left out: too large for one message]")
    return kept


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
