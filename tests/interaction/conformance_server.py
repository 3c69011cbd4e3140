"""``python -m tests.interaction.conformance_server DIRECTORY token|oauth``: ours, with what the official runner calls.

McpServer, gate and transports are the real ones. Two things are added around them: the runner's fixtures, tried before
our own tools, and a token on each request, because the runner cannot send one. Prints its URL as one line.
"""

import contextlib
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import mcp_types as types
import uvicorn
from pydantic import BaseModel
from starlette.types import ASGIApp, Receive, Scope, Send
from tests.fixtures.callers import a_token
from tests.fixtures.issuers import an_issuer
from tests.interaction.conformance_fixtures import PROMPTS, RESOURCES, TEMPLATE, TOOLS, prompt, resource
from tests.interaction.conformance_rounds import ROUNDS, prompt_round
from tests.interaction.fakes import as_app, fake_app

from glovebox_server.mcp.delivery import Context
from glovebox_server.mcp.server import McpServer
from glovebox_server.transport import logs
from glovebox_server.transport.auth import AuthMiddleware
from glovebox_server.transport.oauth.authority import Scopes, TokenAuthority
from glovebox_server.transport.oauth.issuer import OAuth
from glovebox_server.transport.serve import by_token, http_application
from glovebox_server.transport.tokens import Callers

TOKEN = "a-token-for-the-runner-of-40-characters-"  # noqa: S105 - of no other server


class Fixtures:
    """Handlers that know the runner's fixtures and leave everything else to ours."""

    def __init__(self, surface: McpServer) -> None:
        """Put them in front of the surface's own handlers."""
        self._tools = TOOLS | ROUNDS
        self._server = surface.server
        self._ours: dict[str, Any] = {}
        self._wrap("tools/list", types.PaginatedRequestParams, self._list_tools)
        self._wrap("tools/call", types.CallToolRequestParams, self._call_tool)
        self._wrap("resources/list", types.PaginatedRequestParams, self._list_resources)
        self._wrap("resources/templates/list", types.PaginatedRequestParams, self._list_templates)
        self._wrap("resources/read", types.ReadResourceRequestParams, self._read_resource)
        self._wrap("resources/subscribe", types.SubscribeRequestParams, self._subscribe)
        self._wrap("prompts/list", types.PaginatedRequestParams, self._list_prompts)
        self._wrap("prompts/get", types.GetPromptRequestParams, self._get_prompt)
        self._wrap("completion/complete", types.CompleteRequestParams, self._complete)

    def _wrap(self, method: str, params: type[BaseModel], handler: Callable[[Context, Any], Awaitable[Any]]) -> None:
        entry = self._server.get_request_handler(method)
        self._ours[method] = entry.handler if entry else None
        self._server.add_request_handler(method, params, handler)

    async def _list_tools(self, ctx: Context, params: types.PaginatedRequestParams) -> types.ListToolsResult:
        result: types.ListToolsResult = await self._ours["tools/list"](ctx, params)
        free = {"type": "object"}
        extra = [types.Tool(name=name, description="Fixture.", input_schema=free) for name in sorted(self._tools)]
        return result.model_copy(update={"tools": [*result.tools, *extra]})

    async def _call_tool(self, ctx: Context, params: types.CallToolRequestParams) -> Any:
        fixture = self._tools.get(params.name)
        return await (fixture(ctx, params) if fixture else self._ours["tools/call"](ctx, params))

    async def _list_resources(self, _ctx: Context, _params: object) -> types.ListResourcesResult:
        return types.ListResourcesResult(resources=RESOURCES)

    async def _list_templates(self, ctx: Context, params: object) -> types.ListResourceTemplatesResult:
        result: types.ListResourceTemplatesResult = await self._ours["resources/templates/list"](ctx, params)
        return types.ListResourceTemplatesResult(resource_templates=[*result.resource_templates, TEMPLATE])

    async def _read_resource(self, ctx: Context, params: types.ReadResourceRequestParams) -> Any:
        found = resource(params.uri)
        if found is None:
            return await self._ours["resources/read"](ctx, params)
        return types.ReadResourceResult(contents=[found])

    async def _subscribe(self, ctx: Context, params: types.SubscribeRequestParams) -> Any:
        fixture = params.uri.startswith("test://")
        return types.EmptyResult() if fixture else await self._ours["resources/subscribe"](ctx, params)

    async def _list_prompts(self, _ctx: Context, _params: object) -> types.ListPromptsResult:
        return types.ListPromptsResult(prompts=PROMPTS)

    async def _get_prompt(self, _ctx: Context, params: types.GetPromptRequestParams) -> Any:
        if params.name == "test_input_required_result_prompt":
            return await prompt_round(params)
        return prompt(params.name, params.arguments or {})

    async def _complete(self, _ctx: Context, _params: object) -> types.CompleteResult:
        return types.CompleteResult(completion=types.Completion(values=[], total=0, has_more=False))


def _with_token(inner: ASGIApp, token: str) -> ASGIApp:
    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["headers"] = [*scope["headers"], (b"authorization", f"Bearer {token}".encode())]
        await inner(scope, receive, send)

    return application


async def _main(directory: Path, way: str) -> None:
    logs.to_stderr("warning")
    async with fake_app(directory) as app, AsyncExitStack() as stack:
        surface = McpServer(as_app(app), by_token)
        Fixtures(surface)
        with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
            port = listener.getsockname()[1]
            hosts = [f"127.0.0.1:{port}", f"localhost:{port}"]
            callers = Callers({"runner": a_token("runner", TOKEN)})
            inner, _ = http_application(surface, callers, subjects=way == "oauth")
            authority, token = None, TOKEN
            if way == "oauth":
                issuer = await stack.enter_async_context(an_issuer())
                authority = TokenAuthority(OAuth(issuer=issuer.url), hosts, Scopes())
                await authority.issuer.fetch()
                tasks = await stack.enter_async_context(anyio.create_task_group())
                stack.callback(tasks.cancel_scope.cancel)
                tasks.start_soon(authority.issuer.follow)
                tasks.start_soon(authority.checks.follow)
                token = issuer.token(f"http://{hosts[0]}/mcp", exp=int(time.time()) + 3600)
            gate = AuthMiddleware(inner, hosts=hosts, callers=callers, authority=authority)
            config = uvicorn.Config(_with_token(gate, token), log_config=None, ws="none", timeout_graceful_shutdown=1)
            sys.stdout.write(f"http://127.0.0.1:{port}/mcp\n")
            sys.stdout.flush()
            await uvicorn.Server(config).serve(sockets=[listener])


if __name__ == "__main__":
    anyio.run(_main, Path(sys.argv[1]), sys.argv[2])
