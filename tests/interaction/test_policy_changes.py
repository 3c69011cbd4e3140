"""A policy that is changed while two servers run on one state directory: taken by both, or by neither."""

import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import httpx2
import mcp_types as types
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream
from click.testing import CliRunner
from mcp import Client
from mcp.server.subscriptions import PromptsListChanged, ToolsListChanged
from tests.fixtures.callers import give_token
from tests.interaction import node
from tests.interaction.served import Era, Transport, connected, plain_profile, until, whole_server
from tests.interaction.test_real_server import GLOVEBOX, over_http
from tests.interaction.test_tenants import NAMES, options

from glovebox_profiles.load.loader import SHIPPED
from glovebox_server import app as apps
from glovebox_server.cli.main import main
from glovebox_server.core import rights
from glovebox_server.transport import serve

__all__ = ["options"]

pytestmark = [pytest.mark.driver("bubblewrap"), pytest.mark.usefixtures("runtime_dir")]
OFTEN = """
from glovebox_server.cli.main import main
from glovebox_server.core import rights
from glovebox_server.transport import serve

rights.SECONDS = serve.TOKEN_SECONDS = 0.05
main()
"""
"""`glovebox` that looks for changes as often as a server of this process."""


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of this process looks for changes more often."""
    monkeypatch.setattr(rights, "SECONDS", 0.05)
    monkeypatch.setattr(serve, "TOKEN_SECONDS", 0.05)


async def _until(holds: Callable[[], Awaitable[bool]]) -> None:
    with anyio.fail_after(20):
        while not await holds():  # noqa: ASYNC110 - what is awaited is another process
            await anyio.sleep(0.05)


async def _rule(client: Client) -> str | None:
    """By which rule a program is refused."""
    found = (await client.call_tool("run_python", {"code": "1"})).structured_content or {}
    return found["refused"]["rule"] if "refused" in found else None


def _write(path: Path, text: str) -> None:
    new = path.with_name("new")
    new.write_text(text)
    new.replace(path)


async def test_a_change_is_in_force_in_every_server_and_a_broken_one_in_none(
    options: list[str], tmp_path: Path
) -> None:
    """A role gets a tool and loses it again; a call under way ends well; a file that is wrong is told in /health.

    One server is in this process, the other is a process of its own.
    """
    path = tmp_path / "policy.toml"
    text = path.read_text()
    wider = text.replace('tools = ["list_workspace_files", "read_workspace_file"]', 'tools = ["run_python"]', 1)
    wider = wider.replace('expect = "deny"\nrule = "role.tools"', 'expect = "allow"')
    for name in NAMES:
        give_token(tmp_path / "state", name)
    with over_http(options, tmp_path, (sys.executable, "-c", OFTEN)) as (other, _):
        async with (
            whole_server(options, "http", *NAMES) as server,
            server.client("http", "modern", "support") as one,
            replace(server, url=other).client("http", "modern", "support") as two,
        ):

            async def both(rule: str | None) -> bool:
                return {await _rule(one), await _rule(two)} == {rule}

            async def health(base: str) -> dict[str, Any]:
                async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {server.tokens['support']}"}) as http:
                    told: dict[str, Any] = (await http.get(f"{base}/health")).json()
                    del http.headers["Authorization"]
                    ready = (await http.get(f"{base}/ready")).status_code == 200
                # A policy that was taken between the two answers is no contradiction.
                return told if ready != told["unusable_policy"] else await health(base)

            assert await both("role.tools")
            _write(path, wider)
            await _until(lambda: both(None))
            assert [tool.name for tool in (await one.list_tools()).tools] == ["run_python"]
            ended: list[Any] = []

            log = tmp_path / "state/audit/audit.jsonl"
            before = log.read_bytes().count(b'"sandbox.started"')

            async def long() -> None:
                code = "import os, time\nwhile not os.path.exists('/workspace/go'): time.sleep(0.05)\nprint('done')"
                ended.append((await one.call_tool("run_python", {"code": code})).structured_content)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(long)
                await until(lambda: log.read_bytes().count(b'"sandbox.started"') > before, 20)
                _write(path, text)
                await _until(lambda: both("role.tools"))
                assert not ended
                (tmp_path / "support" / "go").touch()
            assert ended[0]["stdout"]["text"] == "done\n"

            _write(path, wider.replace("version = 1", "version = 2"))

            async def told(unusable: bool) -> bool:
                return [(await health(each))["unusable_policy"] for each in (server.url, other)] == [unusable] * 2

            await _until(lambda: told(unusable=True))
            assert await both("role.tools")
            doctor = await anyio.to_thread.run_sync(CliRunner().invoke, main, ["doctor", *options])
            assert "version" in doctor.stdout
            _write(path, text)
            await _until(lambda: told(unusable=False))

            # A token that is bound to a role which only a later policy has comes in once that is in effect.
            _write(path, text.replace("[principals]", '[roles.late]\ntools = ["run_python"]\n[principals]'))
            made = CliRunner().invoke(main, ["token", "create", "late", "--role", "late", "--json", *options])
            headers = {"Authorization": f"Bearer {json.loads(made.stdout)['token']}"}
            async with httpx2.AsyncClient() as http:

                async def known() -> bool:
                    found = [await http.get(f"{each}/health", headers=headers) for each in (server.url, other)]
                    return [each.status_code for each in found] == [200, 200]

                await _until(known)
    kinds = [json.loads(line)["kind"] for line in log.read_text().splitlines()]
    assert kinds.count("policy.changed") == 2 * 3
    assert kinds.count("policy.refused") == 2


ROLES = """\
version = 1
[roles.reader]
tools = ["read_workspace_file"]
[roles.lister]
tools = ["list_workspace_files"]
[principals]
"local:{uid}" = "reader"
"token:one" = "reader"
"token:two" = "lister"
[[example]]
principal = "token:two"
call = {{ tool = "run_python", arguments = {{ code = "1" }} }}
expect = "deny"
"""


class Told:
    """What a client is told of its lists, and that its list of tools was read before."""

    def __init__(self, era: Era) -> None:
        self.era = era
        self.methods: list[str] = []

    async def __call__(self, message: object) -> None:
        """Keep what a client of the handshake eras is sent."""
        if self.era == "legacy" and isinstance(
            message, types.ToolListChangedNotification | types.PromptListChangedNotification
        ):
            self.methods.append(message.method)

    @asynccontextmanager
    async def follow(self, client: Client) -> AsyncIterator[None]:
        """Read the list, and hear what becomes of it, for the length of the block."""
        await client.list_tools()
        capabilities = client.server_capabilities
        assert capabilities.tools is not None
        assert capabilities.prompts is not None
        assert capabilities.resources is not None
        assert capabilities.tools.list_changed is capabilities.prompts.list_changed is True
        assert capabilities.resources.list_changed is False
        if self.era == "legacy":
            yield
            return

        async def listen(*, task_status: anyio.abc.TaskStatus[None]) -> None:
            async with client.listen(tools_list_changed=True, prompts_list_changed=True) as events:
                task_status.started()
                async for event in events:
                    names = {ToolsListChanged: "tools", PromptsListChanged: "prompts"}
                    self.methods.append(f"notifications/{names[type(event)]}/list_changed")

        async with anyio.create_task_group() as tasks:
            await tasks.start(listen)
            yield
            tasks.cancel_scope.cancel()


@pytest.fixture
def roles(tmp_path: Path) -> list[str]:
    """Options of a server whose policy is ``ROLES``."""
    tmp_path.chmod(0o755)
    (tmp_path / "policy.toml").write_text(ROLES.format(uid=os.getuid()))
    return ["--state-dir", str(tmp_path / "state"), "--policy", str(tmp_path / "policy.toml")]


@pytest.mark.parametrize("era", ["legacy", "modern"])
async def test_whose_lists_a_change_makes_others_is_told_and_nobody_else(
    roles: list[str], tmp_path: Path, era: Era
) -> None:
    """Over HTTP: the lister's own change, after the reader's, is the first that it hears of."""
    path, text = tmp_path / "policy.toml", ROLES.format(uid=os.getuid())
    told = {name: Told(era) for name in ("one", "two")}
    wider = text.replace('["read_workspace_file"]', '["read_workspace_file", "run_python"]')
    async with (
        whole_server(roles, "http", *told) as server,
        server.client("http", era, "one", message_handler=told["one"]) as one,
        server.client("http", era, "two", message_handler=told["two"]) as two,
        told["one"].follow(one),
        told["two"].follow(two),
    ):
        _write(path, wider)
        await until(lambda: len(told["one"].methods) == 2, 20)
        assert told["one"].methods == ["notifications/tools/list_changed", "notifications/prompts/list_changed"]
        assert [each.name for each in (await one.list_tools()).tools] == ["read_workspace_file", "run_python"]
        assert told["two"].methods == []
        _write(path, wider.replace('tools = ["list_workspace_files"]', "tools = []"))
        await until(lambda: bool(told["two"].methods), 20)
        assert (await two.list_tools()).tools == []
        assert told["two"].methods == ["notifications/tools/list_changed"]
        assert len(told["one"].methods) == 2


@pytest.mark.parametrize(("transport", "era"), [("stdio", "legacy"), ("stdio", "modern"), ("sse", "legacy")])
async def test_a_client_of_another_transport_is_told_too(
    roles: list[str], tmp_path: Path, transport: Transport, era: Era
) -> None:
    """Over stdio and SSE; nobody hears of a change that leaves his lists as they are."""
    path, told = tmp_path / "policy.toml", Told(era)
    text = ROLES.format(uid=os.getuid()).replace("token:one", "token:default")
    path.write_text(text)
    async with connected(transport, era, roles, message_handler=told) as client, told.follow(client):
        _write(path, text.replace('["list_workspace_files"]', "[]"))
        log = tmp_path / "state/audit/audit.jsonl"
        await until(lambda: b'"policy.changed"' in log.read_bytes(), 20)
        # The tools stay the same, but what one may do does not, so neither does what is said of it.
        asks = '"read_workspace_file"]\nnarrow.read_workspace_file = { approval = "ask" }'
        _write(path, text.replace('"read_workspace_file"]', asks))
        await until(lambda: bool(told.methods), 20)
        (tool,) = (await client.list_tools()).tools
        assert str(tool.description).endswith(" A person must approve each call.")
        assert told.methods == ["notifications/tools/list_changed"]


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("era", ["legacy", "modern"])
async def test_a_list_is_said_to_change_where_it_may(
    era: Era, own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The capability is claimed in both eras by a server with profiles of its own, and by none without anything."""
    if not own:
        monkeypatch.setattr(apps, "profile_directories", lambda settings: [SHIPPED, settings.profiles_dir][:1])
    async with connected("stdio", era, ["--state-dir", str(tmp_path / "state")]) as client:
        found = client.server_capabilities
        assert found.tools is not None
        assert found.prompts is not None
        assert found.resources is not None
        claims = [found.tools.list_changed, found.prompts.list_changed, found.resources.list_changed]
        assert claims == [own, own, False]
        assert found.resources.subscribe


