"""Two tenants on one HTTP server with a policy: each has its own tools, workspace and limits, from end to end."""

import json
import subprocess  # noqa: TID251 - the server is a process of its own, as in real life
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import mcp_types as types
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from tests.fixtures.callers import give_token
from tests.interaction.test_real_server import GLOVEBOX, over_http

from glovebox_server.mcp.server import DIGEST_META_KEY

pytestmark = [pytest.mark.driver("bubblewrap"), pytest.mark.usefixtures("runtime_dir")]

NAMES = ("support", "research", "stranger")
POLICY = """\
version = 1

[roles.support]
tools = ["list_workspace_files", "read_workspace_file"]
workspace = "{support}"

[roles.research]
tools = ["run_python", "list_workspace_files", "read_workspace_file"]
workspace = "{research}"
artifacts_mib = 1

[roles.research.narrow.run_python]
limits = {{ wall_seconds = 3 }}

[principals]
"token:support" = "support"
"token:research" = "research"

[[example]]
principal = "token:support"
call = {{ tool = "run_python", arguments = {{ code = "1" }} }}
expect = "deny"
rule = "role.tools"
"""


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """Return the options for a server of two tenants, each with a folder."""
    tmp_path.chmod(0o755)
    for name in ("support", "research"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text(f"of {name}")
    places = {name: tmp_path / name for name in ("support", "research")}
    (tmp_path / "policy.toml").write_text(POLICY.format(**places))
    return ["--state-dir", str(tmp_path / "state"), "--policy", str(tmp_path / "policy.toml")]


@contextmanager
def served(options: list[str], directory: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Run a server; give its URL, and a token for each name."""
    tokens = {name: give_token(directory / "state", name) for name in NAMES}
    with over_http(options, directory) as (url, _):
        yield url, tokens


@asynccontextmanager
async def client_of(url: str, token: str, mode: str, **abilities: Any) -> AsyncIterator[Client]:
    """One tenant's client."""
    async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {token}"}, timeout=60) as http:
        wire = streamable_http_client(f"{url}/mcp", http_client=http)
        async with Client(wire, mode=mode, **abilities) as client:
            yield client


async def capabilities(client: Client) -> dict[str, Any]:
    """The manifest as this caller reads it."""
    (content,) = (await client.read_resource("glovebox://capabilities")).contents
    assert isinstance(content, types.TextResourceContents)
    read: dict[str, Any] = json.loads(content.text)
    return read


async def prompts_are_theirs(has: Client, *others: Client) -> None:
    """Who has the tools that prompts name has those prompts, and completions of its own files; others do not."""
    assert [each.name for each in (await has.list_prompts()).prompts] == [
        "analyse_file",
        "compare_files",
        "explain_call",
    ]
    named, path = types.PromptReference(name="analyse_file"), {"name": "path", "value": ""}
    assert (await has.complete(named, path)).completion.values == ["research.txt"]
    assert "run_python" in str(await has.get_prompt("analyse_file", {"path": "research.txt"}))
    for other in others:
        assert [each.name for each in (await other.list_prompts()).prompts] == ["explain_call"]
        with pytest.raises(MCPError, match="Available: explain_call"):
            await other.get_prompt("analyse_file", {"path": "support.txt"})
        with pytest.raises(MCPError, match="Unknown prompt"):
            await other.complete(named, path)


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_two_tenants_share_a_server_and_nothing_else(options: list[str], tmp_path: Path, mode: str) -> None:
    """Each lists, sees and reads its own; what is the other's is refused or not there, for the reason that it is.

    The control for each refusal is the other tenant, for whom the same works.
    """
    with served(options, tmp_path) as (url, tokens):
        async with (
            client_of(url, tokens["support"], mode) as support,
            client_of(url, tokens["research"], mode) as research,
            client_of(url, tokens["stranger"], mode) as stranger,
        ):
            clients = {"support": support, "research": research, "stranger": stranger}
            listed = {name: await client.list_tools() for name, client in clients.items()}
            names = {name: [tool.name for tool in found.tools] for name, found in listed.items()}
            assert names["support"] == ["list_workspace_files", "read_workspace_file"]
            assert names["research"] == ["list_workspace_files", "read_workspace_file", "run_python"]
            assert names["stranger"] == []
            python = next(tool for tool in listed["research"].tools if tool.name == "run_python")
            assert python.input_schema["properties"]["timeout_seconds"]["maximum"] == 3

            for name, client in clients.items():
                facts = await capabilities(client)
                assert facts["role"] == ("" if name == "stranger" else name)
                assert [each["name"] for each in facts["tools"]] == names[name]
                assert facts["tools_digest"] == (listed[name].meta or {})[DIGEST_META_KEY]
                assert str(tmp_path) not in json.dumps(facts)
                with pytest.raises(MCPError) as unknown:
                    await client.call_tool("run_pythn", {"code": "1"})
                assert unknown.value.error.data == {"tools": names[name]}

            for own, other in (("support", "research"), ("research", "support")):
                found = await clients[own].call_tool("read_workspace_file", {"path": f"{own}.txt"})
                assert f"of {own}" in str(found.content)
                missing = await clients[own].call_tool("read_workspace_file", {"path": f"{other}.txt"})
                assert missing.is_error
                assert "no such file" in str(missing.content)

            await prompts_are_theirs(research, support, stranger)

            ran = await research.call_tool("run_python", {"code": "import os; sorted(os.listdir('/workspace'))"})
            assert ran.structured_content["value"] == "['research.txt']"
            refused = await support.call_tool("run_python", {"code": "1"})
            assert refused.structured_content["refused"]["rule"] == "role.tools"
            nobody = await stranger.call_tool("read_workspace_file", {"path": "support.txt"})
            assert nobody.structured_content["refused"]["rule"] == "policy.principal"

            long = await research.call_tool("run_python", {"code": "while True: pass"})
            assert long.structured_content["ended"] == "timed_out"
            code = "open('/output/a', 'wb').write(bytes(1 << 20)); open('/output/b', 'w').write('b')"
            much = await research.call_tool("run_python", {"code": code})
            assert "Your artifacts may hold 1048576 bytes" in str(much.content)

    records = [json.loads(line) for line in (tmp_path / "state/audit/audit.jsonl").read_text().splitlines()]
    decided = [each["data"] for each in records if each["kind"] == "call.decided"]
    roles = {each["principal"]: each["role"] for each in decided}
    assert roles == {"token:support": "support", "token:research": "research", "token:stranger": ""}
    assert len({each["policy_digest"] for each in decided}) == 1
    signed = [each["data"] for each in records if each["kind"] == "receipt.signed"]
    assert len(signed) == sum(each["effect"] == "allow" for each in decided)


async def test_what_a_token_is_bound_to_narrows_what_its_caller_may_do(options: list[str], tmp_path: Path) -> None:
    """A token made with a role and a workflow: each has to allow. Without the workflow it has the role whole (control).

    A role that the policy does not have is refused when the token is made.
    """
    path = tmp_path / "policy.toml"
    more = '[roles.lister]\ntools = ["list_workspace_files", "run_python"]\n[workflows]\nnightly = "lister"\n'
    path.write_text(path.read_text().replace("[principals]", f"{more}[principals]"))
    made = {}
    for name, bound in (("night", ["--role", "support", "--workflow", "nightly"]), ("day", ["--role", "support"])):
        command = [GLOVEBOX, "token", "create", name, *bound, "--json", *options]
        done = await anyio.run_process(command)
        made[name] = json.loads(done.stdout)["token"]
    wrong = await anyio.run_process([GLOVEBOX, "token", "create", "x", "--role", "suport", *options], check=False)
    assert wrong.returncode != 0
    assert b"suport" in wrong.stderr
    with served(options, tmp_path) as (url, _):
        async with client_of(url, made["night"], "auto") as night, client_of(url, made["day"], "auto") as day:
            assert [tool.name for tool in (await night.list_tools()).tools] == ["list_workspace_files"]
            assert [tool.name for tool in (await day.list_tools()).tools] == [
                "list_workspace_files",
                "read_workspace_file",
            ]
            for client, role in ((night, "support+lister"), (day, "support")):
                assert (await capabilities(client))["role"] == role
                refused = await client.call_tool("run_python", {"code": "1"})
                assert refused.structured_content["refused"]["rule"] == "role.tools"
            listed = await night.call_tool("list_workspace_files", {})
            assert "support.txt" in str(listed.content)


def test_a_policy_that_is_wrong_starts_nothing(options: list[str], tmp_path: Path) -> None:
    """Exit code 2, with file, line, key and nearest, before the state directory has a log."""
    path = tmp_path / "policy.toml"
    path.write_text(path.read_text().replace('"token:support" = "support"', '"token:support" = "suport"'))
    command = [GLOVEBOX, "serve", "--transport", "http", "--port", "0", *options]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    line = path.read_text().splitlines().index('"token:support" = "suport"') + 1
    expected = f'{path}:{line}: principals.token:support: there is no role "suport". The nearest is "support".'
    assert expected in done.stderr.replace("\n", " ")
    assert not (tmp_path / "state" / "audit").exists()
