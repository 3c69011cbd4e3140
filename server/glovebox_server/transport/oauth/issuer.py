"""The authorization server's metadata and keys, and whether an access token is its own, for this server, and in time.

Rule 1  Its answers are read within a size and a time, and not from elsewhere: no redirect, and TLS unless it is on this
        machine. Its metadata names itself (RFC 8414, 3.3), or another server answered.
Rule 2  Keys are fetched at the start, periodically, and when a token names an unknown one: once for all waiting
        requests, and not again for a while, whatever strangers send. Keys not confirmed for an hour do not count.
Rule 3  A token is a JWT (RFC 7519) signed as RFC 7515 says, of one meaning: no key twice, no ``crit``, nothing but
        base64url. The cheapest check comes first; the signature comes last.
Rule 4  The key is one that the issuer publishes. ``kid`` only chooses among those; ``jwk``, ``jku``, ``x5c`` and
        ``x5u``, with which a token would bring its own, are ignored. Each key has the algorithms of its kind,
        never ``none``, and never one whose secret would be public (RFC 8725, 3.1).
Rule 5  ``typ`` says that it is an access token (RFC 9068, 4), or the operator has said that the issuer's do not. Then
        a token with claims of other kinds is refused. ``iss`` and ``aud`` are as expected, ``exp`` is there, ``nbf``
        and ``iat`` are not in the future.
"""

import base64
import ipaddress
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import quote, urlsplit

import anyio
import httpx2
import jwt
import structlog
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from glovebox_audit.printable import printable
from glovebox_sandboxes import strict_json
from glovebox_sandboxes.contract.errors import DiagnosedError
from glovebox_server.transport.tokens import TokenGrant

#: Characters of a token. Some providers list groups; a request's whole head has 16 KiB.
MAX_TOKEN: Final = 8192
#: Seconds by which the clocks of an issuer and of this host may differ.
LEEWAY: Final = 30
#: Keys that an issuer may publish. During a rotation two are in effect; large providers have about ten.
MAX_KEYS: Final = 64
#: Characters of a principal's id, as in policy.toml.
MAX_PRINCIPAL: Final = 512
#: Bits of an RSA key: fewer are weak, and more are slow to check.
_RSA_BITS: Final = range(2048, 8193)
_MAX_EXPONENT: Final = 1 << 32
#: Scopes of one token that are examined, and characters of a user that are recorded.
_MAX_SCOPES: Final = 64
_MAX_USER: Final = 128
_RSA: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_ALGORITHMS: Final[Mapping[tuple[object, object], tuple[str, ...]]] = {
    ("RSA", None): _RSA,
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("OKP", "Ed25519"): ("EdDSA",),
}
_SHAPE = re.compile(r"([A-Za-z0-9_-]{1,2048})\.([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)", re.ASCII)
#: Claims of ID tokens (OpenID Connect Core) and logout tokens that no access token has.
_OTHER_KINDS: Final = ("nonce", "at_hash", "c_hash", "s_hash", "events")
Reason = Literal[
    "malformed", "algorithm", "type", "key", "signature", "issuer", "audience", "expired", "not yet valid", "claims"
]