@pytest.mark.parametrize(("transport", "era"), [("stdio", "legacy"), ("http", "modern")])
async def test_a_profile_that_changes_is_in_force_for_the_next_call(
    transport: Transport, era: Era, tmp_path: Path
) -> None:
    """A call under way keeps what it began with; its client is told if what it reads of a tool is another, not else."""
    (tmp_path / "workspace").mkdir()
    tmp_path.chmod(0o755)
    own, log, go = (tmp_path / each for each in ("config/profiles/run_python.toml", "state/audit/audit.jsonl", "go"))
    options = ["--state-dir", str(tmp_path / "state"), "--workspace", str(tmp_path / "workspace")]
    go = tmp_path / "workspace" / "go"
    told = Told(era)
    async with connected(transport, era, options, message_handler=told) as client, told.follow(client):
        (tool,) = [each for each in (await client.list_tools()).tools if each.name == "run_python"]
        assert "At most 30 s" in str(tool.description)
        ended: list[Any] = []

        async def long() -> None:
            code = "import os, time\nwhile not os.path.exists('/workspace/go'): time.sleep(0.05)\nprint('done')"
            ended.append((await client.call_tool("run_python", {"code": code})).structured_content)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(long)
            await until(lambda: b'"sandbox.started"' in log.read_bytes(), 20)
            _write(own, plain_profile(pids="9"))  # of which no client reads
            await until(lambda: log.read_bytes().count(b'"changed":{') == 1, 20)
            _write(own, plain_profile(wall_seconds="2", workspace='"none"'))
            await until(lambda: bool(told.methods), 20)
            (tool,) = [each for each in (await client.list_tools()).tools if each.name == "run_python"]
            assert "At most 2 s" in str(tool.description)
            assert not ended
            go.touch()
        assert ended[0]["stdout"]["text"] == "done\n"
        found = await client.call_tool("run_python", {"code": "import os; print(os.path.exists('/workspace/go'))"})
        assert (found.structured_content or {})["stdout"]["text"] == "False\n"
        own.write_text("risk = ")
        await until(lambda: b'"profiles.refused"' in log.read_bytes(), 20)
    assert told.methods == ["notifications/tools/list_changed"]


