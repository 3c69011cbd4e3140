"""The tools, resources and prompts that the official conformance runner calls. None of them is part of Glovebox.

Their names and answers are fixed by the runner (``@modelcontextprotocol/conformance``); they exist so that its requests
travel through our server assembly, gate and transports.
"""

import base64
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio
import mcp_types as types
from mcp.shared.exceptions import MCPError
from mcp.shared.message import ServerMessageMetadata

from glovebox_server.mcp.delivery import Context

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGP4z8DwHwAFAAH/iZk9HQAAAABJRU5ErkJggg=="
WAV = base64.b64encode(
    b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0\x40\x1f\0\0\x80\x3e\0\0\2\0\x10\0data\0\0\0\0"
).decode()

Answer = types.CallToolResult | types.InputRequiredResult
Fixture = Callable[[Context, types.CallToolRequestParams], Awaitable[Answer]]

_PAUSE = 0.05  # the runner asks for about 50 ms between messages


def text(value: str) -> types.TextContent:
    """Return one block of text."""
    return types.TextContent(text=value)


def image() -> types.ImageContent:
    """Return the smallest picture."""
    return types.ImageContent(data=PNG, mime_type="image/png")


def embedded(uri: str, media_type: str, content: str) -> types.EmbeddedResource:
    """Return a text resource inside a result."""
    return types.EmbeddedResource(resource=types.TextResourceContents(uri=uri, mime_type=media_type, text=content))


def constant(*blocks: types.ContentBlock, failed: bool = False) -> Fixture:
    """Return a tool that always answers the same."""

    async def answer(_ctx: Context, _params: types.CallToolRequestParams) -> Answer:
        return types.CallToolResult(content=list(blocks), is_error=failed)

    return answer


async def _log(ctx: Context, message: str) -> None:
    params = types.LoggingMessageNotificationParams(level="info", logger="fixture", data=message)
    await ctx.session.send_notification(
        types.LoggingMessageNotification(params=params), related_request_id=ctx.request_id
    )


async def _with_logging(ctx: Context, _params: types.CallToolRequestParams) -> Answer:
    for message in ("Tool execution started", "Tool processing data", "Tool execution completed"):
        await _log(ctx, message)
        await anyio.sleep(_PAUSE)
    return types.CallToolResult(content=[text("logged three times")])


async def _with_progress(ctx: Context, _params: types.CallToolRequestParams) -> Answer:
    for progress in (0, 50, 100):
        await ctx.session.report_progress(progress, 100)
        await anyio.sleep(_PAUSE)
    return types.CallToolResult(content=[text("progressed to the end")])


async def _streaming(ctx: Context, _params: types.CallToolRequestParams) -> Answer:
    await ctx.session.report_progress(1, 1)
    return types.CallToolResult(content=[text("nothing but the answer on this stream")])


async def _missing_capability(ctx: Context, _params: types.CallToolRequestParams) -> Answer:
    declared = ctx.session.client_capabilities
    if declared is None or declared.sampling is None:
        required: dict[str, Any] = {"requiredCapabilities": {"sampling": {}}}
        raise MCPError(types.MISSING_REQUIRED_CLIENT_CAPABILITY, "This tool needs sampling", required)
    return types.CallToolResult(content=[text("sampling is there")])


def _asks(schema: Mapping[str, Any], words: str) -> Fixture:
    """Return a tool that asks its user over the back-channel of the handshake eras."""

    async def answer(ctx: Context, params: types.CallToolRequestParams) -> Answer:
        message = str((params.arguments or {}).get("message", "Please answer"))
        reply = await ctx.session.elicit_form(message, dict(schema), related_request_id=ctx.request_id)
        return types.CallToolResult(
            content=[text(f"{words}: action={reply.action}, content={json.dumps(reply.content)}")]
        )

    return answer


async def _sampling(ctx: Context, params: types.CallToolRequestParams) -> Answer:
    request = sampling(str((params.arguments or {})["prompt"]))
    reply = await ctx.session.send_request(
        request, types.CreateMessageResult, metadata=ServerMessageMetadata(related_request_id=ctx.request_id)
    )
    said = reply.content.text if isinstance(reply.content, types.TextContent) else "?"
    return types.CallToolResult(content=[text(f"LLM response: {said}")])


def sampling(prompt: str, most: int = 100) -> types.CreateMessageRequest:
    """Return a request for a completion."""
    message = types.SamplingMessage(role="user", content=text(prompt))
    return types.CreateMessageRequest(params=types.CreateMessageRequestParams(messages=[message], max_tokens=most))


def _schema(properties: dict[str, Any], *, required: bool = True) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties) if required else []}


