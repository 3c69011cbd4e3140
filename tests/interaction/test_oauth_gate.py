"""The gate with an authorization server: what strangers hear, and what a token must not be."""

import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from tests.fixtures.issuers import AnIssuer, an_issuer, made
from tests.interaction.fakes import as_app, fake_app
from tests.interaction.served import Served, served, until
from tests.interaction.sign_in import Browser, Storage, no_page, signed_in
from tests.interaction.test_token_changes import cut

from glovebox_sandboxes.contract.errors import DiagnosedError
from glovebox_server.calls import Principal
from glovebox_server.transport import serve
from glovebox_server.transport.oauth import authority
from glovebox_server.transport.oauth import issuer as verify
from glovebox_server.transport.oauth.authority import METADATA_PATH, RESOURCES, Scopes
from glovebox_server.transport.oauth.issuer import OAuth

TOOLS = {"glovebox:reader": {"read_workspace_file"}, "glovebox:analyst": {"run_python"}}
SCOPES = Scopes(
    roles=lambda: dict.fromkeys(TOOLS, "a role"),
    refuses=lambda principal, tool: not any(tool in TOOLS.get(scope, ()) for scope in principal.scopes),
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often, and give answers little time."""
    monkeypatch.setattr(serve, "TOKEN_SECONDS", 0.02)
    monkeypatch.setattr(serve, "GRACE_SECONDS", 0.2)


@asynccontextmanager
async def both(
    directory: Path, scopes: Scopes | None = None, allowed_hosts: tuple[str, ...] = ()
) -> AsyncIterator[tuple[AnIssuer, Served]]:
    """An issuer, and a server that takes its tokens."""
    async with (
        an_issuer() as issuer,
        served(directory, "http", oauth=OAuth(issuer=issuer.url), scopes=scopes, allowed_hosts=allowed_hosts) as server,
    ):
        yield issuer, server


async def asked(url: str, token: str | None = None, **headers: str) -> httpx2.Response:
    """GET it."""
    whole = headers | ({} if token is None else {"Authorization": f"Bearer {token}"})
    async with httpx2.AsyncClient(verify=False) as http:  # nothing here is https: no trust store is read
        return await http.get(url, headers=whole)


def audience(server: Served) -> str:
    """What tokens for a server name."""
    return f"{server.url}/mcp"


async def test_a_stranger_is_told_where_to_sign_in_and_nothing_else(tmp_path: Path) -> None:
    """RFC 9728: the challenge leads to the metadata, which needs no token; Host and Origin are checked all the same."""
    async with both(tmp_path, SCOPES) as (issuer, server):
        for path, resource in (("/mcp", "/mcp"), ("/sse", "/sse"), ("/messages/?a=b", "/sse"), ("/artifacts/1", "")):
            answer = await asked(server.url + path)
            assert answer.status_code == 401
            told = answer.headers["www-authenticate"]
            place = f"{server.url}{METADATA_PATH}{resource}"
            assert told == f'Bearer scope="glovebox:reader", resource_metadata="{place}"'
            metadata = await asked(place)
            assert metadata.json() == {
                "resource": f"{server.url}{resource}", "authorization_servers": [issuer.url],
                "resource_name": "Glovebox",
                "scopes_supported": ["glovebox:reader", "glovebox:analyst"], "bearer_methods_supported": ["header"],
            }  # fmt: skip
        place = f"{server.url}{METADATA_PATH}/mcp"
        assert (await asked(place, "a-token-that-expired")).status_code == 200
        assert (await asked(place, Host="evil.example")).status_code == 421
        assert (await asked(place, Origin="https://evil.example")).status_code == 403
        assert (await asked(f"{server.url}{METADATA_PATH}/health")).status_code == 404
        assert server.app.refusals.totals["http"] == 1
        async with httpx2.AsyncClient() as http:
            assert (await http.post(place)).status_code == 401
        local = await asked(place.replace("127.0.0.1", "localhost"))
        assert local.json()["resource"] == audience(server).replace("127.0.0.1", "localhost")


async def test_without_an_issuer_there_is_no_metadata_and_no_token_of_it(tmp_path: Path) -> None:
    """The control of all others: what lets in there lets nobody in here."""
    async with an_issuer() as issuer, served(tmp_path, "http") as server:
        assert (await asked(f"{server.url}{METADATA_PATH}/mcp")).status_code == 401
        answer = await asked(f"{server.url}/health", issuer.token(audience(server)))
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")


async def test_tokens_that_are_none_are_refused_and_those_that_are_let_in(tmp_path: Path) -> None:
    """Forged, foreign, for another server, in the wrong place, twice. Before and after each a good one lets in."""
    async with both(tmp_path) as (issuer, server):
        place, good = f"{server.url}/health", issuer.token(audience(server))
        wrong: dict[str, tuple[str, str]] = {
            "forged": (issuer.token(audience(server), key=made("ES256", "first")), "its signature is wrong"),
            "unknown key": (
                issuer.token(audience(server), header={"kid": "other"}),
                "its key is not one of the issuer",
            ),
            "another issuer's": (issuer.token(audience(server), iss="https://id.example"), "it is of another issuer"),
            "another server's": (issuer.token("http://127.0.0.1:1/mcp"), "it is for another audience"),
            "expired": (issuer.token(audience(server), exp=int(time.time()) - 3600), "it expired"),
            "not yet valid": (issuer.token(audience(server), nbf=int(time.time()) + 3600), "it is not valid yet"),
            "oversized": (issuer.token(audience(server), pad="x" * verify.MAX_TOKEN), "it is no access token"),
            "of our own kind": ("gbx_" + "x" * 43, "it is no access token"),
        }
        for name, (token, why) in wrong.items():
            assert (await asked(place, good)).status_code == 200
            answer = await asked(place, token)
            assert answer.status_code == 401, name
            assert f'error="invalid_token", error_description="{why}"' in answer.headers["www-authenticate"]
            assert answer.text == f"The token is not accepted: {why}"
        assert (await asked(f"{place}?access_token={good}&token={good}")).json() == {"status": "ok"}
        assert (await asked(f"{server.url}/mcp?access_token={good}")).status_code == 401
        assert (await asked(place, Authorization=f"Basic {good}")).status_code == 401
        assert (await asked(place, Authorization=good)).status_code == 401
        twice = [("Authorization", f"Bearer {good}"), ("Authorization", f"Bearer {good}")]
        async with httpx2.AsyncClient() as http:
            assert (await http.get(place, headers=twice)).status_code == 401
        counted = server.app.refusals.totals
        assert all(
            counted[f"token.{why}"] for why in ("signature", "key", "issuer", "audience", "expired", "malformed")
        )
        assert not any(good in rule or "." not in rule for rule in counted)
        assert "longest_stall_ms" in (await asked(place, good)).json()
        assert (await asked(place, server.tokens["alice"])).status_code == 200


async def test_where_a_token_cannot_be_checked_its_caller_is_told_to_come_later(tmp_path: Path) -> None:
    """503 and when, no challenge: nothing is wrong with the token. Those who are known come in (the control)."""
    async with both(tmp_path) as (issuer, server):
        known = issuer.token(audience(server))
        assert (await asked(f"{server.url}/health", known)).status_code == 200
        issuer.fails = True
        server.authority.issuer._confirmed -= 3600
        answer = await asked(f"{server.url}/health", issuer.token(audience(server)))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert "www-authenticate" not in answer.headers
        assert server.app.refusals.totals["token.unchecked"] == 1
        for token in (known, server.tokens["alice"]):
            assert (await asked(f"{server.url}/health", token)).status_code == 200


@pytest.mark.parametrize("proxies", [("127.0.0.0/8",), ()], ids=["trusted", "not trusted"])
async def test_a_flood_behind_a_trusted_proxy_delays_its_own_address_alone(
    proxies: tuple[str, ...], tmp_path: Path
) -> None:
    """The proxy says who is who; what a client says of itself counts for nothing (the control).

    Checks wait for a clock that stands still, so the order of the addresses is all that there is.
    """
    async with (
        an_issuer() as issuer,
        served(tmp_path, "http", oauth=OAuth(issuer=issuer.url), trusted_proxies=proxies) as server,
        anyio.create_task_group() as tasks,
    ):
        checks, place, good = server.authority.checks, f"{server.url}/health", issuer.token(audience(server))
        forged = good.rpartition(".")[0] + "." + issuer.token(audience(server), sub="bob").rpartition(".")[2]
        checks._clock = lambda: 0.0
        checks._paid = 1.0
        for address in ("203.0.113.1", "203.0.113.1", "2001:db8::1", "2001:db8::2"):
            # On the left is what a client wrote.
            header = {"X-Forwarded-For": f"198.51.100.{len(checks._waiting)}, {address}"}
            tasks.start_soon(partial(asked, place, forged, **header))
        await until(lambda: len(checks._waiting) == 4)
        assert {each.address for each in checks._waiting} == (
            {"203.0.113.1", "2001:db8::/64"} if proxies else {"127.0.0.1"}
        )
        checks._accounts.update(dict.fromkeys((each.address for each in checks._waiting), 1.0))
        answers: list[int] = []

        async def come() -> None:
            answers.append((await asked(place, good, **{"X-Forwarded-For": "203.0.113.9"})).status_code)

        tasks.start_soon(come)
        await until(lambda: len(checks._waiting) == 5)
        min(checks._waiting, key=lambda each: checks._start(each.address)).turn.set()
        await until(lambda: len(checks._waiting) == 4)
        if proxies:
            await until(lambda: answers == [200])
        checks._paid = 0.0
        await until(lambda: answers == [200])


async def test_without_its_issuers_keys_a_server_does_not_start(tmp_path: Path) -> None:
    """It says so at once, instead of to each caller. With them it does: see every other test."""
    async with an_issuer() as issuer, fake_app(tmp_path) as app:
        issuer.fails = True
        with anyio.fail_after(10), pytest.raises(DiagnosedError, match="status 500"):
            await serve.serve_http(as_app(app), oauth=OAuth(issuer=issuer.url))


NAMES = ("glovebox.example", "other.example:8443")


async def let_in(server: Served, token: str, host: str) -> bool:
    """Whether a token lets in under a name of this server; else for its audience it does not."""
    answer = await asked(f"{server.url}/health", token, Host=host)
    assert answer.status_code == 200 or answer.text == "The token is not accepted: it is for another audience"
    return answer.status_code == 200


@pytest.mark.parametrize("allowed_hosts", [(), NAMES], ids=["without names", "with names"])
async def test_with_names_of_its_own_a_server_takes_tokens_for_those_alone(
    allowed_hosts: tuple[str, ...], tmp_path: Path
) -> None:
    """What is for its loopback address may be for another server there; without names it is for this (the control)."""
    async with both(tmp_path, allowed_hosts=allowed_hosts) as (issuer, server):
        port = server.url.rpartition(":")[2]
        loopback = [f"{host}:{port}" for host in ("127.0.0.1", "localhost", "[::1]")]
        places = {f"http://{each}": not allowed_hosts for each in loopback}
        places |= {f"https://{each}": bool(allowed_hosts) for each in NAMES}
        tokens = {issuer.token(f"{place}{path}"): own for place, own in places.items() for path in RESOURCES}
        for host in (*loopback, *allowed_hosts):
            assert {each: await let_in(server, each, host) for each in tokens} == tokens


async def test_whoever_comes_by_another_way_is_told_the_servers_own_name(tmp_path: Path) -> None:
    """Challenge and metadata name what tokens are taken for: its names as clients use them, else the first of them."""
    async with both(tmp_path, allowed_hosts=NAMES) as (issuer, server):
        port = server.url.rpartition(":")[2]
        for host, base in {
            f"127.0.0.1:{port}": "https://glovebox.example",
            f"localhost:{port}": "https://glovebox.example",
            "Glovebox.Example": "https://glovebox.example",
            "other.example:8443": "https://other.example:8443",
        }.items():
            told = (await asked(f"{server.url}/sse", Host=host)).headers["www-authenticate"]
            assert told == f'Bearer resource_metadata="{base}{METADATA_PATH}/sse"'
            metadata = (await asked(f"{server.url}{METADATA_PATH}/sse", Host=host)).json()
            assert metadata["resource"] == f"{base}/sse"
            assert await let_in(server, issuer.token(metadata["resource"]), host)


async def test_a_withdrawn_key_lets_nobody_in_again(tmp_path: Path) -> None:
    """Replay: a token that came in a moment ago is refused once its key is gone; a new key's lets in (the control)."""
    async with both(tmp_path) as (issuer, server):
        old = issuer.token(audience(server))
        assert (await asked(f"{server.url}/health", old)).status_code == 200
        del issuer.keys["first"]
        issuer.add_key("second")
        server.authority.issuer._attempted -= 60
        assert (await asked(f"{server.url}/health", issuer.token(audience(server)))).status_code == 200
        assert (await asked(f"{server.url}/health", old)).status_code == 401


async def test_what_was_begun_with_a_forgotten_token_ends_with_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is remembered while others come in: a call and a stream of a withdrawn key end, another's call goes on."""
    monkeypatch.setattr(authority, "MAX_KEPT", 1)
    with cut(surely=True):
        await ended_with_its_key(tmp_path)


async def ended_with_its_key(directory: Path) -> None:
    """A stream, a call, and another's call."""
    async with both(directory) as (issuer, server), anyio.create_task_group() as tasks:
        running, cancelled = server.app.broker.running, server.app.broker.cancelled
        opened, ended = anyio.Event(), anyio.Event()
        tasks.start_soon(listen, server, issuer.token(audience(server)), opened, ended)
        await opened.wait()
        tasks.start_soon(call, server, issuer.token(audience(server)))
        await until(lambda: len(running) == 1)
        issuer.add_key("second")
        await server.authority.issuer.fetch()
        tasks.start_soon(call, server, issuer.token(audience(server), sub="bob"))
        await until(lambda: len(running) == 2)
        assert (await asked(f"{server.url}/health", issuer.token(audience(server), sub="carol"))).status_code == 200
        del issuer.keys["first"]
        assert not cancelled
        assert not ended.is_set()
        await server.authority.issuer.fetch()
        await until(lambda: len(running) == 1)
        assert len(cancelled) == 1
        (left,) = running.values()
        assert left.principal.id == f"oauth:{issuer.url}#bob"
        await until(ended.is_set)
        server.app.broker.release.set()


async def test_what_was_begun_with_a_token_ends_with_it(tmp_path: Path) -> None:
    """Expired while it streams and while it calls: both end, as with a token that was removed; others go on."""
    with cut(surely=True):
        await ended_with_its_token(tmp_path)


async def ended_with_its_token(directory: Path) -> None:
    """A stream, a call, and another's call."""
    async with both(directory) as (issuer, server), anyio.create_task_group() as tasks:
        brief = issuer.token(audience(server), exp=int(time.time()) - verify.LEEWAY + 3)
        ended = anyio.Event()
        tasks.start_soon(listen, server, brief, anyio.Event(), ended)
        tasks.start_soon(call, server, brief)
        tasks.start_soon(call, server, server.tokens["bob"])
        await until(lambda: len(server.app.broker.running) == 2)
        await until(lambda: len(server.app.broker.cancelled) == 1)
        await until(ended.is_set)
        assert len(server.app.broker.running) == 1
        assert (await asked(f"{server.url}/health", brief)).status_code == 401
        server.app.broker.release.set()


async def listen(server: Served, token: str, opened: anyio.Event, ended: anyio.Event) -> None:
    """Hold a stream open until it ends."""
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        httpx2.AsyncClient(timeout=30) as http,
        http.stream("GET", f"{server.url}/sse", headers=headers) as answer,
    ):
        assert answer.status_code == 200
        opened.set()
        async for _ in answer.aiter_raw():
            pass
    ended.set()


