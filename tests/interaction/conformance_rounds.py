"""The conformance runner's tools that ask for input and are called again with it (modern era). Not part of Glovebox.

State between the rounds is sealed and checked by our own surface (``mcp.asking.sealed``), as an approval's is.
"""

from collections.abc import Mapping

import mcp_types as types
from tests.interaction.conformance_fixtures import Answer, Fixture, sampling, text

from glovebox_server.mcp.delivery import Context

Params = types.CallToolRequestParams | types.GetPromptRequestParams


def _asked(message: str, field: str, kind: str = "string") -> types.ElicitRequest:
    schema = {"type": "object", "properties": {field: {"type": kind}}, "required": [field]}
    return types.ElicitRequest(params=types.ElicitRequestFormParams(message=message, requested_schema=schema))


def _required(requests: types.InputRequests, state: str | None = None) -> types.InputRequiredResult:
    return types.InputRequiredResult(input_requests=requests, request_state=state)


def _field(params: Params, key: str, field: str) -> str | None:
    answer = (params.input_responses or {}).get(key)
    if isinstance(answer, types.ElicitResult) and answer.action == "accept" and field in (answer.content or {}):
        return str((answer.content or {})[field])
    return None


def _done(words: str) -> types.CallToolResult:
    return types.CallToolResult(content=[text(words)])


async def _elicitation(_ctx: Context, params: types.CallToolRequestParams) -> Answer:
    name = _field(params, "user_name", "name")
    return _done(f"Hello, {name}!") if name else _required({"user_name": _asked("What is your name?", "name")})


async def _one_sample(_ctx: Context, params: types.CallToolRequestParams) -> Answer:
    answer = (params.input_responses or {}).get("capital_question")
    if isinstance(answer, types.CreateMessageResult) and isinstance(answer.content, types.TextContent):
        return _done(answer.content.text)
    return _required({"capital_question": sampling("What is the capital of France?")})


async def _roots(_ctx: Context, params: types.CallToolRequestParams) -> Answer:
    answer = (params.input_responses or {}).get("client_roots")
    if isinstance(answer, types.ListRootsResult):
        return _done(" ".join(str(root.uri) for root in answer.roots))
    return _required({"client_roots": types.ListRootsRequest(params=types.RequestParams())})


def _confirmed(prompt: str, words: str) -> Fixture:
    async def answer(_ctx: Context, params: types.CallToolRequestParams) -> Answer:
        if params.request_state is not None and params.input_responses:
            return _done(words)
        return _required({"confirm": _asked(prompt, "ok", "boolean")}, "asked")

    return answer


def _three() -> dict[str, types.InputRequest]:
    return {
        "user_name": _asked("What is your name?", "name"),
        "greeting": sampling("Generate a greeting", 50),
        "client_roots": types.ListRootsRequest(params=types.RequestParams()),
    }


async def _several(_ctx: Context, params: types.CallToolRequestParams) -> Answer:
    given = params.input_responses or {}
    if params.request_state is not None and _three().keys() <= given.keys():
        return _done("all three answered")
    return _required(_three(), "asked")


async def _rounds(_ctx: Context, params: types.CallToolRequestParams) -> Answer:
    state = params.request_state
    if state == "one" and (name := _field(params, "step1", "name")):
        return _required({"step2": _asked("Step 2: What is your favorite color?", "color")}, f"two {name}")
    if state and state.startswith("two ") and (color := _field(params, "step2", "color")):
        return _done(f"{state.removeprefix('two ')} likes {color}")
    return _required({"step1": _asked("Step 1: What is your name?", "name")}, "one")


async def _capabilities(ctx: Context, _params: types.CallToolRequestParams) -> Answer:
    declared = ctx.session.client_capabilities or types.ClientCapabilities()
    able: Mapping[str, object] = {
        "user_name": declared.elicitation,
        "greeting": declared.sampling,
        "client_roots": declared.roots,
    }
    requests = {key: request for key, request in _three().items() if able[key] is not None}
    return _required(requests, "asked") if requests else _done("nothing to ask this client")


async def prompt_round(params: types.GetPromptRequestParams) -> types.GetPromptResult | types.InputRequiredResult:
    """Return the prompt that asks first."""
    context = _field(params, "user_context", "context")
    if context is None:
        return _required({"user_context": _asked("What context should the prompt use?", "context")})
    return types.GetPromptResult(messages=[types.PromptMessage(role="user", content=text(f"Context: {context}"))])


ROUNDS: dict[str, Fixture] = {
    "test_input_required_result_elicitation": _elicitation,
    "test_input_required_result_sampling": _one_sample,
    "test_input_required_result_list_roots": _roots,
    "test_input_required_result_request_state": _confirmed("Please confirm", "state-ok"),
    "test_input_required_result_tampered_state": _confirmed("Please confirm", "state-ok"),
    "test_input_required_result_multiple_inputs": _several,
    "test_input_required_result_multi_round": _rounds,
    "test_input_required_result_capabilities": _capabilities,
}
