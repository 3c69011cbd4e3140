"""Callers that come with access tokens: real clients that sign in, at two implementations of an identity provider."""

import json
import re
import subprocess  # noqa: TID251 - the identity provider is a process of its own
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import httpx2
import pytest
from tests.fixtures.issuers import SCOPES, an_issuer
from tests.interaction import node
from tests.interaction.served import served
from tests.interaction.sign_in import CALLBACK, Browser, Storage, known, no_page, signed_in
from tests.interaction.test_real_server import over_http

from glovebox_audit import read
from glovebox_audit.chain import Record
from glovebox_server.transport.oauth.issuer import OAuth


def decided(directory: Path) -> list[Record]:
    """The decisions in the log."""
    records = [line.record for line in read.tail(directory / "audit", 100) if line.record]
    return [record for record in records if record.kind == "call.decided"]


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_a_client_that_knows_only_the_address_signs_in_and_calls(mode: str, tmp_path: Path) -> None:
    """It is told where, registers, gets a token with PKCE for this server, and is its subject in the record."""
    async with an_issuer() as issuer, served(tmp_path, "http", oauth=OAuth(issuer=issuer.url)) as server:
        browser, storage = Browser(no_page), Storage()
        async with signed_in(server.url, browser, storage, mode=mode) as client:
            result = await client.call_tool("run_python", {"code": "1"})
            assert result.structured_content is not None
            assert result.structured_content["stdout"] == "echo 1"
        assert len(storage.every) == len(browser.asked) == 1
    (record,) = decided(tmp_path)
    assert record.data["principal"] == f"oauth:{issuer.url}#alice"
    assert record.data["user"].startswith("Alice via ")


@pytest.mark.parametrize("sdk", ["v1", "v2"])
async def test_the_typescript_sdk_signs_in_too(sdk: str, tmp_path: Path) -> None:
    """Both major versions: for this server as the resource, with PKCE."""
    place = node.directory()
    async with an_issuer() as issuer, served(tmp_path, "http", oauth=OAuth(issuer=issuer.url)) as server:
        script = str(node.HERE / "typescript" / "sign_in.mjs")
        printed = await anyio.to_thread.run_sync(node.run, place, "node", script, sdk, server.url)
        assert json.loads(printed) == {
            "refused": "UnauthorizedError",
            "asked": [{"resource": f"{server.url}/mcp", "pkce": "S256"}],
            "stdout": "echo 1",
        }
    (record,) = decided(tmp_path)
    assert record.data["principal"] == f"oauth:{issuer.url}#alice"


@contextmanager
def oidc_provider() -> Iterator[str]:
    """An identity provider by another author, in a process of its own; gives its issuer."""
    place = node.directory()
    command = ["node", str(node.HERE / "typescript" / "provider.mjs"), CALLBACK, *SCOPES]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=node.variables(place)) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


async def sign_in(http: httpx2.AsyncClient, answer: httpx2.Response) -> httpx2.Response:
    """Fill the form that the provider shows: who it is, then that it is so."""
    asked = re.search(r'name="prompt" value="(login|consent)"', answer.text)
    assert asked, answer.text[:800]
    form = {"prompt": asked[1], "login": "bob@example.org", "password": "any"}
    return await http.post(str(answer.url), data=form)


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_the_same_at_a_provider_by_another_author(mode: str, tmp_path: Path) -> None:
    """``oidc-provider`` for Node: registration, sign-in, consent, JWT with the server as its audience."""
    with oidc_provider() as issuer:
        async with served(tmp_path, "http", oauth=OAuth(issuer=issuer)) as server:
            browser, storage = Browser(sign_in), Storage()
            async with signed_in(server.url, browser, storage, mode=mode) as client:
                result = await client.call_tool("run_python", {"code": "1"})
                assert result.structured_content is not None
                assert result.structured_content["stdout"] == "echo 1"
    (record,) = decided(tmp_path)
    assert record.data["principal"] == f"oauth:{issuer}#bob@example.org"


POLICY = """
version = 1
[roles.analyst]
tools = ["run_python", "read_workspace_file"]
[roles.reader]
tools = ["read_workspace_file"]
[scopes]
"glovebox:reader" = "reader"
"glovebox:analyst" = "analyst"
[[example]]
principal = "oauth:https://id.example#alice"
scopes = ["glovebox:reader"]
call = { tool = "run_python", arguments = { code = "1" } }
expect = "deny"
rule = "role.tools"
"""


def wanted(browser: Browser) -> list[set[str]]:
    """Scopes of ours at each sign-in; the SDK also asks for what lets it refresh its token."""
    return [set(each.split()) - {"offline_access"} for each in browser.asked]


@pytest.mark.driver("bubblewrap")
@pytest.mark.usefixtures("runtime_dir")
async def test_scopes_are_roles_and_a_person_is_asked_for_more_where_a_tool_needs_it(tmp_path: Path) -> None:
    """The server as it is shipped, its policy, `oidc-provider` and the SDK's client, from the first 401 to a result."""
    (tmp_path / "policy.toml").write_text(POLICY)
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace" / "data.csv").write_text("a,b\n1,2\n")
    tmp_path.chmod(0o755)
    with oidc_provider() as issuer:
        options = ["--workspace", str(tmp_path / "workspace"), "--state-dir", str(tmp_path / "state")]
        options += ["--policy", str(tmp_path / "policy.toml"), "--oauth-issuer", issuer]
        with over_http(options, tmp_path) as (url, _):
            browser, storage = Browser(sign_in), Storage(client=known(issuer))
            async with signed_in(url, browser, storage) as client:
                assert [tool.name for tool in (await client.list_tools()).tools] == ["read_workspace_file"]
                assert "1,2" in str(await client.call_tool("read_workspace_file", {"path": "data.csv"}))
                assert wanted(browser) == [{"glovebox:reader"}]
                result = await client.call_tool("run_python", {"code": "6 * 7"})
                assert result.structured_content is not None
                assert result.structured_content["value"] == "42"
            assert wanted(browser) == [{"glovebox:reader"}, set(SCOPES)]
    records = decided(tmp_path / "state")
    assert [(record.data["tool"], record.data["role"]) for record in records] == [
        ("read_workspace_file", "reader"), ("run_python", "analyst"),
    ]  # fmt: skip
    assert {record.data["principal"] for record in records} == {f"oauth:{issuer}#bob@example.org"}
    assert {record.data["user"].partition(" via ")[0] for record in records} == {"bob@example.org"}
