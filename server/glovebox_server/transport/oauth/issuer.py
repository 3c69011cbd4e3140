"""The authorization server's metadata and keys.

Rule 1  Its answers are read within a size and a time, and not from elsewhere: no redirect, and TLS unless it is on this
        machine.
Rule 2  Its metadata names itself (RFC 8414, 3.3), or another server answered.
Rule 3  Keys are fetched at the start, periodically, and when a token names an unknown one: once for all waiting
        requests, and not again for a while, whatever strangers send. Other requests do not wait.
Rule 4  Keys that have not been confirmed for an hour do not count.
"""

import ipaddress
from collections.abc import Callable
from time import monotonic
from typing import Any, Final
from urllib.parse import urlsplit

import anyio
import httpx2
import structlog

from glovebox_sandboxes import strict_json
from glovebox_sandboxes.contract.errors import DiagnosedError
from glovebox_server.transport.oauth.verify import Header, IssuerKey, TokenError, keys_of

#: Bytes of one document, and seconds for all of them.
MAX_DOCUMENT: Final = 256 * 1024
SECONDS: Final = 8.0

#: Seconds between two fetches of the keys; after a failed one; and for a token with an unknown key.
REFRESH_SECONDS: Final = 600.0
RETRY_SECONDS: Final = 30.0
AGAIN_SECONDS: Final = 10.0

#: Seconds after which unconfirmed keys are no longer trusted.
STALE_SECONDS: Final = 3600.0

#: Requests that may wait for the keys at one time; each holds a connection of an unidentified client.
MAX_WAITING: Final = 64

_log = structlog.get_logger(__name__)


