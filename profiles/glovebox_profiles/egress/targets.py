"""The target of an egress request: the grammar of hosts, addresses and URLs. Pure; never resolves or connects.

A URL is read by one expression over printable ASCII. ``urllib.parse`` drops tabs and line ends, and so reads another
URL than the one that was written. An ambiguous URL is refused, never repaired.

Of hosts:

Rule 1  A host is letters, digits and hyphens in labels of 1 to 63, joined by dots, 253 at most (RFC 1123 section 2.1).
Rule 2  Comparison happens on lower case, whole labels at a time; nothing is stripped, decoded or repaired first.
Rule 3  A text whose last label is a number is an IPv4 address to some parser, so it is one here, and only the spelling
        ``a.b.c.d`` of a public address is accepted (https://url.spec.whatwg.org/#ends-in-a-number-checker).
Rule 4  Unicode is refused, not mapped: two libraries map it to two hosts. ``xn--`` labels are taken as written.

The refused ranges are those of the IANA special-purpose registries
(https://www.iana.org/assignments/iana-ipv4-special-registry and .../iana-ipv6-special-registry), the multicast ranges,
and the addresses at which clouds hand out credentials. ``ipaddress.is_global`` is not used: its answer changed between
Python releases, and it accepts multicast and cloud hosts' own service addresses.
"""

import re
import unicodedata
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_network
from typing import Literal, get_args
from urllib.parse import unquote

from glovebox_sandboxes.contract.errors import RefusedError

Address = IPv4Address | IPv6Address