async def call(server: Served, token: str, tool: str = "run_python") -> httpx2.Response:
    """Make one call that waits, in the era without sessions."""
    meta = {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}}
    params = {"name": tool, "arguments": {"code": "wait"}, "_meta": meta}
    message: Mapping[str, Any] = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    headers = {
        "Authorization": f"Bearer {token}", "Accept": "application/json, text/event-stream",
        "Mcp-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/call", "Mcp-Name": tool,
    }  # fmt: skip
    async with httpx2.AsyncClient(timeout=30) as http:
        return await http.post(f"{server.url}/mcp", json=message, headers=headers)


async def test_a_tool_that_another_scope_would_allow_is_answered_with_that_scope(tmp_path: Path) -> None:
    """RFC 6750, 3.1: 403 names it beside what the token has; with it, or where none would help, no more (controls)."""
    async with both(tmp_path, SCOPES) as (issuer, server):
        server.app.broker.release.set()
        reads = issuer.token(audience(server), scope="glovebox:reader other")
        answer = await call(server, reads)
        assert answer.status_code == 403
        told = answer.headers["www-authenticate"]
        assert 'error="insufficient_scope"' in told
        assert 'scope="glovebox:reader glovebox:analyst"' in told
        assert f'resource_metadata="{server.url}{METADATA_PATH}/mcp"' in told
        assert not server.app.broker.started.is_set()
        assert (await call(server, issuer.token(audience(server), scope="glovebox:analyst"))).status_code == 200
        assert (await call(server, reads, "no_such_tool")).status_code != 403
        assert (await call(server, issuer.token(audience(server), scope="glovebox:analyst"), "x")).status_code != 403


