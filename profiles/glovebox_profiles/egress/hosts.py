"""The grammar of host names, and which addresses are the public internet. Pure; never resolves or connects.

Rule 1  A host is letters, digits and hyphens in labels of 1 to 63, joined by dots, 253 at most (RFC 1123 section 2.1).
Rule 2  Comparison happens on lower case, whole labels at a time; nothing is stripped, decoded or repaired first.
Rule 3  A text whose last label is a number is an IPv4 address to some parser, so it is one here, and only the spelling
        ``a.b.c.d`` of a public address is accepted (https://url.spec.whatwg.org/#ends-in-a-number-checker).
Rule 4  Unicode is refused, not mapped: two libraries map it to two hosts. ``xn--`` labels are taken as written.

The refused ranges are those of the IANA special-purpose registries
(https://www.iana.org/assignments/iana-ipv4-special-registry and .../iana-ipv6-special-registry), the multicast ranges,
and the addresses at which clouds hand out credentials. ``ipaddress.is_global`` is not used: its answer changed between
Python releases, and it says yes to multicast and to cloud hosts' own service addresses.
"""

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network

from glovebox_sandboxes.contract.errors import RefusedError

Address = IPv4Address | IPv6Address

#: How much of a hostile text is repeated in a message: enough to recognise it, too little to carry instructions.
QUOTED_CHARACTERS = 60
#: RFC 1035 section 2.3.4: 255 octets on the wire leave 253 characters of text.
MAX_HOST = 253
MAX_LABEL = 63
#: A wildcard below fewer labels would span a whole top-level domain.
MIN_WILDCARD_LABELS = 2

_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?")
_COLONS = re.compile(r"[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*(?:%.*)?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
#: Names that mean something else on every network (RFC 6761, 6762, 7686, 8375, and ICANN's ``internal``).
_LOCAL_SUFFIXES = frozenset({"arpa", "internal", "local", "localhost", "onion"})
#: Clouds' credential services that have a name in the public tree (those below ``internal`` are refused with it).
_METADATA_NAMES = frozenset(
    {"metadata.goog", "metadata.packet.net", "metadata.platformequinix.com", "metadata.tencentyun.com"}
)

#: First match names the refusal, so single addresses come before the ranges that hold them.
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
    (
        "documentation",
        ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32", "3fff::/20"),
    ),
    ("broadcast", ("255.255.255.255/32",)),
    ("multicast", ("224.0.0.0/4", "ff00::/8")),
    ("an IPv4 address mapped into IPv6", ("::ffff:0:0/96", "::ffff:0:0:0/96", "::/96")),
    ("NAT64", ("64:ff9b::/96", "64:ff9b:1::/48")),
    ("6to4", ("2002::/16", "192.88.99.0/24")),
    ("Teredo", ("2001::/32",)),
    ("discard-only", ("100::/64", "100:0:0:1::/64")),
    (
        "reserved",
        (
            "192.0.0.0/24",
            "192.31.196.0/24",
            "192.52.193.0/24",
            "192.175.48.0/24",
            "240.0.0.0/4",
            "2001::/23",
            "2620:4f:8000::/48",
            "5f00::/16",
        ),
    ),
)
_TABLE: tuple[tuple[IPv4Network | IPv6Network, str], ...] = tuple(
    (ip_network(range_), name) for name, ranges in _REFUSED for range_ in ranges
)
_GLOBAL_UNICAST = IPv6Network("2000::/3")
#: Interface identifiers that embed an IPv4 address behind any prefix (ISATAP, RFC 5214 section 6.1).
_ISATAP = frozenset({0x00005EFE, 0x02005EFE})


class TargetError(RefusedError, ValueError):
    """A host, port, URL or pattern that is refused before any rule is looked at; ``egress.spelling``, for instance."""


def quoted(text: str) -> str:
    """Return hostile text for a message: printable ASCII in quotes, escapes for the rest, bounded."""
    escaped = ascii(text[:QUOTED_CHARACTERS])
    return escaped if len(text) <= QUOTED_CHARACTERS else f"{escaped}…"


