"""Results within the size clients take."""

import base64
import json
import time
from typing import Any

import mcp_types as types
import pytest

from glovebox_server.calls import CallResult, Content, Image, Link, Text
from glovebox_server.mcp.delivery import CALL_META_KEY, MAX_MESSAGE_BYTES, tool_result


def _result(structured: dict[str, Any], *content: Content) -> CallResult:
    return CallResult(structured=structured, content=content, failed=False, meta={"call_id": "c_1"})


def _size(result: types.CallToolResult) -> int:
    return len(json.dumps(result.model_dump(by_alias=True, mode="json", exclude_none=True)))


LINK = Link(uri="artifact://1", name="a.png", media_type="image/png", bytes=1, sha256="00" * 32)


def test_an_ordinary_result_is_left_alone() -> None:
    """Text, image and link arrive as they were, with the call's facts in _meta."""
    image = Image(data=b"x" * 1000, media_type="image/png")
    shown = tool_result(_result({"a": "b" * 1000}, Text(text="t"), image, LINK))
    assert [block.type for block in shown.content] == ["text", "image", "resource_link"]
    assert shown.structured_content == {"a": "b" * 1000}
    assert shown.meta == {CALL_META_KEY: {"call_id": "c_1"}}


def test_a_link_is_a_sentence_where_the_revision_has_none() -> None:
    """With all that the link had for a model."""
    shown = tool_result(_result({}, Text(text="t"), LINK), "2025-03-26")
    assert [block.text for block in shown.content if isinstance(block, types.TextContent)] == [
        "t",
        "[a.png: image/png, 1 bytes, artifact://1]",
    ]
    assert [block.type for block in tool_result(_result({}, LINK), "2025-06-18").content] == ["resource_link"]


def test_images_go_before_text_and_links_stay() -> None:
    """Too large an image becomes a sentence; the smaller image, the text and the link stay."""
    large, small = Image(data=b"x" * 300_000, media_type="image/png"), Image(data=b"y" * 1000, media_type="image/png")
    shown = tool_result(_result({"a": "b" * 1000}, Text(text="t" * 1000), large, small, LINK))
    assert _size(shown) <= MAX_MESSAGE_BYTES
    assert [block.type for block in shown.content] == ["text", "text", "image", "resource_link"]
    assert isinstance(shown.content[1], types.TextContent)
    assert "image of 300000 bytes left out" in shown.content[1].text
    assert shown.structured_content == {"a": "b" * 1000}


@pytest.mark.parametrize("character", ["x", "\0", "é", "😀", '"'])
def test_long_text_keeps_head_and_tail_and_counts_the_gap(character: str) -> None:
    """The cap holds for characters that take twelve bytes on the wire, too."""
    text = "HEAD" + character * 300_000 + "TAIL"
    shown = tool_result(_result({"stdout": {"text": text}, "code": 0}, Text(text=text)))
    assert _size(shown) <= MAX_MESSAGE_BYTES
    kept = shown.structured_content["stdout"]["text"]
    assert kept.startswith("HEAD")
    assert kept.endswith("TAIL")
    head, gap, tail = kept.partition("\n[… ")[0], kept.partition("\n[… ")[2], kept.partition("left out …]\n")[2]
    assert int(gap.split(" ", 1)[0]) + len(head) + len(tail) == len(text)
    assert shown.structured_content["code"] == 0
    block = shown.content[0]
    assert isinstance(block, types.TextContent)
    assert block.text == kept


def test_too_many_parts_are_an_error_the_model_can_act_on() -> None:
    """What cannot be cut is not sent in part: it says to ask for less."""
    shown = tool_result(_result({"paths": [f"file{n}" for n in range(100_000)]}))
    assert shown.is_error
    assert _size(shown) <= MAX_MESSAGE_BYTES
    assert isinstance(shown.content[0], types.TextContent)
    assert "Ask for less" in shown.content[0].text


def test_what_is_left_out_is_never_encoded() -> None:
    """16 MiB of pictures and 1 MiB of short texts: a fraction of what it takes to encode them once (control)."""
    pictures = [Image(data=bytes(8 << 20), media_type="image/png")] * 2
    texts = {"lines": ["x" * 100] * 10_000, "more": "y" * 200_000}
    began = time.thread_time()
    shown = tool_result(_result(texts, Text(text="z" * 1_000_000), *pictures))
    spent = time.thread_time() - began
    assert _size(shown) <= MAX_MESSAGE_BYTES
    began = time.thread_time()
    json.dumps([base64.b64encode(each.data).decode() for each in pictures])
    assert spent < (time.thread_time() - began) / 2
