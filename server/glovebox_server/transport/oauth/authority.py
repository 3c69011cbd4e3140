"""The worth of an issuer's access tokens: checked once, cached while valid, and challenges for all others.

Rule 1  A valid token is not checked again until it expires or its key is withdrawn; the most recently used are cached.
        What is under way with a token ends with its key, cached or not.
Rule 2  Checks of invalid signatures take at most ``SHARE`` of one processor, beside a start of ``AHEAD_SECONDS``. Valid
        ones are free: such a token comes from the issuer. Cached tokens are accepted all the same.
Rule 3  If checks have to wait, the address with the least time of invalid ones is next, as in start-time fair queueing
        (https://doi.org/10.1145/248156.248171): a flood from one address delays another's token by one check.
Rule 4  At most ``MAX_WAITING`` wait. Beyond, the address with most of them gives up its newest. A site may have 65,536
        networks of IPv6 (RFC 6177), so the site with most of them comes before the address.
Rule 5  A refusal names this server's metadata (RFC 9728, 5.1), and the scope that would do (RFC 6750, 3.1).
"""

import ipaddress
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from time import monotonic, thread_time
from typing import Final, TypeVar
from weakref import WeakKeyDictionary

import anyio
import anyio.lowlevel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from glovebox_server.calls import Principal
from glovebox_server.transport.oauth import issuer
from glovebox_server.transport.tokens import TokenGrant, digest_of

#: Where the metadata of a protected resource is (RFC 9728, 3.1), before the path of the resource.
METADATA_PATH: Final = "/.well-known/oauth-protected-resource"
#: Paths that tokens are for.
RESOURCES: Final = ("/mcp", "/sse", "")
#: Cached tokens, about 1 KiB each.
MAX_KEPT: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Scopes:
    """The meaning of token scopes under the policy in effect."""

    roles: Callable[[], Mapping[str, str]] = dict
    refuses: Callable[[Principal, str], bool] = lambda _principal, _tool: False
    """Returns whether a caller with these scopes lacks a tool."""

    def missing(self, principal: Principal, tool: str) -> str | None:
        """Return the scope that would allow a denied tool; None if allowed, or no scope would."""
        if not self.roles() or not self.refuses(principal, tool):
            return None
        more = {scope: replace(principal, scopes=(*principal.scopes, scope)) for scope in self.roles()}
        return next((scope for scope, wider in more.items() if not self.refuses(wider, tool)), None)


class GateRefusal(HTTPException):
    """The gate's answer to a request that it does not let through."""

    def __init__(self, rule: str, status: int, told: str, headers: Mapping[str, str] | None = None) -> None:
        """Set the answer; ``rule``, the broken one, is for the record."""
        super().__init__(status, told, headers)
        self.rule = rule


