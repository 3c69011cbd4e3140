"""Lends credentials to one call's requests: which one a request gets, and where in it the value stands."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import quote, unquote_plus, unquote_to_bytes

import anyio.to_thread

from glovebox_profiles.egress import EgressTarget, decide
from glovebox_profiles.egress.errors import InvalidTarget
from glovebox_profiles.model import Credential
from glovebox_server.guards.credentials import placed
from glovebox_server.guards.credentials.shapes import placeholder
from glovebox_server.guards.credentials.sources import CredentialError, Value
from glovebox_server.guards.redaction.detector import forms
from glovebox_server.guards.watch.markers import Needles, Scanner

ReadValue = Callable[[str], Awaitable[Value]]
"""Reads the value that a source names; see ``credentials.held``."""
Headers = tuple[tuple[str, str], ...]
Said = tuple[str, Sequence[tuple[str, str]]]


@dataclass(slots=True, kw_only=True)
class CredentialInjector:
    """The credentials of one call, and what its requests have had of them."""

    credentials: Sequence[Credential]
    read: ReadValue = field(repr=False)
    used: dict[bytes, str] = field(default_factory=dict, repr=False)
    """The ways of writing keys that may not come back, each with its credential's name."""
    placeholders: dict[str, str] = field(default_factory=dict, repr=False)
    """What programs find in place of keys, by the credential's name."""
    _known: set[str] = field(default_factory=set, repr=False)

    async def environment(self) -> Mapping[str, str]:
        """Make the placeholders of the call; return the variables in which its program finds them."""
        given: dict[str, str] = {}
        for each in self.credentials:
            if each.env is None:
                continue
            try:
                like = (await self.read(each.source)).text
            except CredentialError:
                like = ""  # the request that needs it is refused with the reason, if there is one
            given[each.env] = self.placeholders[each.name] = placeholder(like)
        return given

    def chosen(self, target: EgressTarget, headers: Sequence[tuple[str, str]] = ()) -> Credential | None:
        """Return the credential that a request gets; the first whose host, methods and paths fit, and placeholder."""
        if target.scheme != "https":
            return None
        fits = (each for each in self.credentials if decide(target, [each.rule()]).effect == "allow")
        return next((each for each in fits if each.env is None or self._asked(each, target, headers)), None)

    async def strayed(self, target: EgressTarget, headers: Sequence[tuple[str, str]], body: bytes) -> str | None:
        """Return the name of a credential whose placeholder stands in a request, and not where it is to stand."""
        if not self.placeholders:
            return None
        query, chosen = target.query, self.chosen(target, headers)
        if chosen is not None and chosen.env is not None:
            query, headers = placed.elsewhere(chosen, self.placeholders[chosen.name], target, headers)
        head = [target.host, target.path, query, *(f"{name} {value}" for name, value in headers)]
        data = "\n".join(head).encode("utf-8", "surrogatepass")
        pieces = [data, unquote_to_bytes(data), b"\n", body]

        def search() -> str | None:
            scanner = Scanner(Needles.of(self.placeholders))
            return next((found for piece in pieces if (found := scanner.feed(piece))), None)

        return await anyio.to_thread.run_sync(search)

    def _asked(self, credential: Credential, target: EgressTarget, headers: Sequence[tuple[str, str]]) -> bool:
        standing = self.placeholders.get(credential.name)
        return standing is not None and placed.asked(credential, standing, target, headers)

    async def value(self, credential: Credential) -> str:
        """Return a credential's value, which from now on is replaced in every answer of this call.

        Raises:
            InvalidTarget: rule ``egress.credential``; it cannot be had.
        """
        try:
            found = await self.read(credential.source)
        except CredentialError as failed:
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
    named = [unquote_plus(part.partition("=")[0]) for part in target.query.replace(";", "&").split("&")]
    if credential.query is not None and named.count(credential.query) > (credential.env is not None):
        reason = f"The broker adds {credential.query} with the credential {name}."
        raise InvalidTarget("egress.credential", reason, "Leave that parameter out.")


def added(
    credential: Credential, value: str, target: EgressTarget, headers: Headers, said: Said | None = None
) -> tuple[EgressTarget, Headers]:
    """Return what is sent: the request with the value in the one place that the credential names.

    Args:
        credential: what is lent.
        value: its value.
        target: what is asked for.
        headers: what else is sent.
        said: the placeholder, and the headers as the program wrote them; None where there is no placeholder.
    """
    own: tuple[str, str] | None
    if said is not None:
        target, own = placed.with_key(credential, said[0], value, target, said[1])
    elif credential.header is not None:
        own = credential.header, credential.prefix + value
    else:
        query = "&".join(part for part in (target.query, f"{credential.query}={quote(value, safe='')}") if part)
        return replace(target, query=query), headers
    if own is None:
        return target, headers
    return target, (*(each for each in headers if each[0] != own[0].lower()), own)