_PERSON = {
    "username": {"type": "string", "description": "User's response"},
    "email": {"type": "string", "description": "User's email address"},
}
_DEFAULTS = {
    "name": {"type": "string", "default": "John Doe"},
    "age": {"type": "integer", "default": 30},
    "score": {"type": "number", "default": 95.5},
    "status": {"type": "string", "enum": ["active", "inactive", "pending"], "default": "active"},
    "verified": {"type": "boolean", "default": True},
}
_CHOICES = ["option1", "option2", "option3"]
_NAMES = ["First", "Second", "Third"]
_ENUMS = {
    "untitledSingle": {"type": "string", "enum": _CHOICES},
    "titledSingle": {
        "type": "string",
        "oneOf": [{"const": f"value{n}", "title": f"{name} Option"} for n, name in enumerate(_NAMES, 1)],
    },
    "legacyEnum": {
        "type": "string",
        "enum": ["opt1", "opt2", "opt3"],
        "enumNames": ["Option One", "Option Two", "Option Three"],
    },
    "untitledMulti": {"type": "array", "items": {"type": "string", "enum": _CHOICES}},
    "titledMulti": {
        "type": "array",
        "items": {"anyOf": [{"const": f"value{n}", "title": f"{name} Choice"} for n, name in enumerate(_NAMES, 1)]},
    },
}

TOOLS: dict[str, Fixture] = {
    "test_simple_text": constant(text("This is a simple text response for testing.")),
    "test_image_content": constant(image()),
    "test_audio_content": constant(types.AudioContent(data=WAV, mime_type="audio/wav")),
    "test_embedded_resource": constant(
        embedded("test://embedded-resource", "text/plain", "This is an embedded resource content.")
    ),
    "test_multiple_content_types": constant(
        text("Multiple content types test:"),
        image(),
        embedded("test://mixed-content-resource", "application/json", '{"test":"data","value":123}'),
    ),
    "test_error_handling": constant(text("This tool intentionally returns an error for testing"), failed=True),
    "test_tool_with_logging": _with_logging,
    "test_logging_tool": constant(text("This tool logs nothing unasked.")),
    "test_tool_with_progress": _with_progress,
    "test_streaming_elicitation": _streaming,
    "test_missing_capability": _missing_capability,
    "test_sampling": _sampling,
    "test_elicitation": _asks(_schema(_PERSON), "User response"),
    "test_elicitation_sep1034_defaults": _asks(_schema(_DEFAULTS, required=False), "Elicitation completed"),
    "test_elicitation_sep1330_enums": _asks(_schema(_ENUMS, required=False), "Elicitation completed"),
}

RESOURCES = [
    types.Resource(uri="test://static-text", name="text", description="Text", mime_type="text/plain"),
    types.Resource(uri="test://static-binary", name="binary", description="Picture", mime_type="image/png"),
    types.Resource(uri="test://watched-resource", name="watched", description="May change", mime_type="text/plain"),
]
TEMPLATE = types.ResourceTemplate(
    uri_template="test://template/{id}/data", name="template", description="Data", mime_type="application/json"
)


def resource(uri: str) -> types.TextResourceContents | types.BlobResourceContents | None:
    """Return the content of a fixture resource, None where there is none."""
    if uri == "test://static-text":
        content = "This is the content of the static text resource."
        return types.TextResourceContents(uri=uri, mime_type="text/plain", text=content)
    if uri == "test://static-binary":
        return types.BlobResourceContents(uri=uri, mime_type="image/png", blob=PNG)
    if match := re.fullmatch(r"test://template/([0-9a-z]+)/data", uri):
        body = {"id": match[1], "templateTest": True, "data": f"Data for ID: {match[1]}"}
        return types.TextResourceContents(uri=uri, mime_type="application/json", text=json.dumps(body))
    return None


def _argument(name: str) -> types.PromptArgument:
    return types.PromptArgument(name=name, description="For testing", required=True)


PROMPTS = [
    types.Prompt(name="test_simple_prompt", description="No arguments"),
    types.Prompt(
        name="test_prompt_with_arguments", description="Two arguments", arguments=[_argument("arg1"), _argument("arg2")]
    ),
    types.Prompt(
        name="test_prompt_with_embedded_resource", description="A resource", arguments=[_argument("resourceUri")]
    ),
    types.Prompt(name="test_prompt_with_image", description="A picture"),
    types.Prompt(name="test_input_required_result_prompt", description="Asks first"),
]


def prompt(name: str, arguments: Mapping[str, str]) -> types.GetPromptResult:
    """Return a fixture prompt."""
    blocks: list[types.ContentBlock]
    match name:
        case "test_simple_prompt":
            blocks = [text("This is a simple prompt for testing.")]
        case "test_prompt_with_arguments":
            blocks = [text(f"Prompt with arguments: arg1='{arguments['arg1']}', arg2='{arguments['arg2']}'")]
        case "test_prompt_with_embedded_resource":
            inner = embedded(arguments["resourceUri"], "text/plain", "Embedded resource content for testing.")
            blocks = [inner, text("Please process the embedded resource above.")]
        case "test_prompt_with_image":
            blocks = [image(), text("Please analyze the image above.")]
        case _:
            raise MCPError(types.INVALID_PARAMS, f"Unknown prompt: {name}")
    return types.GetPromptResult(messages=[types.PromptMessage(role="user", content=block) for block in blocks])