class TokenAuthority:
    """Identifies callers by the tokens of one issuer. One per server."""

    def __init__(self, oauth: issuer.OAuth, hosts: Collection[str], scopes: Scopes) -> None:
        """Set what is accepted, without keys yet; raise DiagnosedError for an invalid issuer URL."""
        self.issuer = issuer.TokenIssuer(oauth.issuer)
        self.scopes = scopes
        audiences = dict.fromkeys(f"{base_of(host)}{path}" for host in hosts for path in (*RESOURCES, "/"))
        self._expected = replace(oauth, audiences=oauth.audiences or tuple(audiences))
        self._bases = tuple(dict.fromkeys(base_of(host) for host in hosts))
        self._kept: OrderedDict[str, TokenGrant] = OrderedDict()
        # Of every grant that is cached or in use: the gate holds those, so they are bounded there.
        self._keys: WeakKeyDictionary[TokenGrant, issuer.IssuerKey] = WeakKeyDictionary()
        self.checks = Checks()
        self.issuer.on_change = self._withdraw

    async def grant(self, presented: str, address: str) -> TokenGrant:
        """Return what an access token grants; raise TokenError if it is nothing, or cannot be decided now."""
        digest = digest_of(presented)
        kept = self._kept.get(digest)
        if kept is not None:
            if kept.expire(time.time()):
                del self._kept[digest]
                raise issuer.TokenError("expired")
            self._kept.move_to_end(digest)
            return kept
        header = issuer.header_of(presented, self._expected)
        key = await self.issuer.key(header)
        grant = await self.checks.run(address, lambda: issuer.identity_of(presented, header, key, self._expected))
        if not self.issuer.publishes(key):  # any more: it may have waited
            raise issuer.TokenError("key")
        self._kept[digest], self._keys[grant] = grant, key
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return grant

    async def enter(self, presented: str, host: str, path: str, address: str) -> TokenGrant:
        """Return what a token grants, or raise the challenge to its request."""
        if not presented:
            raise GateRefusal("http.token", 401, "A bearer token is needed", self._challenge(host, path))
        try:
            return await self.grant(presented, address)
        except issuer.TokenError as bad:
            if bad.reason == "busy":
                again = {"Retry-After": "5"}
                raise GateRefusal("token.unchecked", 503, "New tokens cannot be checked now", again) from None
            told = _TOLD[bad.reason]
            challenge = self._challenge(host, path, "invalid_token", told)
            rule = f"token.{bad.reason.replace(' ', '_')}"
            raise GateRefusal(rule, 401, f"The token is not accepted: {told}", challenge) from None

    def step_up(self, principal: Principal, host: str, path: str, tool: str) -> None:
        """Challenge a call that another scope would allow."""
        scope = self.scopes.missing(principal, tool)
        if scope is None:
            return
        # A client that asked for the new one alone would lose its old ones.
        wanted = " ".join([*(each for each in self.scopes.roles() if each in principal.scopes), scope])
        told = "This tool needs another scope"
        challenge = self._challenge(host, path, "insufficient_scope", told, wanted)
        raise GateRefusal("token.scope", 403, told, challenge)

    def _withdraw(self) -> None:
        """End what was begun with tokens whose key the issuer has withdrawn."""
        for grant, key in list(self._keys.items()):
            if not self.issuer.publishes(key):
                grant.removed.set()
        for digest, grant in list(self._kept.items()):
            if grant.removed.is_set():
                del self._kept[digest]

    def metadata(self, host: str, path: str) -> Response:
        """Return the metadata at a well-known address."""
        resource = path.removeprefix(METADATA_PATH)
        if resource not in RESOURCES:
            raise GateRefusal("http", 404, "Not found")
        told = {
            "resource": self._base(host) + resource,
            "authorization_servers": [self.issuer.url],
            "scopes_supported": list(self.scopes.roles()),
            "bearer_methods_supported": ["header"],
            "resource_name": "Glovebox",
        }
        return JSONResponse({name: value for name, value in told.items() if value})

    def _challenge(self, host: str, path: str, error: str = "", told: str = "", scope: str = "") -> Mapping[str, str]:
        """Return the header ``WWW-Authenticate``; the default scope is the first that gives a role."""
        resource = "/sse" if path.startswith(("/sse", "/messages")) else "/mcp" if path.startswith("/mcp") else ""
        parts = {
            "error": error,
            "error_description": told,
            "scope": scope or next(iter(self.scopes.roles()), ""),
            "resource_metadata": f"{self._base(host)}{METADATA_PATH}{resource}",
        }
        written = ", ".join(f'{name}="{value}"' for name, value in parts.items() if value)
        return {"WWW-Authenticate": f"Bearer {written}"}

    def _base(self, host: str) -> str:
        """Return the address that tokens for this server name; the first for unknown hosts."""
        base = base_of(host)
        return base if base in self._bases else self._bases[0]


_TOLD: Final[Mapping[issuer.Reason, str]] = {
    "malformed": "it is no access token",
    "algorithm": "its algorithm is not accepted",
    "type": "it is no access token by its type",
    "key": "its key is not one of the issuer",
    "signature": "its signature is wrong",
    "issuer": "it is of another issuer",
    "audience": "it is for another audience",
    "expired": "it expired",
    "not yet valid": "it is not valid yet",
    "claims": "its claims are not complete",
}


