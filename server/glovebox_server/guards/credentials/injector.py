"""Injects keys into one call's requests: which key a request gets, and where in it the key stands."""

import base64
import binascii
import re
import secrets
import string
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final
from urllib.parse import quote, unquote_plus, unquote_to_bytes

import anyio.to_thread

from glovebox_profiles.egress.rules import decide
from glovebox_profiles.egress.targets import EgressTarget, quoted
from glovebox_profiles.model import Credential
from glovebox_sandboxes.contract.errors import DiagnosedError, RefusedError
from glovebox_server.egress.events import EgressAttempt, EgressLimits, Headers
from glovebox_server.egress.request import request_headers
from glovebox_server.guards.credentials.sources import CredentialValue
from glovebox_server.guards.redaction.detector import Detector, KeyMasker, derive_forms, index_markers

_SCHEMES: Final = ("", "Bearer ", "bearer ", "Token ", "token ")
_USER: Final = re.compile(r"[A-Za-z0-9._@+-]{0,64}")


def _fill(credential: Credential, placeholder: str, value: str, target: EgressTarget, headers: Headers) -> str | None:
    """Return the header's value or the query with ``value`` for the placeholder."""
    if credential.header is None:
        parts = target.query.split("&")
        own = f"{credential.query}={placeholder}"
        if parts.count(own) != 1:
            return None
        return "&".join(f"{credential.query}={quote(value, safe='')}" if part == own else part for part in parts)
    name = credential.header.lower()
    said = [written for header, written in headers if header.lower() == name]
    if len(said) != 1:
        return None
    schemes = _SCHEMES if name == "authorization" else ("",)
    for before in (credential.prefix, *schemes):
        if said[0] == before + placeholder:
            # An empty scheme is a client that leaves it out: the profile's is what the server wants.
            return (before or credential.prefix) + value
    return _basic(said[0], placeholder, value) if name == "authorization" else None


def _basic(written: str, placeholder: str, value: str) -> str | None:
    """RFC 7617; the key is the password, or, as some services have it, the user without one."""
    scheme, _, encoded = written.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        user, colon, password = base64.b64decode(encoded, validate=True).decode("ascii").partition(":")
    except (binascii.Error, ValueError):
        return None
    if colon and password == placeholder and _USER.fullmatch(user):
        pair = f"{user}:{value}"
    elif colon and user == placeholder and not password:
        pair = f"{value}:"
    else:
        return None
    return "Basic " + base64.b64encode(pair.encode()).decode()


