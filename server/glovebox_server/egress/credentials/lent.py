"""Lends credentials to one call's requests: which one a request gets, and where in it the value stands."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import quote, unquote_plus

import anyio.to_thread

from glovebox_profiles.egress import EgressTarget, decide
from glovebox_profiles.egress.errors import InvalidTarget
from glovebox_profiles.model import Credential
from glovebox_server.egress.credentials.redact import Form, forms
from glovebox_server.egress.credentials.sources import CredentialUnavailable, Value

ReadValue = Callable[[str], Awaitable[Value]]
"""Reads the value that a source names; see ``credentials.held``."""
Headers = tuple[tuple[str, str], ...]


@dataclass(slots=True, kw_only=True)
class Lender:
    """The credentials of one call, and what its requests have had of them."""

    credentials: Sequence[Credential]
    read: ReadValue = field(repr=False)
    used: dict[bytes, Form] = field(default_factory=dict, repr=False)
    """The ways of writing what was lent so far, each with its credential's name: none of it may come back."""
    _known: set[str] = field(default_factory=set, repr=False)

    def chosen(self, target: EgressTarget) -> Credential | None:
        """Return the credential that a request gets; the first whose host, methods and paths fit."""
        if target.scheme != "https":
            return None
        return next((each for each in self.credentials if decide(target, [each.rule()]).effect == "allow"), None)

    async def value(self, credential: Credential) -> str:
        """Return a credential's value, which from now on is replaced in every answer of this call.

        Raises:
            InvalidTarget: rule ``egress.credential``; it cannot be had.
        """
        try:
            found = await self.read(credential.source)
        except CredentialUnavailable as failed:
            reason = f"The credential {credential.name} cannot be used: {failed.reason}."
            raise InvalidTarget("egress.credential", reason, f"The operator must act. {failed.fix}") from None
        if found.text not in self._known:
            self.used |= await anyio.to_thread.run_sync(forms, credential.name, found.text)
            self._known.add(found.text)
        return found.text


def require_usable(credential: Credential, target: EgressTarget, headers: Sequence[tuple[str, str]]) -> None:
    """Refuse a request that would defeat redaction, or that says itself what the broker adds.

    Raises:
        InvalidTarget: rule ``egress.credential``.
    """
    name = credential.name
    if any(each.lower() in {"range", "if-range"} for each, _ in headers):
        # RFC 9110 section 14.2: parts of an answer could be asked for that hold parts of the value.
        raise InvalidTarget("egress.credential", f"With the credential {name}, no Range is asked for.", "Ask for all.")
    named = {unquote_plus(part.partition("=")[0]) for part in target.query.replace(";", "&").split("&")}
    if credential.query in named:
        reason = f"The broker adds {credential.query} with the credential {name}."
        raise InvalidTarget("egress.credential", reason, "Leave that parameter out.")


def added(credential: Credential, value: str, target: EgressTarget, headers: Headers) -> tuple[EgressTarget, Headers]:
    """Return what is sent: the request with the value in the one place that the credential names."""
    if credential.header is not None:
        others = (each for each in headers if each[0] != credential.header.lower())
        return target, (*others, (credential.header, credential.prefix + value))
    query = "&".join(part for part in (target.query, f"{credential.query}={quote(value, safe='')}") if part)
    return replace(target, query=query), headers
