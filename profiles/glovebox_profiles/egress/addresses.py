"""Which addresses are the public internet. Pure data and look-ups; never resolves or connects.

The ranges are those of the IANA special-purpose registries
(https://www.iana.org/assignments/iana-ipv4-special-registry and .../iana-ipv6-special-registry), the multicast ranges,
and the addresses at which clouds hand out credentials. ``ipaddress.is_global`` is not used: what it answers changed
between Python releases, and it says yes to multicast and to cloud hosts' own service addresses.
"""

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network

Address = IPv4Address | IPv6Address

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
