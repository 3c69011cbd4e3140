"""Finds a placeholder in a request, and puts the key in its place. Pure."""

import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final
from urllib.parse import quote

from glovebox_profiles.egress.targets import EgressTarget
from glovebox_profiles.model import Credential

Headers = Sequence[tuple[str, str]]
_SCHEMES: Final = ("", "Bearer ", "bearer ", "Token ", "token ")
_USER: Final = re.compile(r"[A-Za-z0-9._@+-]{0,64}")


def is_in_place(credential: Credential, placeholder: str, target: EgressTarget, headers: Headers) -> bool:
    """Return whether a request has the placeholder in the header or parameter that the credential names, once."""
    return _fill(credential, placeholder, placeholder, target, headers) is not None


def replace_placeholder(
    credential: Credential, placeholder: str, value: str, target: EgressTarget, headers: Headers
) -> tuple[EgressTarget, tuple[str, str] | None]:
    """Return the request's target and the header that is added, the key where the placeholder stood."""
    filled = _fill(credential, placeholder, value, target, headers)
    if filled is None:
        raise ValueError("there is no placeholder in this request")
    if credential.header is None:
        return replace(target, query=filled), None
    return target, (credential.header, filled)


def without_placeholder(
    credential: Credential, placeholder: str, target: EgressTarget, headers: Headers
) -> tuple[str, Headers]:
    """Return the query and the headers without the one place where the placeholder may stand."""
    if not is_in_place(credential, placeholder, target, headers):
        return target.query, headers
    if credential.header is None:
        own = f"{credential.query}={placeholder}"
        return "&".join(part for part in target.query.split("&") if part != own), headers
    return target.query, [header for header in headers if header[0].lower() != credential.header.lower()]


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
