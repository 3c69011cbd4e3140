"""Two tenants on one HTTP server with a policy: each has its own tools, workspace and limits, from end to end."""

import json
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from click.testing import CliRunner
from mcp import Client
from mcp.shared.exceptions import MCPError
from tests.interaction.served import Era, plain_profile, whole_server

from glovebox_server.cli.main import main
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
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles/run_python.toml").write_text(plain_profile())
    return ["--state-dir", str(tmp_path / "state"), "--policy", str(tmp_path / "policy.toml"),
            "--profiles-dir", str(tmp_path / "profiles")]  # fmt: skip


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


@pytest.mark.parametrize("era", ["legacy", "modern"])
async def test_two_tenants_share_a_server_and_nothing_else(options: list[str], tmp_path: Path, era: Era) -> None:
    """Each lists, sees and reads its own; what is the other's is refused or not there, for the reason that it is.

    The control for each refusal is the other tenant, for whom the same works.
    """
    async with (
        whole_server(options, "http", *NAMES) as server,
        server.client("http", era, "support") as support,
        server.client("http", era, "research") as research,
        server.client("http", era, "stranger") as stranger,
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

        long = await research.call_tool("run_python", {"code": "import time; time.sleep(60)"})
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
        done = CliRunner().invoke(main, ["token", "create", name, *bound, "--json", *options])
        made[name] = json.loads(done.stdout)["token"]
    wrong = CliRunner().invoke(main, ["token", "create", "x", "--role", "suport", *options])
    assert wrong.exit_code != 0
    assert "suport" in wrong.stderr
    async with whole_server(options, "http") as server:
        server.tokens.update(made)
        async with server.client("http", "modern", "night") as night, server.client("http", "modern", "day") as day:
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
    done = CliRunner().invoke(main, ["serve", "--transport", "http", "--port", "0", *options])
    assert done.exit_code == 2
    line = path.read_text().splitlines().index('"token:support" = "suport"') + 1
    expected = f'{path}:{line}: principals.token:support: there is no role "suport". The nearest is "support".'
    assert expected in done.stderr.replace("\n", " ")
    assert not (tmp_path / "state" / "audit").exists()