def parse_host(text: str) -> str:
    """Return the canonical form of a host: a lower-case name, or an address without brackets.

    Args:
        text: The host as somebody wrote it, without port; IPv6 without brackets.

    Raises:
        TargetError: It is not a host by the rules above, is an address that is not public, or is a local name.
    """
    address = parse_address(text)
    if address is not None:
        name = refusal(address)
        if name is not None:
            raise TargetError("egress.address", f"{address} is {name}.", "Only public addresses can be reached.")
        return str(address)
    labels = _labels(text)
    if len(labels) == 1 or labels[-1] in _LOCAL_SUFFIXES or ".".join(labels) in _METADATA_NAMES:
        raise TargetError(
            "egress.address",
            f"{quoted(text)} is the name of something local.",
            "Only public hosts can be reached; write the full name, such as docs.python.org.",
        )
    return ".".join(labels)


def parse_address(text: str) -> Address | None:
    """Return the address if ``text`` is its canonical spelling, None if it is a name.

    Raises:
        TargetError: It is another spelling of an address (decimal, octal, hexadecimal, short, zone id, …).
    """
    last = text.rstrip(".").rpartition(".")[2]
    if not _COLONS.fullmatch(text) and not _NUMBER.fullmatch(last.lower()):
        return None
    try:
        address: Address = IPv6Address(text) if ":" in text else IPv4Address(text)
    except ValueError:
        address = IPv4Address(0)
    if str(address) != text or (isinstance(address, IPv6Address) and address.scope_id is not None):
        raise TargetError(
            "egress.spelling",
            f"{quoted(text)} is an unusual spelling of an address.",
            "Write it as 1.2.3.4, or lower case and compressed for IPv6.",
        )
    return address


def parse_pattern(text: str) -> str:
    """Return the canonical form of a rule's host: an exact host, or ``*.`` and a name of at least two labels.

    Raises:
        TargetError: It is neither.
    """
    if not text.startswith("*."):
        if "*" in text:
            raise TargetError(
                "egress.host",
                f"{quoted(text)} would match too much.",
                "A rule names one host, or all subdomains of one as *.example.org; there is no rule for every host.",
            )
        return parse_host(text)
    base = text[2:]
    if parse_address(base) is not None or len(_labels(base)) < MIN_WILDCARD_LABELS:
        raise TargetError(
            "egress.host", f"{quoted(text)} would match too much.", "At least two labels after the star: *.example.org."
        )
    return f"*.{parse_host(base)}"


def matches(pattern: str, host: str) -> bool:
    """Whether a canonical pattern names a canonical host; ``*.example.org`` is never ``example.org`` itself."""
    return host.endswith(pattern[1:]) if pattern.startswith("*") else host == pattern


def pattern_covers(wide: str, narrow: str) -> bool:
    """Whether every host that ``narrow`` names is named by ``wide`` too."""
    return wide == narrow or (wide.startswith("*") and narrow.removeprefix("*").endswith(wide[1:]))


def _labels(text: str) -> list[str]:
    """Split a name into lower-case labels, or raise with what is wrong and what to write instead."""
    if not text.isascii():
        raise TargetError(
            "egress.spelling",
            f"{quoted(text)} is not ASCII.",
            "Write an international name in its xn-- form, as the browser's address bar copies it.",
        )
    if len(text) > MAX_HOST:
        raise TargetError(
            "egress.spelling", f"{quoted(text)} is too long for a host.", f"{MAX_HOST} characters are the limit."
        )
    labels = text.lower().split(".")
    if labels[-1] == "" and len(labels) > 1:
        raise TargetError("egress.spelling", f"{quoted(text)} ends in a dot.", "Leave the last dot out.")
    if any(len(label) > MAX_LABEL or not _LABEL.fullmatch(label) for label in labels):
        raise TargetError(
            "egress.spelling",
            f"{quoted(text)} is not a host name.",
            f"Letters, digits and hyphens in labels of 1 to {MAX_LABEL} characters, joined by dots.",
        )
    return labels


def refusal(address: Address) -> str | None:
    """Return what ``address`` is if it must never be dialled, or None for an ordinary public address.

    Anything that carries another address inside (mapped, NAT64, 6to4, Teredo, ISATAP) is refused whatever it carries:
    nobody needs that spelling of a public address, and a translator on the way would decide where it ends.
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


def first_refused(addresses: Iterable[Address]) -> tuple[Address, str] | None:
    """Return the first address of a DNS answer that must not be dialled, with its name.

    One bad answer condemns the whole set: an honest zone has no reason to mix, and a rebinding one does.
    """
    for address in addresses:
        name = refusal(address)
        if name is not None:
            return address, name
    return None