async def test_a_client_that_needs_more_asks_the_person_again_and_goes_on(tmp_path: Path) -> None:
    """Step-up, as the SDK's client does it: it asks for what the challenge names, and makes the same call again."""
    async with both(tmp_path, SCOPES) as (issuer, server):
        browser, storage = Browser(no_page), Storage()
        async with signed_in(server.url, browser, storage) as client:
            assert browser.asked == ["glovebox:reader"]
            result = await client.call_tool("run_python", {"code": "1"})
            assert result.structured_content is not None
            assert result.structured_content["stdout"] == "echo 1"
        assert [set(each.split()) for each in issuer.granted] == [
            {"glovebox:reader"}, {"glovebox:reader", "glovebox:analyst"},
        ]  # fmt: skip


async def test_many_subjects_leave_nothing_behind(tmp_path: Path) -> None:
    """Who came and went is in no table, but for bounded ones, however many they were."""
    async with both(tmp_path) as (issuer, server):
        async with httpx2.AsyncClient() as http:
            for number in range(60):
                token = issuer.token(audience(server), sub=f"subject-{number}")
                answer = await http.get(f"{server.url}/health", headers={"Authorization": f"Bearer {token}"})
                assert answer.status_code == 200
        server.app.broker.release.set()
        for number in range(10):
            token = issuer.token(audience(server), sub=f"subject-{number}")
            assert (await call(server, token)).status_code == 200
        gate = server.gate
        await until(lambda: not gate._requests)
        assert not server.app.broker.admission._calls
        assert json.loads((await asked(f"{server.url}/health", server.tokens["alice"])).text)["status"] == "ok"