class TokenError(Exception):
    """A token is rejected; ``busy`` means that a later attempt may succeed."""

    def __init__(self, reason: Reason | Literal["busy"]) -> None:
        """Set a reason that may be shown and recorded: nothing of the token is in it."""
        super().__init__(reason)
        self.reason: Reason | Literal["busy"] = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuerKey:
    """A published key of the issuer."""

    key: Any = field(compare=False)
    algorithms: tuple[str, ...]
    published: str
    """Its published form, to recognize it: faster than by the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OAuth:
    """The authorization server whose tokens are accepted."""

    issuer: str
    audiences: tuple[str, ...] = ()
    """Of which a token names one; empty: one of the addresses of this server."""
    any_type: bool = False
    """True if ``typ`` need not name the purpose of a token."""


class Header(NamedTuple):
    """The unverified header of a token."""

    algorithm: str
    key: str | None


def header_of(token: str, expected: OAuth) -> Header:
    """Return the header of a token with expected claims, of which only the signature remains to be checked.

    Raises TokenError: the claims are not as expected.
    """
    match = _SHAPE.fullmatch(token) if len(token) <= MAX_TOKEN else None
    if match is None:
        raise TokenError("malformed")
    header, claims = (_object(match[part]) for part in (1, 2))
    algorithm, key, kind = header.get("alg"), header.get("kid"), header.get("typ", "")
    if {"crit", "b64", "zip", "enc"} & header.keys():
        raise TokenError("malformed")
    if not isinstance(algorithm, str) or not isinstance(key, str | None) or not isinstance(kind, str):
        raise TokenError("malformed")
    if not any(algorithm in names for names in _ALGORITHMS.values()):
        raise TokenError("algorithm")
    kind = kind.lower().removeprefix("application/")
    other = kind not in ("", "jwt") or any(name in claims for name in _OTHER_KINDS)
    if kind != "at+jwt" and (other or not expected.any_type):
        raise TokenError("type")
    _claims(token, expected)
    return Header(algorithm=algorithm, key=key)


def identity_of(token: str, header: Header, key: IssuerKey, expected: OAuth) -> TokenGrant:
    """Check the signature of a token, and everything else once more; return its owner, without roles.

    The principal is ``oauth:ISSUER#SUBJECT``; characters of a subject except letters, digits and ``-._~@|:`` are
    percent-encoded. Raises TokenError: the key is unsuitable, the signature is not the key's, or the claims name no
    owner.
    """
    if header.algorithm not in key.algorithms:
        raise TokenError("algorithm")
    claims = _claims(token, expected, key=key.key, algorithms=[header.algorithm])
    subject = claims["sub"]
    principal = f"oauth:{expected.issuer}#{quote(subject, safe='@|:')}"
    if not subject or len(principal) > MAX_PRINCIPAL:
        raise TokenError("claims")
    scopes = claims.get("scope", claims.get("scp", ""))
    names = scopes.split(" ") if isinstance(scopes, str) else scopes
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TokenError("claims")
    return TokenGrant(
        principal=principal,
        scopes=tuple(sorted({name for name in names if name})[:_MAX_SCOPES]),
        user=_user(claims),
        expires=float(claims["exp"]) + LEEWAY,
    )


def keys_of(document: Any) -> dict[str, IssuerKey]:
    """Return the usable signing keys of a JWK set (RFC 7517) by ``kid``; skip the others.

    Raises ValueError: it is not a JWK set, or has too many keys.
    """
    listed = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise ValueError("it is no JWK set: it has no list `keys`")  # noqa: TRY004 - of what strangers wrote
    if len(listed) > MAX_KEYS:
        raise ValueError(f"it has more than {MAX_KEYS} keys")
    found: dict[str, IssuerKey] = {}
    for each in listed:
        key = _key(each) if isinstance(each, dict) else None
        kid = each.get("kid", "") if key else None
        if key is not None and isinstance(kid, str):
            found.setdefault(kid, key)
    return found


def _key(jwk: Mapping[str, Any]) -> IssuerKey | None:
    kind, curve = str(jwk.get("kty")), None if jwk.get("kty") == "RSA" else str(jwk.get("crv"))
    allowed = _ALGORITHMS.get((kind, curve), ())
    own, operations = jwk.get("alg"), jwk.get("key_ops", ["verify"])
    algorithms = tuple(name for name in allowed if own is None or own == name)
    signs = jwk.get("use", "sig") == "sig" and isinstance(operations, list) and "verify" in operations
    if not algorithms or not signs or "d" in jwk:
        return None
    try:
        key = jwt.PyJWK.from_dict(dict(jwk), algorithm=algorithms[0]).key
    except (jwt.PyJWTError, ValueError, TypeError, KeyError):
        return None
    if isinstance(key, RSAPublicKey) and (key.key_size not in _RSA_BITS or key.public_numbers().e > _MAX_EXPONENT):
        return None
    return IssuerKey(key=key, algorithms=algorithms, published=json.dumps(jwk, sort_keys=True))


def _object(part: str) -> Mapping[str, Any]:
    try:
        value = strict_json.check(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    except ValueError:  # and of base64
        value = None
    if not isinstance(value, dict):
        raise TokenError("malformed")
    return value


_REASONS: Final[tuple[tuple[type[jwt.PyJWTError], Reason], ...]] = (
    (jwt.InvalidSignatureError, "signature"),
    (jwt.ExpiredSignatureError, "expired"),
    (jwt.ImmatureSignatureError, "not yet valid"),
    (jwt.InvalidIssuerError, "issuer"),
    (jwt.InvalidAudienceError, "audience"),
    (jwt.InvalidAlgorithmError, "algorithm"),
    (jwt.DecodeError, "malformed"),
    (jwt.PyJWTError, "claims"),
)
"""Reasons for PyJWT's exceptions: each class stands before its bases."""


def _claims(token: str, expected: OAuth, key: Any = None, algorithms: list[str] | None = None) -> dict[str, Any]:
    """Return the checked claims of a token; check its signature too if a key is given."""
    options: Any = {f"verify_{name}": True for name in ("exp", "nbf", "iat", "iss", "aud", "sub")}
    try:
        return jwt.decode(
            token, key=key or "", algorithms=algorithms,
            options=options | {"verify_signature": key is not None, "require": ["iss", "aud", "exp", "sub"]},
            audience=expected.audiences, issuer=expected.issuer, leeway=LEEWAY,
        )  # fmt: skip
    except jwt.PyJWTError as problem:
        raise TokenError(next(reason for kind, reason in _REASONS if isinstance(problem, kind))) from None
    except (ValueError, TypeError, OverflowError, ArithmeticError):  # of a claim of another type than it has
        raise TokenError("claims") from None


