"""Events of the tokens that callers over HTTP have. None holds a token, or anything it could be guessed from."""

from dataclasses import dataclass
from typing import ClassVar

from glovebox_audit.events.base import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCreated(Event):
    """An operator is about to make a token. On disk before it is."""

    kind: ClassVar[str] = "token.created"

    principal: str
    """Who comes with it: ``token:<name>``."""
    by: str
    """Who makes it: ``local:<uid>``."""
    role: str | None = None
    """The role it is bound to."""
    workflow: str | None = None
    """The workflow its calls belong to."""
    expires: str | None = None
    """When it ends, in UTC; absent where it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRevoked(Event):
    """An operator ended a token. It is gone before this is written, so that nothing can keep it in force."""

    kind: ClassVar[str] = "token.revoked"

    principal: str
    """Who came with it: ``token:<name>``."""
    by: str
    """Who ended it: ``local:<uid>``."""
