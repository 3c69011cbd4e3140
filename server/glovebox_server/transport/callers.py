"""The callers over HTTP: their tokens' grants and lifetimes, and their shares of the server. No I/O."""

import hmac
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

import anyio

from glovebox_server.transport.tokens import Token, digest_of


@dataclass(slots=True, weakref_slot=True, kw_only=True, eq=False)
class TokenGrant:
    """The grant of a token: its principal, its lifetime, and the events that end it."""

    principal: str
    roles: tuple[str, ...] = ()
    workflow: str | None = None
    user: str | None = None
    """The end user and the client in the token's claims, for the record."""
    scopes: tuple[str, ...] = ()
    """Of an OAuth token."""
    expires: float | None = None
    """Unix time; None: never."""
    removed: anyio.Event = field(default_factory=anyio.Event)
    """Set once the token is revoked or replaced."""
    expired: anyio.Event = field(default_factory=anyio.Event)
    """Set once the token has expired, while something is under way with it."""

    def expire(self, now: float) -> bool:
        """Set ``expired`` if its time is over; return whether the grant has ended for any reason."""
        if self.expires is not None and self.expires <= now:
            self.expired.set()
        return self.expired.is_set() or self.removed.is_set()


class Callers:
    """The tokens in effect."""

    def __init__(self, tokens: Mapping[str, Token]) -> None:
        self._tokens: dict[str, Token] = {}
        self._grants: dict[str, TokenGrant] = {}
        self.used: set[str] = set()
        """Names of the tokens used since the last note on disk, which empties it."""
        self.unusable = 0
        """Number of unusable token files."""
        self.replace(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def grant(self, presented: str) -> TokenGrant | None:
        """Return what a presented token grants, or None.

        The time taken reveals neither how much of a token is right nor which one it is.
        """
        digest = digest_of(presented)
        found = None
        for name, token in self._tokens.items():
            if hmac.compare_digest(token.sha256, digest):
                found = name
        if found is None or self._grants[found].expire(time.time()):
            return None
        self.used.add(found)
        return self._grants[found]

    def replace(self, tokens: Mapping[str, Token], now: float | None = None) -> set[str]:
        """Replace the tokens in effect, without expired ones; return the principals of removed or changed tokens."""
        now = time.time() if now is None else now
        removed = set()
        for name, token in list(self._tokens.items()):
            grant = self._grants[name]
            if not grant.expire(now) and _same(token, tokens.get(name)):
                continue
            if not grant.expired.is_set():
                grant.removed.set()
            removed.add(token.principal)
            del self._tokens[name], self._grants[name]
        for name, token in tokens.items():
            expires = _unix(token.expires)
            if expires is not None and expires <= now:
                continue
            self._tokens[name] = token
            if name not in self._grants:
                roles = () if token.role is None else (token.role,)
                self._grants[name] = TokenGrant(
                    principal=token.principal, roles=roles, workflow=token.workflow, expires=expires
                )
        return removed


class Shares:
    """Shares out a bounded number of places among the callers.

    Tokens are counted, so each has an even share. The subjects of an authorization server are not. Beside tokens they
    have half of the places, and of those one may hold as many as are left. So something is always left, and each
    newcomer gets part of it: the dynamic threshold of ``glovebox_sandboxes.sharing``.
    """

    def __init__(self, most: int, callers: Callers, *, subjects: bool) -> None:
        self._most = most
        self._callers = callers
        self._subjects = subjects

    def allows(self, principal: str, held: Counter[str]) -> bool:
        """Return whether a caller may take one more place, given what each holds."""
        theirs = 0
        if self._subjects:
            theirs = self._most // 2 if len(self._callers) else self._most
        if principal.startswith("token:"):
            return held[principal] < (self._most - theirs) // max(1, len(self._callers))
        left = theirs - sum(count for each, count in held.items() if not each.startswith("token:"))
        return held[principal] < left


def _same(before: Token, now: Token | None) -> bool:
    return now is not None and (before.sha256, before.role, before.workflow, before.expires) == (
        now.sha256,
        now.role,
        now.workflow,
        now.expires,
    )


def _unix(moment: datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()