async def test_a_session_is_its_subjects_whatever_token_it_comes_with(tmp_path: Path) -> None:
    """It goes on with the next token of the same subject, and is nobody else's, were it with a token of Glovebox's."""
    async with both(tmp_path) as (issuer, server), httpx2.AsyncClient() as http:

        async def post(token: str, session: str | None, message: Mapping[str, Any]) -> httpx2.Response:
            headers = {"Authorization": f"Bearer {token}", "Accept": "application/json, text/event-stream"}
            named = {} if session is None else {"Mcp-Session-Id": session, "Mcp-Protocol-Version": "2025-11-25"}
            whole = {"jsonrpc": "2.0", "id": 1, **message}
            return await http.post(f"{server.url}/mcp", json=whole, headers=headers | named)

        client = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}
        begun = await post(issuer.token(audience(server)), None, {"method": "initialize", "params": client})
        session, listed = begun.headers["mcp-session-id"], {"method": "tools/list"}
        assert (await post(issuer.token(audience(server)), session, listed)).status_code == 200
        assert (await post(issuer.token(audience(server), sub="bob"), session, listed)).status_code == 404
        assert (await post(server.tokens["alice"], session, listed)).status_code == 404


def test_a_scope_is_named_if_it_alone_is_missing() -> None:
    """None where the caller has the tool, or no scope gives it, or there is no policy."""
    reader = Principal(id="oauth:i#a", transport="http", scopes=("glovebox:reader",))
    assert SCOPES.missing(reader, "run_python") == "glovebox:analyst"
    assert SCOPES.missing(reader, "read_workspace_file") is None
    assert SCOPES.missing(reader, "no_such_tool") is None
    assert Scopes().missing(reader, "run_python") is None