#: Servers refuse request lines much beyond this, and people do not review longer ones.
MAX_URL = 8192
DEFAULT_PORTS = {"http": 80, "https": 443}
#: CONNECT stands for an opaque TLS tunnel, whose requests cannot be seen.
Method = Literal["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "CONNECT"]
METHODS: frozenset[str] = frozenset(get_args(Method))

_PRINTABLE = re.compile(r"[\x21-\x7e]*")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)([^?#]*)(?:\?([^#]*))?(?:#.*)?")
_AUTHORITY = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::(.*))?")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_PERCENT = re.compile(r"%(?:([0-9A-Fa-f]{2}))?")
_DOUBLE = re.compile(r"%25[0-9A-Fa-f]{2}")
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
#: RFC 3986 section 3.3: characters of a path beside percent-encodings; no ``*``, which is the patterns' own.
_PATH = re.compile(r"/(?:[A-Za-z0-9\-._~!$&'()+,;=:@/*]|%[0-9A-F]{2})*")

#: A decoded name in a path with one meaning: none of ``; % ? #``, backslash, control; no blank before it; after a first
#: dot no second one and no sign; at its end no dot and no blank. ``is_plain`` judges what is not ASCII.
_NAME = re.compile(
    r"(?! |\.(?![A-Za-z0-9_\-\x80-\U0010FFFF]))"
    r"[A-Za-z0-9\-._~!$&'()+,=:@*\"<>\[\]^`{|} \x80-\U0010FFFF]+(?<![. ])"
)

#: Characters of a hostile text in a message: enough to recognize it, too few to carry instructions.
QUOTED_CHARACTERS = 60
#: RFC 1035 section 2.3.4: 255 octets on the wire leave 253 characters of text.
MAX_HOST = 253
MAX_LABEL = 63
#: A wildcard below fewer labels would span a whole top-level domain.
MIN_WILDCARD_LABELS = 2

_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?")
_COLONS = re.compile(r"[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*(?:%.*)?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
#: Names with another meaning on every network (RFC 6761, 6762, 7686, 8375, and ICANN's ``internal``).
_LOCAL_SUFFIXES = frozenset({"arpa", "internal", "local", "localhost", "onion"})
#: Clouds' credential services with a name in the public tree (those below ``internal`` are refused with it).
_METADATA_NAMES = frozenset(
    {"metadata.goog", "metadata.packet.net", "metadata.platformequinix.com", "metadata.tencentyun.com"}
)

#: The first match names the refusal, so single addresses come before the ranges that hold them.
_REFUSED: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "a cloud metadata service",
        (
            "169.254.169.254/32",  # AWS, Azure, Google Cloud, DigitalOcean, Hetzner, IBM, Oracle, OpenStack
            "169.254.170.2/32",  # AWS ECS task credentials
            "169.254.170.23/32",  # AWS EKS pod identity
            "169.254.0.23/32",  # Tencent Cloud
            "100.100.100.200/32",  # Alibaba Cloud
            "168.63.129.16/32",  # Azure's host agent: a public address that only ever reaches the host
            "192.0.0.192/32",  # Oracle Cloud, older
            "fd00:ec2::254/128",  # AWS
            "fd00:ec2::23/128",  # AWS EKS pod identity
            "fd20:ce::254/128",  # Google Cloud
        ),
    ),
    ("the unspecified address", ("0.0.0.0/32", "::/128")),
    ("this network", ("0.0.0.0/8",)),
    ("loopback", ("127.0.0.0/8", "::1/128")),
    ("a private network", ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7", "fec0::/10")),
    ("link-local", ("169.254.0.0/16", "fe80::/10")),
    ("carrier-grade NAT", ("100.64.0.0/10",)),
    ("benchmarking", ("198.18.0.0/15", "2001:2::/48")),
    ("documentation", ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32", "3fff::/20")),
    ("broadcast", ("255.255.255.255/32",)),
    ("multicast", ("224.0.0.0/4", "ff00::/8")),
    ("an IPv4 address mapped into IPv6", ("::ffff:0:0/96", "::ffff:0:0:0/96", "::/96")),
    ("NAT64", ("64:ff9b::/96", "64:ff9b:1::/48")),
    ("6to4", ("2002::/16", "192.88.99.0/24")),
    ("Teredo", ("2001::/32",)),
    ("discard-only", ("100::/64", "100:0:0:1::/64")),
    ("reserved", ("192.0.0.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.175.48.0/24", "240.0.0.0/4")),
    ("reserved", ("2001::/23", "2620:4f:8000::/48", "5f00::/16")),
)
_TABLE = [(ip_network(range_), name) for name, ranges in _REFUSED for range_ in ranges]
_GLOBAL_UNICAST = IPv6Network("2000::/3")
#: Interface identifiers that embed an IPv4 address behind any prefix (ISATAP, RFC 5214 section 6.1).
_ISATAP = frozenset({0x00005EFE, 0x02005EFE})


def _misspelt(reason: str, hint: str) -> RefusedError:
    return RefusedError("egress.spelling", reason, hint)


def quoted(text: str) -> str:
    """Return hostile text for a message: printable ASCII in quotes, escapes for the rest, bounded."""
    escaped = ascii(text[:QUOTED_CHARACTERS])
    return escaped if len(text) <= QUOTED_CHARACTERS else f"{escaped}…"


def parse_host(text: str) -> str:
    """Return the canonical form of a host: a lower-case name, or an address. Port and brackets are not part of it.

    Raises:
        RefusedError: It breaks the rules above, is an address that is not public, or is a local name.
    """
    if (address := parse_address(text)) is not None:
        if name := refusal(address):
            raise RefusedError("egress.address", f"{address} is {name}.", "Only public addresses can be reached.")
        return str(address)
    labels = _labels(text)
    if len(labels) == 1 or labels[-1] in _LOCAL_SUFFIXES or ".".join(labels) in _METADATA_NAMES:
        hint = "Only public hosts can be reached; write the full name, such as docs.python.org."
        raise RefusedError("egress.address", f"{quoted(text)} is the name of something local.", hint)
    return ".".join(labels)


def parse_address(text: str) -> Address | None:
    """Return the address if ``text`` is its canonical spelling, None if it is a name.

    Raises:
        RefusedError: It is another spelling of an address (decimal, octal, hexadecimal, short, zone id, …).
    """
    last = text.rstrip(".").rpartition(".")[2]
    if not _COLONS.fullmatch(text) and not _NUMBER.fullmatch(last.lower()):
        return None
    try:
        address: Address = IPv6Address(text) if ":" in text else IPv4Address(text)
    except ValueError:
        address = IPv4Address(0)
    if str(address) != text or (isinstance(address, IPv6Address) and address.scope_id is not None):
        hint = "Write it as 1.2.3.4, or lower case and compressed for IPv6."
        raise _misspelt(f"{quoted(text)} is an unusual spelling of an address.", hint)
    return address


def parse_pattern(text: str) -> str:
    """Return the canonical form of a rule's host: an exact host, or ``*.`` and a name of at least two labels.

    Raises:
        RefusedError: It is neither.
    """
    base = text.removeprefix("*.")
    if "*" not in text:
        return parse_host(text)
    hint = "A rule names one host, or all subdomains of one as *.example.org; there is no rule for every host."
    if base != text:
        if parse_address(base) is None and len(_labels(base)) >= MIN_WILDCARD_LABELS:
            return f"*.{parse_host(base)}"
        hint = "At least two labels after the star: *.example.org."
    raise RefusedError("egress.host", f"{quoted(text)} would match too much.", hint)


def pattern_covers(wide: str, narrow: str) -> bool:
    """Return whether the canonical pattern ``wide`` matches the host ``narrow``, or all that this pattern matches.

    ``*.example.org`` never matches ``example.org`` itself.
    """
    return wide == narrow or (wide.startswith("*") and narrow.removeprefix("*").endswith(wide[1:]))


def _labels(text: str) -> list[str]:
    """Split a name into lower-case labels, or raise with the problem and the correct form."""
    if not text.isascii():
        hint = "Write an international name in its xn-- form, as the browser's address bar copies it."
        raise _misspelt(f"{quoted(text)} is not ASCII.", hint)
    if len(text) > MAX_HOST:
        raise _misspelt(f"{quoted(text)} is too long for a host.", f"{MAX_HOST} characters are the limit.")
    labels = text.lower().split(".")
    if labels[-1] == "" and len(labels) > 1:
        raise _misspelt(f"{quoted(text)} ends in a dot.", "Leave the last dot out.")
    if any(len(label) > MAX_LABEL or not _LABEL.fullmatch(label) for label in labels):
        hint = f"Letters, digits and hyphens in labels of 1 to {MAX_LABEL} characters, joined by dots."
        raise _misspelt(f"{quoted(text)} is not a host name.", hint)
    return labels


def refusal(address: Address) -> str | None:
    """Return the kind of ``address`` if it must never be dialled, or None for an ordinary public address.

    Addresses that carry another (mapped, NAT64, 6to4, Teredo, ISATAP) are all refused: public addresses need no such
    spelling, and a translator on the way would decide where it ends.
    """
    if isinstance(address, IPv6Address) and address.scope_id is not None:
        return "an address with a zone id"
    for network, name in _TABLE:
        if address in network:
            return name
    if isinstance(address, IPv6Address):
        if address not in _GLOBAL_UNICAST:
            return "reserved"
        if (int(address) >> 32) & 0xFFFFFFFF in _ISATAP:
            return "ISATAP"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressTarget:
    """A target of the sandbox, canonical in every part."""

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
    """As written, without the question mark. Rules ignore it."""

    @property
    def authority(self) -> str:
        """Return host and non-default port: the value of the ``Host`` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def resource(self) -> str:
        """Return path and query as in the request line."""
        return f"{self.path}?{self.query}" if self.query else self.path

    @property
    def url(self) -> str:
        """Return the canonical URL; for a tunnel, with an empty path."""
        return f"{self.scheme}://{self.authority}{self.resource}"


def parse_url(method: str, url: str) -> EgressTarget:
    """Parse an absolute http or https URL. A fragment is dropped: it is never sent.

    Raises:
        RefusedError: With rule ``egress.method``, ``egress.spelling``, ``egress.scheme``, ``egress.address`` or
            ``egress.path``.
    """
    if method not in METHODS - {"CONNECT"}:
        raise RefusedError("egress.method", f"{quoted(method)} is not a method of a request.", "Use GET or HEAD.")
    if len(url) > MAX_URL:
        raise _misspelt("The URL is too long.", f"{MAX_URL} characters are the limit.")
    found = _URL.fullmatch(url)
    if found is None:
        raise _misspelt(f"{quoted(url)} is not an absolute URL.", "Write it as https://host/path.")
    scheme, authority, path, query = found[1].lower(), found[2], found[3], found[4] or ""
    if scheme not in DEFAULT_PORTS:
        raise RefusedError("egress.scheme", f"The scheme {quoted(scheme)} is not served.", "Use https or http.")
    host, port = parse_authority(authority)
    if "\\" in query or not _PRINTABLE.fullmatch(url):
        what = "a space, backslash, control or non-ASCII character"
        raise _misspelt(f"{quoted(url)} has {what} in it.", "Percent-encode it.")
    port, path = port or DEFAULT_PORTS[scheme], normalise_path(path or "/")
    return EgressTarget(method=method, scheme=scheme, host=host, port=port, path=path, query=query)


def parse_connect(authority: str) -> EgressTarget:
    """Parse the ``host:port`` of a CONNECT request.

    Raises:
        RefusedError: It is not a name and a port; the tunnel's TLS cannot be verified against an address.
    """
    host, port = parse_authority(authority)
    if port is None:
        raise _misspelt(f"{quoted(authority)} has no port.", "Write it as host:443.")
    if parse_address(host) is not None:
        raise RefusedError("egress.tunnel", f"A tunnel to the address {host} has no name to check.", "Use a name.")
    return EgressTarget(method="CONNECT", scheme="https", host=host, port=port, path="")


def parse_authority(authority: str) -> tuple[str, int | None]:
    """Return canonical host and port (None where none is written) of a URL's authority.

    Raises:
        RefusedError: Rule ``egress.spelling`` or ``egress.address``.
    """
    if "@" in authority:
        raise _misspelt("The URL carries a user name or password.", "Leave out everything up to the @.")
    found = _AUTHORITY.fullmatch(authority)
    if found is None:
        raise _misspelt(f"{quoted(authority)} is not a host and port.", "Write it as host:443.")
    bracketed, plain, port = found.groups()
    if bracketed is not None and ":" not in bracketed:
        raise _misspelt("Only IPv6 addresses stand in brackets.", "Leave the brackets out.")
    host = parse_host(plain if bracketed is None else bracketed)
    if port is not None and (not _PORT.fullmatch(port) or int(port) > 65535):  # noqa: PLR2004 - the highest port
        raise _misspelt(f"{quoted(port)} is not a port.", "1 to 65535, without leading zeros.")
    return host, None if port is None else int(port)


def normalise_path(path: str) -> str:
    """Return ``path`` in the one spelling that rules are compared with and that is sent.

    Percent-encodings of unreserved characters are decoded, the others written in upper case (RFC 3986 section 6.2.2).

    Raises:
        RefusedError: Rule ``egress.path``: dot segments; slashes, backslashes, control characters or further encodings
            in encoded form; characters a path cannot have. A server may read each of these as another path.
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
    """Return whether every server reads a canonical path as the same folders and name.

    An allowlist, since servers and the proxies before them decode twice, cut parameters off, fold compatible and
    look-alike characters, take overlong UTF-8, and drop blanks and dots at the end of a name: ``..%3B``, ``..%20``,
    ``%C0%AE``, ``%EF%BC%8E`` (a full-width dot) and ``%E2%88%95`` (a division slash) lead out of a folder on some.
    """
    try:
        segments = unquote(path, errors="strict").split("/")[1:]
    except UnicodeDecodeError:
        return False
    # Nothing follows a last slash.
    named = segments if segments[-1] else segments[:-1]
    return all(_NAME.fullmatch(name) and all(map(_stands_for_itself, name)) for name in named)


def _stands_for_itself(character: str) -> bool:
    """Return whether it is ASCII, or a letter, mark or digit without a compatible form of another character."""
    if character.isascii():
        return True
    return unicodedata.category(character)[0] in "LMN" and unicodedata.normalize("NFKC", character) == character


def _bad_path(path: str, what: str) -> RefusedError:
    return RefusedError(
        "egress.path", f"The path {quoted(path)} has {what}.", "Write the plain path that the server will see."
    )