def base_of(host: str) -> str:
    """Return scheme and host of this server's address for clients: TLS, except on this machine."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    local = name.lower() in ("localhost", "127.0.0.1", "[::1]")
    # The scheme's own port is not written (RFC 3986, 6.2.3).
    return f"http://{host.lower()}" if local else f"https://{host.lower().removesuffix(':443')}"


#: Share of one processor for invalid signatures. One takes 0.05 to 1 ms, by the issuer's key.
SHARE: Final = 0.1
#: Seconds of the processor that they may be ahead of their share.
AHEAD_SECONDS: Final = 0.01
#: Checks that wait, each with the request that brought its token; a second's worth with usual keys.
MAX_WAITING: Final = 256
#: Addresses with remembered invalid signatures, about 200 bytes each; the oldest is evicted first.
MAX_ADDRESSES: Final = 4096
#: Bits of an IPv6 address that name a network; the others are its owner's to choose (RFC 4291, 2.5.4).
_NETWORK_BITS: Final = 64
#: Bits that the networks of one owner share (RFC 6177, 2).
_SITE_BITS: Final = 48
_Checked = TypeVar("_Checked")
_Clock = Callable[[], float]


@dataclass(slots=True, eq=False)
class _PendingCheck:
    address: str
    turn: anyio.Event = field(default_factory=anyio.Event)
    over: anyio.Event = field(default_factory=anyio.Event)


class Checks:
    """Makes the checks of all clients. One per server."""

    def __init__(
        self,
        clock: _Clock = monotonic,
        spent: _Clock = thread_time,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self._clock, self._spent, self._sleep = clock, spent, sleep
        self._paid = 0.0
        """Time at which the spending so far equals the share."""
        self._turn = 0.0
        """Spending of the address that had the last turn."""
        self._accounts: OrderedDict[str, float] = OrderedDict()
        """Spending by address, if it is more."""
        self._waiting: list[_PendingCheck] = []
        self._wanted = anyio.Event()

    async def run(self, address: str, check: Callable[[], _Checked]) -> _Checked:
        """Run a check in turn, while ``follow`` runs; return or raise as it does.

        Raises TokenError: busy: too many wait.

        Args:
            address: of the client, as ``address_of`` returns it.
            check: takes processor time, and raises an exception for an invalid signature.
        """
        if not self._waiting and self._debt() <= 0:
            return self._charged(address, check)
        waiting = _PendingCheck(address)
        self._waiting.append(waiting)
        if len(self._waiting) > MAX_WAITING:
            sites = Counter(_site_of(each.address) for each in self._waiting)
            addresses = Counter(each.address for each in self._waiting)
            newest = reversed(self._waiting)
            last = max(newest, key=lambda each: (sites[_site_of(each.address)], addresses[each.address]))
            self._waiting.remove(last)
            last.turn.set()
        self._wanted.set()
        try:
            await waiting.turn.wait()
            if waiting not in self._waiting:
                raise issuer.TokenError("busy")
            return self._charged(address, check)
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            waiting.over.set()

    async def follow(self) -> None:
        """Have the waiting checks made in turn; until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted = anyio.Event()
            while self._waiting:
                await anyio.lowlevel.checkpoint()
                debt = self._debt()
                if debt > 0:
                    await self._sleep(debt)
                elif self._waiting:
                    following = min(self._waiting, key=lambda each: self._start(each.address))
                    following.turn.set()
                    await following.over.wait()

    def _charged(self, address: str, check: Callable[[], _Checked]) -> _Checked:
        began, self._turn = self._spent(), self._start(address)
        try:
            return check()
        except Exception:
            cost = self._spent() - began
            self._paid = max(self._paid, self._clock()) + cost / SHARE
            self._accounts[address] = self._turn + cost
            self._accounts.move_to_end(address)
            if len(self._accounts) > MAX_ADDRESSES:
                self._accounts.popitem(last=False)
            raise

    def _start(self, address: str) -> float:
        return max(self._turn, self._accounts.get(address, 0.0))

    def _debt(self) -> float:
        return self._paid - self._clock() - AHEAD_SECONDS / SHARE


def _site_of(address: str) -> str:
    """Return the site of an address of ``address_of``; of IPv4, the address itself."""
    if not address.endswith(f"/{_NETWORK_BITS}"):
        return address
    return str(ipaddress.IPv6Network(address).supernet(new_prefix=_SITE_BITS))


def address_of(client: str) -> str:
    """Return a client's IPv4 address, or its IPv6 network of 64 bits; empty for anything else."""
    try:
        address = ipaddress.ip_address(client.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return str(ipaddress.IPv6Network((int(address), _NETWORK_BITS), strict=False))
        address = address.ipv4_mapped
    return str(address)