class TokenIssuer:
    """The current keys of an authorization server. One per server."""

    def __init__(self, url: str, clock: Callable[[], float] = monotonic) -> None:
        """Set the identifier; raise DiagnosedError if it is not an issuer's URL."""
        self.url = url
        self.clock = clock
        self._local = _checked(url, url)
        self._keys: dict[str, IssuerKey] = {}
        self._confirmed = self._attempted = -STALE_SECONDS
        self._asking = False
        self._waiting = 0
        self._wanted, self._answered = anyio.Event(), anyio.Event()
        self.on_change: Callable[[], None] = lambda: None
        """Called when the keys have changed."""

    def publishes(self, key: IssuerKey) -> bool:
        """Return whether the issuer publishes a key now."""
        return any(each.thumbprint == key.thumbprint for each in self._fresh().values())

    async def key(self, header: Header) -> IssuerKey | None:
        """Return the key that a token names; ask the issuer for an unknown one, within its rate.

        Raises:
            TokenError: busy: the issuer does not answer and its keys are too old, or too many wait for it.
        """
        found = self._find(header)
        if found is None and (self._asking or self.clock() - self._attempted >= AGAIN_SECONDS):
            if self._waiting >= MAX_WAITING:
                raise TokenError("busy")
            self._waiting += 1
            if not self._asking:
                self._wanted.set()
            try:
                with anyio.move_on_after(SECONDS):
                    await self._answered.wait()
            finally:
                self._waiting -= 1
            found = self._find(header)
        if found is None and not self._fresh():
            raise TokenError("busy")
        return found

    async def follow(self) -> None:
        """Fetch the keys periodically, and whenever a request waits for one; until cancelled."""
        failed = False
        while True:
            with anyio.move_on_after(RETRY_SECONDS if failed else REFRESH_SECONDS):
                await self._wanted.wait()
            try:
                await self.fetch()
                failed = False
            except DiagnosedError as problem:
                failed = True
                _log.warning("the keys of the OAuth issuer could not be asked for", problem=str(problem))

    async def fetch(self) -> None:
        """Fetch the metadata and the keys; raise DiagnosedError without a usable answer."""
        self._wanted, self._asking, self._attempted = anyio.Event(), True, self.clock()
        try:
            with anyio.fail_after(SECONDS):
                found = await self._keys_now()
        except TimeoutError:
            raise self._unusable(f"it did not answer within {SECONDS:g} seconds") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, OSError) as error:  # of names that are none, too
            raise self._unusable(str(error) or type(error).__name__) from None
        finally:
            self._asking = False
            self._answered.set()
            self._answered = anyio.Event()
        changed = {each.thumbprint for each in found.values()} != {each.thumbprint for each in self._keys.values()}
        self._keys, self._confirmed = found, self.clock()
        if changed:
            self.on_change()

    async def _keys_now(self) -> dict[str, IssuerKey]:
        place = urlsplit(self.url)
        path, base = place.path.rstrip("/"), f"{place.scheme}://{place.netloc}"
        # By RFC 8414, 3.1, and by OpenID Connect Discovery, 4, with the path in front.
        tried = (
            f"{base}/.well-known/oauth-authorization-server{path}",
            f"{base}/.well-known/openid-configuration{path}",
            f"{base}{path}/.well-known/openid-configuration",
        )
        async with httpx2.AsyncClient(follow_redirects=False, timeout=SECONDS) as client:
            metadata = None
            for url in dict.fromkeys(tried):
                metadata = await self._document(client, url)
                if metadata is not None:
                    break
            if not isinstance(metadata, dict):
                raise self._unusable(f"it has no metadata at {' nor '.join(dict.fromkeys(tried))}")
            if metadata.get("issuer") != self.url:
                raise self._unusable(
                    "its metadata names another issuer; write it exactly as there, with its last slash"
                )
            keys_url = metadata.get("jwks_uri")
            if not isinstance(keys_url, str):
                raise self._unusable("its metadata has no jwks_uri")
            if _checked(keys_url, self.url) and not self._local:
                raise self._unusable("its jwks_uri is on this machine, and the issuer is not")
            document = await self._document(client, keys_url)
        try:
            found = keys_of(document)
        except ValueError as problem:
            raise self._unusable(f"what is at its jwks_uri cannot be used: {problem}") from None
        if not found:
            raise self._unusable("it publishes no key that access tokens may be signed with")
        return found

    async def _document(self, client: httpx2.AsyncClient, url: str) -> Any:
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        content = bytearray()
        async with client.stream("GET", url, headers=headers) as answer:
            if answer.status_code in (404, 405):
                return None
            plain = answer.headers.get("content-encoding", "identity") == "identity"
            if not answer.is_success or not plain:
                raise self._unusable(f"{url} was answered with status {answer.status_code}")
            async for piece in answer.aiter_raw():
                content += piece
                if len(content) > MAX_DOCUMENT:
                    raise self._unusable(f"{url} is longer than {MAX_DOCUMENT} bytes")
        try:
            return strict_json.check(bytes(content))
        except ValueError as problem:
            raise self._unusable(f"{url}: {problem}") from None

    def _find(self, header: Header) -> IssuerKey | None:
        keys = self._fresh()
        if header.key is not None:
            return keys.get(header.key)
        fitting = [key for key in keys.values() if header.algorithm in key.algorithms]
        return fitting[0] if len(fitting) == 1 else None

    def _fresh(self) -> dict[str, IssuerKey]:
        return self._keys if self.clock() - self._confirmed < STALE_SECONDS else {}

    def _unusable(self, reason: str) -> DiagnosedError:
        fix = "Check that it runs and can be reached from here, and --oauth-issuer."
        return DiagnosedError(f"Asking the OAuth issuer {self.url} for its keys", reason, fix)


def _checked(url: str, issuer: str) -> bool:
    """Return True for a URL on this machine; raise DiagnosedError if it is unusable."""
    what, fix = f"Using the OAuth issuer {issuer}", "Give --oauth-issuer the https URL that its tokens name as `iss`."
    try:
        place = urlsplit(url)
        host, _ = place.hostname or "", place.port
    except ValueError:
        raise DiagnosedError(what, f"{url!r} is no URL", fix) from None
    local = host == "localhost" or _is_loopback(host)
    if place.scheme not in ("http", "https") or not host or place.username is not None or not url.isprintable():
        raise DiagnosedError(what, f"{url!r} is no URL of a web server", fix)
    if place.scheme == "http" and not local:
        raise DiagnosedError(what, f"{url!r} has no TLS: whoever is in between could sign tokens", fix)
    if url == issuer and ("?" in url or "#" in url or " " in url):
        raise DiagnosedError(what, "it has a query or a fragment, which no issuer has", fix)
    return local


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
