"""The grammar of host names, applied before anything is compared. Pure; never resolves.

Rule 1  A host is letters, digits and hyphens in labels of 1 to 63, joined by dots, 253 at most (RFC 1123 section 2.1).
Rule 2  Comparison happens on lower case, whole labels at a time; nothing is stripped, decoded or repaired first.
Rule 3  A text whose last label is a number is an IPv4 address to some parser, so it is one here, and only the spelling
        ``a.b.c.d`` of a public address is accepted (https://url.spec.whatwg.org/#ends-in-a-number-checker).
Rule 4  Unicode is refused, not mapped: two libraries map it to two hosts. ``xn--`` labels are taken as written.
"""

import re
from ipaddress import IPv4Address, IPv6Address

from glovebox_profiles.egress.addresses import Address, refusal
from glovebox_profiles.egress.errors import InvalidTarget, quoted

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


def parse_host(text: str) -> str:
    """Return the canonical form of a host: a lower-case name, or an address without brackets.

    Args:
        text: The host as somebody wrote it, without port; IPv6 without brackets.

    Raises:
        InvalidTarget: It is not a host by the rules above, is an address that is not public, or is a local name.
    """
    address = parse_address(text)
    if address is not None:
        name = refusal(address)
        if name is not None:
            raise InvalidTarget("egress.address", f"{address} is {name}.", "Only public addresses can be reached.")
        return str(address)
    labels = _labels(text)
    if len(labels) == 1 or labels[-1] in _LOCAL_SUFFIXES or ".".join(labels) in _METADATA_NAMES:
        raise InvalidTarget(
            "egress.address",
            f"{quoted(text)} is the name of something local.",
            "Only public hosts can be reached; write the full name, such as docs.python.org.",
        )
    return ".".join(labels)


def parse_address(text: str) -> Address | None:
    """Return the address if ``text`` is its canonical spelling, None if it is a name.

    Raises:
        InvalidTarget: It is another spelling of an address (decimal, octal, hexadecimal, short, zone id, …).
    """
    last = text.rstrip(".").rpartition(".")[2]
    if not _COLONS.fullmatch(text) and not _NUMBER.fullmatch(last.lower()):
        return None
    try:
        address: Address = IPv6Address(text) if ":" in text else IPv4Address(text)
    except ValueError:
        address = IPv4Address(0)
    if str(address) != text or (isinstance(address, IPv6Address) and address.scope_id is not None):
        raise InvalidTarget(
            "egress.spelling",
            f"{quoted(text)} is an unusual spelling of an address.",
            "Write it as 1.2.3.4, or lower case and compressed for IPv6.",
        )
    return address


def parse_pattern(text: str) -> str:
    """Return the canonical form of a rule's host: an exact host, or ``*.`` and a name of at least two labels.

    Raises:
        InvalidTarget: It is neither.
    """
    if not text.startswith("*."):
        if "*" in text:
            raise InvalidTarget(
                "egress.host",
                f"{quoted(text)} would match too much.",
                "A rule names one host, or all subdomains of one as *.example.org; there is no rule for every host.",
            )
        return parse_host(text)
    base = text[2:]
    if parse_address(base) is not None or len(_labels(base)) < MIN_WILDCARD_LABELS:
        raise InvalidTarget(
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
        raise InvalidTarget(
            "egress.spelling",
            f"{quoted(text)} is not ASCII.",
            "Write an international name in its xn-- form, as the browser's address bar copies it.",
        )
    if len(text) > MAX_HOST:
        raise InvalidTarget(
            "egress.spelling", f"{quoted(text)} is too long for a host.", f"{MAX_HOST} characters are the limit."
        )
    labels = text.lower().split(".")
    if labels[-1] == "" and len(labels) > 1:
        raise InvalidTarget("egress.spelling", f"{quoted(text)} ends in a dot.", "Leave the last dot out.")
    if any(len(label) > MAX_LABEL or not _LABEL.fullmatch(label) for label in labels):
        raise InvalidTarget(
            "egress.spelling",
            f"{quoted(text)} is not a host name.",
            f"Letters, digits and hyphens in labels of 1 to {MAX_LABEL} characters, joined by dots.",
        )
    return labels
