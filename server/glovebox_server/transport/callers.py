"""Who may come in over HTTP: what a caller's token is worth, until when, and its share of what there is. No I/O."""

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
    """What a token is worth: whose the requests are that come with it, until when, and what says that it is over."""

    principal: str
    """Id of the principal."""
    roles: tuple[str, ...] = ()
    workflow: str | None = None
    user: str | None = None
    """The end user and the client that the token's claims name, for the record."""
    scopes: tuple[str, ...] = ()
    """Of an OAuth token."""
    expires: float | None = None
    """Unix time; None: never."""
    removed: anyio.Event = field(default_factory=anyio.Event)
    """Set once the token is revoked or replaced."""
    expired: anyio.Event = field(default_factory=anyio.Event)
    """Set once its time is over, while something is under way with it."""

    def expire(self, now: float) -> bool:
        """Say that it is over where its time is; returns whether it is over, for whatever reason."""
        if self.expires is not None and self.expires <= now:
            self.expired.set()
        return self.expired.is_set() or self.removed.is_set()


class Callers:
    """The tokens in force."""

    def __init__(self, tokens: Mapping[str, Token]) -> None:
        self._tokens: dict[str, Token] = {}
        self._grants: dict[str, TokenGrant] = {}
        self.used: set[str] = set()
        """Names of the tokens that somebody came in with; whoever notes them empties it."""
        self.unusable = 0
        """Files of tokens that cannot be used."""
        self.replace(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def grant(self, presented: str) -> TokenGrant | None:
        """Return what a presented token grants, or None.

        The time it takes depends neither on how much of a token is right nor on which one it is.
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
        """Have other tokens in force, of which those that expired are none.

        Returns:
            The principals of those that no longer are, the same name with another token too.
        """
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
    """Shares out so many places among the callers.

    Tokens are counted, so each has an even share. How many subjects an authorization server knows is not: they have
    half of the places where there are tokens too, and of those one may hold as many as are left. So there is always
    something left, and each one that comes gets part of that: the dynamic threshold of ``glovebox_sandboxes.sharing``.
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