@pytest.mark.parametrize(
    ("sdk", "transport"), [("v1", "http"), ("v2", "stdio"), ("v2-modern", "http"), ("v2-modern", "stdio")]
)
async def test_the_typescript_sdk_reads_its_list_again(
    sdk: str, transport: str, roles: list[str], tmp_path: Path
) -> None:
    """A client by other authors, which asks to be told, is told, and finds the new list."""
    path, text = tmp_path / "policy.toml", ROLES.format(uid=os.getuid())
    place = node.directory()
    async with AsyncExitStack() as stack:
        target = [GLOVEBOX, "serve", *roles]
        if transport == "http":
            server = await stack.enter_async_context(whole_server(roles, "http", "one"))
            target = [server.url, server.tokens["one"]]
        command = ["node", str(node.HERE / "typescript" / "client.mjs"), sdk, transport, *target]
        variables = {**node.variables(place), "LIST_CHANGES": "1"}
        async with await anyio.open_process(command, env=variables, stderr=None) as client:
            assert client.stdout is not None
            lines = BufferedByteReceiveStream(client.stdout)
            with anyio.fail_after(60):
                assert json.loads(await lines.receive_until(b"\n", 1 << 16)) == ["read_workspace_file"]
                _write(path, text.replace('"read_workspace_file"', '"list_workspace_files"'))
                assert json.loads(await lines.receive_until(b"\n", 1 << 16)) == ["list_workspace_files"]
                assert await client.wait() == 0
