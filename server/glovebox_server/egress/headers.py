"""Filters the headers that cross between sandbox and network. Pure."""

import re
from collections.abc import Iterable, Sequence

from glovebox_profiles.egress.errors import InvalidTarget, quoted
from glovebox_profiles.model import Credential
from glovebox_server.egress.decode import ACCEPTED
from glovebox_server.egress.limits import EgressLimits

#: What a sandbox may say about what it wants, and nothing besides: nothing that authenticates (an allowed host is a way
#: out to whoever has a key there), nothing about framing, routing or connection, nothing that makes another request of
#: it than the one that was decided (method overrides, rewritten URLs) or another body than the whole (ranges). What a
#: profile names besides goes to the one host that has the operator's key, and is none of these.
_PASSED = frozenset(
    {
        "accept",
        "accept-language",
        "if-match",
        "if-modified-since",
        "if-none-match",
        "if-unmodified-since",
        "user-agent",
    }
)
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
#: Not handed back: framing and encoding are undone, the connection is ours, and a sandbox keeps no cookies.
_KEPT = frozenset(
    {
        "alt-svc",
        "connection",
        "content-encoding",
        "content-length",
        "keep-alive",
        "proxy-authenticate",
        "proxy-connection",
        "set-cookie",
        "set-cookie2",
        "strict-transport-security",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_VALUE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e\t]*[\x21-\x7e])?")
_MEDIA_TYPE = re.compile(r"[a-z0-9][a-z0-9!#$&^_.+-]{0,63}/[a-z0-9][a-z0-9!#$&^_.+-]{0,126}")
_USER_AGENT = "Glovebox"


def request_headers(
    headers: Sequence[tuple[str, str]],
    method: str,
    body: bytes,
    limits: EgressLimits,
    credential: Credential | None = None,
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Return the headers to send and the names of those that were left out.

    Args:
        headers: As the sandbox wrote them.
        method: Upper case.
        body: Of the request.
        limits: Bounds of the call.
        credential: Whose key the request gets; it may name further headers.

    Raises:
        InvalidTarget: Rule ``egress.header`` or ``egress.body``: too much, said twice, or not plain text.
    """
    if body and method not in _WITH_BODY:
        raise InvalidTarget("egress.body", f"A {method} request carries no body.", "Put it into the URL's query.")
    if len(body) > limits.request_body_bytes:
        raise InvalidTarget(
            "egress.body", "The request's body is too large.", f"{limits.request_body_bytes} bytes are the limit."
        )
    if sum(len(name) + len(value) for name, value in headers) > limits.request_header_bytes:
        raise InvalidTarget(
            "egress.header", "The request's headers are too large.", f"{limits.request_header_bytes} bytes in all."
        )
    own = {name.lower() for name in credential.headers} if credential else set()
    fixed = {name.lower(): value for name, value in credential.set_headers.items()} if credential else {}
    passed: dict[str, str] = {}
    dropped: dict[str, None] = {}
    for written, value in headers:
        name = written.lower()
        typed = name == "content-type" and method in _WITH_BODY
        if name in fixed or not (typed or name in _PASSED or name in own):
            dropped[quoted(name)] = None
        elif name in passed or not _VALUE.fullmatch(value):
            raise InvalidTarget(
                "egress.header", f"The header {name} is said twice or is not plain text.", "Printable ASCII, once."
            )
        else:
            passed[name] = value
    passed |= fixed
    passed.setdefault("user-agent", _USER_AGENT)
    passed.setdefault("accept", "*/*")
    passed["accept-encoding"] = ACCEPTED
    return tuple(passed.items()), tuple(dropped)


def media_type(headers: Iterable[tuple[str, str]]) -> str | None:
    """Return the media type that a response says, without its parameters; None where it says none, or no such thing."""
    said = next((value for name, value in headers if name == "content-type"), "").partition(";")[0].strip().lower()
    return said if _MEDIA_TYPE.fullmatch(said) else None


def returned_headers(headers: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return the response headers that a sandbox sees."""
    return tuple((name, value) for name, value in headers if name not in _KEPT)
