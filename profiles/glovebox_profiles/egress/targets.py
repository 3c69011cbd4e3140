"""What one egress request asks for, taken apart strictly. Pure; never resolves or connects.

A URL is read by one expression over printable ASCII, not by ``urllib.parse``, which drops tabs and line ends and so
reads another URL than the one that was written. What could be read in two ways is refused, never repaired.
"""

import re
import unicodedata
from dataclasses import dataclass
from urllib.parse import unquote

from glovebox_profiles.egress.hosts import TargetError, parse_address, parse_host, quoted

#: Servers refuse request lines much beyond this, and nobody reviews longer ones.
MAX_URL = 8192
DEFAULT_PORTS = {"http": 80, "https": 443}
#: CONNECT stands for an opaque TLS tunnel: what is asked inside it cannot be seen.
METHODS = frozenset({"GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "CONNECT"})

_PRINTABLE = re.compile(r"[\x21-\x7e]*")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)([^?#]*)(?:\?([^#]*))?(?:#.*)?")
_AUTHORITY = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::(.*))?")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_PERCENT = re.compile(r"%(?:([0-9A-Fa-f]{2}))?")
_DOUBLE = re.compile(r"%25[0-9A-Fa-f]{2}")
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
#: RFC 3986 section 3.3: what may stand in a path besides percent-encodings; no ``*``, which is the patterns' own.
_PATH = re.compile(r"/(?:[A-Za-z0-9\-._~!$&'()+,;=:@/*]|%[0-9A-F]{2})*")

#: A name in a path, decoded, that means one thing: none of ``; % ? #``, backslash, control; no blank before it; after a
#: first dot no second one and no sign; at its end no dot and no blank. What is not ASCII, ``is_plain`` judges.
_NAME = re.compile(
    r"(?! |\.(?![A-Za-z0-9_\-\x80-\U0010FFFF]))"
    r"[A-Za-z0-9\-._~!$&'()+,=:@*\"<>\[\]^`{|} \x80-\U0010FFFF]+(?<![. ])"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressTarget:
    """One thing the sandbox wants to reach, canonical in every part."""

    method: str
    """Upper case; ``CONNECT`` for a tunnel."""
    scheme: str
    """``http`` or ``https``."""
    host: str
    """Lower-case name, or address without brackets."""
    port: int
    path: str
    """Normalised, begins with a slash; empty for a tunnel."""
    query: str = ""
    """As written, without the question mark. Rules do not look at it."""

    @property
    def authority(self) -> str:
        """Host and, where it is not the scheme's own, port: the value of the ``Host`` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def resource(self) -> str:
        """Path and query as they stand in the request line."""
        return f"{self.path}?{self.query}" if self.query else self.path

    @property
    def url(self) -> str:
        """The canonical URL; for a tunnel, with an empty path."""
        return f"{self.scheme}://{self.authority}{self.resource}"


def parse_url(method: str, url: str) -> EgressTarget:
    """Take an absolute http or https URL apart. A fragment is dropped: it is never sent.

    Raises:
        TargetError: With rule ``egress.method``, ``egress.spelling``, ``egress.scheme``, ``egress.address`` or
            ``egress.path``.
    """
    if method not in METHODS - {"CONNECT"}:
        raise TargetError("egress.method", f"{quoted(method)} is not a method of a request.", "Use GET or HEAD.")
    if len(url) > MAX_URL:
        raise TargetError("egress.spelling", "The URL is too long.", f"{MAX_URL} characters are the limit.")
    found = _URL.fullmatch(url)
    if found is None:
        raise TargetError("egress.spelling", f"{quoted(url)} is not an absolute URL.", "Write it as https://host/path.")
    scheme, authority, path, query = found[1].lower(), found[2], found[3], found[4] or ""
    if scheme not in DEFAULT_PORTS:
        raise TargetError("egress.scheme", f"The scheme {quoted(scheme)} is not served.", "Use https or http.")
    host, port = parse_authority(authority)
    if "\\" in query or not _PRINTABLE.fullmatch(url):
        raise TargetError(
            "egress.spelling",
            f"{quoted(url)} has a space, backslash, control or non-ASCII character in it.",
            "Percent-encode it.",
        )
    return EgressTarget(
        method=method,
        scheme=scheme,
        host=host,
        port=DEFAULT_PORTS[scheme] if port is None else port,
        path=normalise_path(path or "/"),
        query=query,
    )


def parse_connect(authority: str) -> EgressTarget:
    """Take the ``host:port`` of a CONNECT request apart.

    Raises:
        TargetError: It is not a name and a port; an address has no name that the tunnel's TLS could be held to.
    """
    host, port = parse_authority(authority)
    if port is None:
        raise TargetError("egress.spelling", f"{quoted(authority)} has no port.", "Write it as host:443.")
    if parse_address(host) is not None:
        raise TargetError("egress.tunnel", f"A tunnel to the address {host} has no name to check.", "Use a name.")
    return EgressTarget(method="CONNECT", scheme="https", host=host, port=port, path="")


def parse_authority(authority: str) -> tuple[str, int | None]:
    """Return canonical host and port (None where none is written) of a URL's authority.

    Raises:
        TargetError: Rule ``egress.spelling`` or ``egress.address``.
    """
    if "@" in authority:
        raise TargetError(
            "egress.spelling", "The URL carries a user name or password.", "Leave out everything up to the @."
        )
    found = _AUTHORITY.fullmatch(authority)
    if found is None:
        raise TargetError("egress.spelling", f"{quoted(authority)} is not a host and port.", "Write it as host:443.")
    bracketed, plain, port = found.groups()
    if bracketed is not None and ":" not in bracketed:
        raise TargetError("egress.spelling", "Only IPv6 addresses stand in brackets.", "Leave the brackets out.")
    host = parse_host(plain if bracketed is None else bracketed)
    if port is None:
        return host, None
    if not _PORT.fullmatch(port) or int(port) > 65535:  # noqa: PLR2004 - the highest port there is
        raise TargetError("egress.spelling", f"{quoted(port)} is not a port.", "1 to 65535, without leading zeros.")
    return host, int(port)


def normalise_path(path: str) -> str:
    """Return ``path`` in the one spelling that rules are compared with and that is sent.

    Percent-encodings of unreserved characters are decoded, the others written in upper case (RFC 3986 section 6.2.2).

    Raises:
        TargetError: Rule ``egress.path``: dot segments; slashes, backslashes, control characters or further
            encodings in encoded form; characters a path cannot have. A server may read each of these as another path.
    """

    def once(found: re.Match[str]) -> str:
        code = found[1]
        if code is None:
            raise _bad_path(path, "a percent sign that encodes nothing")
        character = chr(int(code, 16))
        if character in "/\\" or character < " " or character == "\x7f":
            raise _bad_path(path, "an encoded slash, backslash or control character")
        return character if character in _UNRESERVED else f"%{code.upper()}"

    normal = _PERCENT.sub(once, path)
    if not _PATH.fullmatch(normal):
        raise _bad_path(path, "a character that paths cannot have")
    if _DOUBLE.search(normal):
        raise _bad_path(path, "an encoding inside an encoding")
    # ``..;x`` is ``..`` to servers that cut path parameters off before they resolve dots.
    if any(segment.partition(";")[0] in {".", ".."} for segment in normal.split("/")):
        raise _bad_path(path, "a dot segment")
    return normal


def is_plain(path: str) -> bool:
    """Whether every server reads a canonical path as the folders and the name that stand there.

    An allow-list, since servers and the proxies before them decode twice, cut parameters off, fold compatible and
    look-alike characters, take overlong UTF-8, and drop blanks and dots at the end of a name: ``..%3B``, ``..%20``,
    ``%C0%AE``, ``%EF%BC%8E`` (a full-width dot) and ``%E2%88%95`` (a division slash) lead out of a folder on some.
    """
    try:
        segments = unquote(path, errors="strict").split("/")[1:]
    except UnicodeDecodeError:
        return False
    # Nothing stands behind a last slash.
    named = segments if segments[-1] else segments[:-1]
    return all(_NAME.fullmatch(each) and all(map(_stands_for_itself, each)) for each in named)


def _stands_for_itself(character: str) -> bool:
    """Whether it is ASCII, or a letter, mark or digit that is no other's compatible form."""
    if character.isascii():
        return True
    return unicodedata.category(character)[0] in "LMN" and unicodedata.normalize("NFKC", character) == character


def _bad_path(path: str, what: str) -> TargetError:
    return TargetError(
        "egress.path", f"The path {quoted(path)} has {what}.", "Write the plain path that the server will see."
    )
