"""A client that signs in at an identity provider, as a person's does, and the person, who says yes to everything."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

import httpx2
from mcp import Client
from mcp.client.auth.oauth2 import OAuthClientProvider
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.auth import AuthorizationCodeResult, OAuthClientInformationFull, OAuthClientMetadata, OAuthToken
from pydantic import AnyUrl

CALLBACK = "http://127.0.0.1:1/callback"


@dataclass(slots=True)
class Storage:
    """What a client keeps."""

    tokens: OAuthToken | None = None
    client: OAuthClientInformationFull | None = None
    every: list[str] = field(default_factory=list)
    """The access tokens it got."""

    async def get_tokens(self) -> OAuthToken | None:
        """As the SDK asks."""
        return self.tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        """As the SDK asks."""
        self.tokens = tokens
        self.every.append(tokens.access_token)

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        """As the SDK asks."""
        return self.client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        """As the SDK asks."""
        self.client = client_info


def known(issuer: str) -> OAuthClientInformationFull:
    """A client that an administrator registered, as ``provider.mjs`` has it: it may ask for every scope."""
    return OAuthClientInformationFull(
        client_id="known",
        redirect_uris=[AnyUrl(CALLBACK)],
        token_endpoint_auth_method="none",  # noqa: S106 - the name of a method
        issuer=issuer,
    )


class Browser:
    """Follows to where a person would be sent, until it is the client's own address."""

    def __init__(self, submit: Callable[[httpx2.AsyncClient, httpx2.Response], Awaitable[httpx2.Response]]) -> None:
        """Take what the person does with a page that is no redirect."""
        self._submit = submit
        self._answer: dict[str, str] = {}
        self.asked: list[str] = []
        """Scopes of each sign-in."""

    async def open(self, url: str) -> None:
        """Sign in."""
        self.asked.append(parse_qs(urlsplit(url).query).get("scope", [""])[0])
        async with httpx2.AsyncClient(follow_redirects=False) as http:
            answer = await http.get(url)
            for _ in range(12):
                place = answer.headers.get("location")
                if place is None:
                    answer = await self._submit(http, answer)
                elif place.startswith(CALLBACK):
                    self._answer = {name: value[0] for name, value in parse_qs(urlsplit(place).query).items()}
                    return
                else:
                    answer = await http.get(str(answer.url.join(place)))
        raise AssertionError(f"it ended at {answer.url}: {answer.text[:400]}")

    async def answer(self) -> AuthorizationCodeResult:
        """What came back."""
        found = self._answer
        return AuthorizationCodeResult(code=found["code"], state=found.get("state"), iss=found.get("iss"))


async def no_page(_http: httpx2.AsyncClient, answer: httpx2.Response) -> httpx2.Response:
    """A provider that asks nothing has no page."""
    raise AssertionError(answer.text[:400])


@asynccontextmanager
async def signed_in(
    url: str, browser: Browser, storage: Storage, *, mode: str = "auto", scope: str | None = None
) -> AsyncIterator[Client]:
    """A client of the server at ``url``, which finds out by itself where to sign in, with PKCE."""
    metadata = OAuthClientMetadata(
        client_name="A test",
        redirect_uris=[AnyUrl(CALLBACK)],
        grant_types=["authorization_code", "refresh_token"],
        response_types=["code"],
        token_endpoint_auth_method="none",  # noqa: S106 - the name of a method
        scope=scope,
    )
    auth = OAuthClientProvider(
        f"{url}/mcp", metadata, storage, redirect_handler=browser.open, callback_handler=browser.answer
    )
    async with (
        httpx2.AsyncClient(auth=auth, timeout=30) as http,
        Client(streamable_http_client(f"{url}/mcp", http_client=http), mode=mode) as client,
    ):
        yield client