_LENGTHS: Final = (40, 64, 96, 128, 256)
"""Of placeholders: the first that a value has room in. 40 characters is also what the search for markers needs."""
_PREFIXES: Final = (
    *("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "glptt-", "gldt-", "npm_", "pypi-", "hf_"),
    *("sk-ant-api03-", "sk-ant-", "sk-proj-", "sk-", "sk_live_", "sk_test_", "rk_live_", "pk_live_", "whsec_"),
    *("xoxb-", "xoxp-", "xapp-", "AKIA", "ASIA", "AIzaSy", "ya29.", "SG.", "dop_v1_", "dckr_pat_", "lin_api_"),
    *("shpat_", "secret_", "ntn_", "hvs.", "ATATT", "figd_", "pat-", "eyJ"),
)
"""Prefixes of keys of well-known services: clients check them."""


@dataclass(slots=True, kw_only=True)
class CredentialInjector:
    """The credentials of one call, and their use by its requests."""

    credentials: Sequence[Credential]
    read: Callable[[str], Awaitable[CredentialValue]] = field(repr=False)
    used: dict[bytes, str] = field(default_factory=dict, repr=False)
    """Encodings of keys that may not come back, with their credentials' names."""
    placeholders: dict[str, str] = field(default_factory=dict, repr=False)
    _known: set[str] = field(default_factory=set, repr=False)

    async def prepare_environment(self) -> Mapping[str, str]:
        """Make the placeholders of the call; return the variables in which its program finds them."""
        variables: dict[str, str] = {}
        for credential in self.credentials:
            if credential.env is None:
                continue
            try:
                like = (await self.read(credential.source)).text
            except DiagnosedError:
                like = ""  # the request that needs it is refused with the reason, if there is one
            variables[credential.env] = self.placeholders[credential.name] = make_placeholder(like)
        return variables

    def new_mask(self) -> KeyMasker:
        """Return a masker of this call's keys for one answer."""
        return KeyMasker(self.used)

    async def find_stray(self, attempt: EgressAttempt, target: EgressTarget) -> None:
        """Report a placeholder at a place in a request that gets no key."""
        if not self.placeholders or attempt.hop or attempt.kind != "request":
            return
        query, headers = target.query, attempt.headers
        chosen = self.choose(target, headers)
        if chosen is not None and chosen.env is not None:
            # Without the one place where it may stand.
            own, name = f"{chosen.query}={self.placeholders[chosen.name]}", (chosen.header or "").lower()
            query = "&".join(part for part in query.split("&") if chosen.header or part != own)
            headers = [header for header in headers if header[0].lower() != name]
        head = [target.host, target.path, query, *(f"{name} {value}" for name, value in headers)]
        data = "\n".join(head).encode("utf-8", "surrogatepass")
        pieces = [data, unquote_to_bytes(data), b"\n", attempt.body]

        def search() -> str | None:
            scanner = Detector(index_markers(self.placeholders))
            return next((name for piece in pieces if (name := scanner.feed(piece))), None)

        attempt.strayed = await anyio.to_thread.run_sync(search)

    async def inject(self, attempt: EgressAttempt, target: EgressTarget) -> None:
        """Put the key into a request that gets one."""
        if attempt.kind != "request" or not attempt.takes_key:
            return
        credential = self.choose(target, attempt.headers)
        if credential is None:
            return
        attempt.credential = credential.name
        require_usable(credential, target, attempt.headers)
        headers, dropped = request_headers(attempt.headers, target.method, attempt.body, EgressLimits(), credential)
        value = await self.read_value(credential)
        placeholder = self.placeholders.get(credential.name)
        if placeholder is not None:
            filled = _fill(credential, placeholder, value, target, attempt.headers)
        elif credential.header is not None:
            filled = credential.prefix + value
        else:
            filled = "&".join(part for part in (target.query, f"{credential.query}={quote(value, safe='')}") if part)
        if filled is None:
            raise ValueError("there is no placeholder in this request")
        if credential.header is None:
            target = replace(target, query=filled)
        else:
            name = credential.header.lower()
            headers = (*(header for header in headers if header[0] != name), (credential.header, filled))
            dropped = tuple(other for other in dropped if other != quoted(name))
        attempt.sent_target, attempt.sent_headers, attempt.dropped = target, headers, dropped

    def choose(self, target: EgressTarget, headers: Headers = ()) -> Credential | None:
        """Return the credential that a request gets: the first whose host, methods, paths and placeholder fit."""
        if target.scheme != "https":
            return None
        for credential in self.credentials:
            if decide(target, [credential.rule()]).effect != "allow":
                continue
            placeholder = self.placeholders.get(credential.name)
            if credential.env is None or (placeholder and _fill(credential, placeholder, placeholder, target, headers)):
                return credential
        return None

    async def read_value(self, credential: Credential) -> str:
        """Return a credential's value, and mask it in every later answer of this call.

        Raises RefusedError: Rule ``egress.credential``; it is unavailable.
        """
        try:
            value = await self.read(credential.source)
        except DiagnosedError as failed:
            reason = f"The credential {credential.name} cannot be used: {failed.reason}."
            raise RefusedError("egress.credential", reason, f"The operator must act. {failed.fix}") from None
        if value.text not in self._known:
            self.used |= await anyio.to_thread.run_sync(derive_forms, credential.name, value.text)
            self._known.add(value.text)
        return value.text


def require_usable(credential: Credential, target: EgressTarget, headers: Headers) -> None:
    """Refuse a request that would defeat masking, or that sets what is injected.

    Raises RefusedError: Rule ``egress.credential``.
    """
    name = credential.name
    if any(header.lower() in {"range", "if-range"} for header, _ in headers):
        # RFC 9110 section 14.2: parts of an answer could be asked for that hold parts of the value.
        raise RefusedError("egress.credential", f"With the credential {name}, no Range is asked for.", "Ask for all.")
    named = [unquote_plus(part.partition("=")[0]) for part in target.query.replace(";", "&").split("&")]
    if credential.query is not None and named.count(credential.query) > (credential.env is not None):
        reason = f"The broker adds {credential.query} with the credential {name}."
        raise RefusedError("egress.credential", reason, "Leave that parameter out.")


def make_placeholder(value: str) -> str:
    """Return a random text that looks like the value to a client that checks how keys of its kind begin."""
    begin = value[: max((len(prefix) for prefix in _PREFIXES if value.startswith(prefix)), default=0)]
    length = next((length for length in _LENGTHS if len(value) <= length), _LENGTHS[-1])
    return begin + "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(length - len(begin)))
