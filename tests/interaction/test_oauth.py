"""Callers that come with access tokens: real clients that sign in, at two implementations of an identity provider."""

import re
import subprocess  # noqa: TID251 - the identity provider is a process of its own
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from tests.fixtures.issuers import SCOPES, an_issuer
from tests.interaction import node
from tests.interaction.served import served
from tests.interaction.sign_in import Browser, Storage, no_page, signed_in

from glovebox_server.audit import read
from glovebox_server.audit.chain import Record
from glovebox_server.transport.oauth.authority import OAuth


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


@contextmanager
def oidc_provider() -> Iterator[str]:
    """An identity provider by another author, in a process of its own; gives its issuer."""
    place = node.directory()
    command = ["node", str(node.HERE / "typescript" / "provider.mjs"), *SCOPES]
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