def _user(claims: Mapping[str, Any]) -> str | None:
    def first(*names: str) -> str:
        return next((claims[name] for name in names if isinstance(claims.get(name), str) and claims[name]), "")

    person = first("preferred_username", "email", "username", "name")
    client = first("client_id", "azp", "cid", "appid")
    return printable(" via ".join(part for part in (person, client) if part))[:_MAX_USER] or None


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
        self._wanted, self._answered = anyio.Event(), anyio.Event()
        self.on_change: Callable[[], None] = lambda: None

    def publishes(self, key: IssuerKey) -> bool:
        """Return whether the issuer publishes a key now."""
        return key in self._fresh().values()

    async def key(self, header: Header) -> IssuerKey:
        """Return the key that a token names; ask the issuer for an unknown one, within its rate.

        Raises TokenError: key: the issuer has none of that name; busy: it does not answer and its keys are too old, or
        too many wait for it.
        """
        found = self._find(header)
        if found is None and (self._wanted.is_set() or self.clock() - self._attempted >= AGAIN_SECONDS):
            if self._answered.statistics().tasks_waiting >= MAX_WAITING:
                raise TokenError("busy")
            self._wanted.set()
            with anyio.move_on_after(SECONDS):
                await self._answered.wait()
            found = self._find(header)
        if found is None:
            raise TokenError("key" if self._fresh() else "busy")
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
        self._wanted.set()  # also of a periodic one, so that requests wait for its answer
        self._attempted = self.clock()
        try:
            with anyio.fail_after(SECONDS):
                found = await self._keys_now()
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, OSError) as error:  # of names that are none, too
            late = f"it did not answer within {SECONDS:g} seconds"
            reason = late if isinstance(error, TimeoutError) else str(error) or type(error).__name__
            fix = "Check that it runs and can be reached from here, and --oauth-issuer."
            raise DiagnosedError(f"Asking the OAuth issuer {self.url} for its keys", reason, fix) from None
        finally:
            self._answered.set()
            self._wanted, self._answered = anyio.Event(), anyio.Event()
        changed = found != self._keys
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
                where = " nor ".join(dict.fromkeys(tried))
                raise ValueError(f"it has no metadata at {where}")  # noqa: TRY004 - of what strangers wrote
            if metadata.get("issuer") != self.url:
                raise ValueError("its metadata names another issuer; write it exactly as there, with its last slash")
            keys_url = metadata.get("jwks_uri")
            if not isinstance(keys_url, str):
                raise ValueError("its metadata has no jwks_uri")  # noqa: TRY004 - of what strangers wrote
            if _checked(keys_url, self.url) and not self._local:
                raise ValueError("its jwks_uri is on this machine, and the issuer is not")
            document = await self._document(client, keys_url)
        found = keys_of(document)
        if not found:
            raise ValueError("it publishes no key that access tokens may be signed with")
        return found

    async def _document(self, client: httpx2.AsyncClient, url: str) -> Any:
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        content = bytearray()
        async with client.stream("GET", url, headers=headers) as answer:
            if answer.status_code in (404, 405):
                return None
            plain = answer.headers.get("content-encoding", "identity") == "identity"
            if not answer.is_success or not plain:
                raise ValueError(f"{url} was answered with status {answer.status_code}")
            async for piece in answer.aiter_raw():
                content += piece
                if len(content) > MAX_DOCUMENT:
                    raise ValueError(f"{url} is longer than {MAX_DOCUMENT} bytes")
        return strict_json.check(bytes(content))

    def _find(self, header: Header) -> IssuerKey | None:
        keys = self._fresh()
        if header.key is not None:
            return keys.get(header.key)
        fitting = [key for key in keys.values() if header.algorithm in key.algorithms]
        return fitting[0] if len(fitting) == 1 else None

    def _fresh(self) -> dict[str, IssuerKey]:
        return self._keys if self.clock() - self._confirmed < STALE_SECONDS else {}


def _checked(url: str, issuer: str) -> bool:
    """Return True for a URL on this machine; raise DiagnosedError if it is unusable."""
    what, fix = f"Using the OAuth issuer {issuer}", "Give --oauth-issuer the https URL that its tokens name as `iss`."
    try:
        place = urlsplit(url)
        host, _ = place.hostname or "", place.port
    except ValueError:
        raise DiagnosedError(what, f"{url!r} is no URL", fix) from None
    local = host == "localhost"
    with suppress(ValueError):
        local = local or ipaddress.ip_address(host).is_loopback
    if place.scheme not in ("http", "https") or not host or place.username is not None or not url.isprintable():
        raise DiagnosedError(what, f"{url!r} is no URL of a web server", fix)
    if place.scheme == "http" and not local:
        raise DiagnosedError(what, f"{url!r} has no TLS: an attacker in between could sign tokens", fix)
    if url == issuer and ("?" in url or "#" in url or " " in url):
        raise DiagnosedError(what, "it has a query or a fragment, which no issuer has", fix)
    return local
