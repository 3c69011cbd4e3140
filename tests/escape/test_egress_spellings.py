"""Hosts and addresses in disguise (E1, E6, E7), each beside the naive check that it was made for."""

import socket
from ipaddress import ip_address

import pytest

from glovebox_profiles.egress.rules import EgressRule, decide_url
from glovebox_profiles.egress.targets import parse_host, refusal
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server.egress.dial import require_public

ALLOWED = [EgressRule(host="*.google.com"), EgressRule(host="google.com")]


@pytest.mark.parametrize(
    "host",
    [
        "attacker.example\x00.google.com",
        "attacker.example\r\n.google.com",
        "attacker.example%00.google.com",
        "attacker.example .google.com",
        "attacker.example\t.google.com",
        "user@attacker.example#.google.com",
        "attacker.example/.google.com",
        "attacker.example\\.google.com",
        "attacker.example?.google.com",
        "attacker.example\uff0ex.google.com",
        "attacker.example\u3002x.google.com",
        "b\u00fccher.google.com",
        "\u212aelvin.google.com",
        "-.google.com",
        "..google.com",
        ".google.com",
        "_x.google.com",
        "x" * 64 + ".google.com",
        "x." * 130 + "google.com",
        "a*.google.com",
    ],
)
def test_a_disguised_host_is_not_a_subdomain(host: str) -> None:
    """E1: each of these ends in the allowed domain, so comparing the end of the text lets it through."""
    assert host.endswith(".google.com")
    decision = decide_url("GET", f"https://{host}/", ALLOWED)
    assert decision.effect == "deny"
    assert decision.rule in {"egress.spelling", "egress.host"}
    with pytest.raises(RefusedError) as refused:
        parse_host(host)
    assert refused.value.rule == "egress.spelling"


@pytest.mark.parametrize("host", ["google.com.", "GOOGLE.com.", "google.com..", "google.com.attacker.example"])
def test_a_name_beyond_the_allowed_one_is_refused(host: str) -> None:
    """E1: these begin with the allowed name, so comparing the start of the text lets them through."""
    assert host.lower().startswith("google.com")
    assert decide_url("GET", f"https://{host}/", ALLOWED).effect == "deny"
    assert decide_url("GET", "https://GOOGLE.com/", ALLOWED).effect == "allow"


@pytest.mark.parametrize(
    "spelling",
    [
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "0177.0.0.1",
        "017700000001",
        "127.1",
        "127.0.1",
        "127.0.0.1.",
        "0X7F.0.0.1",
    ],
)
def test_another_spelling_of_loopback_is_refused(spelling: str) -> None:
    """E7: the C library takes each of these for 127.0.0.1, a check of the text does not."""
    assert not spelling.startswith("127.0.0.1") or spelling.endswith(".")
    assert socket.inet_aton(spelling.rstrip(".")) == b"\x7f\0\0\1"
    with pytest.raises(RefusedError) as refused:
        parse_host(spelling)
    assert refused.value.rule == "egress.spelling"


@pytest.mark.parametrize(
    "spelling",
    [
        "1.2.3.256",
        "1.2.3.4.5",
        "1.2.3",
        "999",
        "0x",
        "example.0x1",
        "a.b.1",
        "08.8.8.8",
        "1.2.3.04",
        "1.1.1.1%eth0",
        "\u0661.1.1.1",
    ],
)
def test_what_ends_in_a_number_is_no_name(spelling: str) -> None:
    """E7: no public name ends in a number, and parsers disagree about each of these."""
    with pytest.raises(RefusedError) as refused:
        parse_host(spelling)
    assert refused.value.rule == "egress.spelling"


@pytest.mark.parametrize(
    "spelling",
    ["0:0:0:0:0:0:0:1", "::0001", "[::1]", "::1%lo", "2A00:1450:4001::1", "::ffff:127.0.0.1", "fe80::1%25eth0"],
)
def test_another_spelling_of_ipv6_is_refused(spelling: str) -> None:
    """E7: one address, one spelling."""
    with pytest.raises(RefusedError):
        parse_host(spelling)


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("0.0.0.0", "the unspecified address"),  # noqa: S104 - data
        ("0.1.2.3", "this network"),
        ("127.0.0.1", "loopback"),
        ("127.255.255.254", "loopback"),
        ("10.1.2.3", "a private network"),
        ("172.16.0.1", "a private network"),
        ("172.31.255.255", "a private network"),
        ("192.168.0.1", "a private network"),
        ("169.254.1.1", "link-local"),
        ("169.254.169.254", "a cloud metadata service"),
        ("169.254.170.2", "a cloud metadata service"),
        ("100.100.100.200", "a cloud metadata service"),
        ("168.63.129.16", "a cloud metadata service"),
        ("fd00:ec2::254", "a cloud metadata service"),
        ("100.64.0.1", "carrier-grade NAT"),
        ("100.127.255.255", "carrier-grade NAT"),
        ("198.18.0.1", "benchmarking"),
        ("198.19.255.255", "benchmarking"),
        ("192.0.2.1", "documentation"),
        ("203.0.113.9", "documentation"),
        ("2001:db8::1", "documentation"),
        ("3fff::1", "documentation"),
        ("224.0.0.1", "multicast"),
        ("239.255.255.250", "multicast"),
        ("ff02::1", "multicast"),
        ("240.0.0.1", "reserved"),
        ("255.255.255.255", "broadcast"),
        ("192.0.0.1", "reserved"),
        ("192.88.99.1", "6to4"),
        ("::", "the unspecified address"),
        ("::1", "loopback"),
        ("::ffff:8.8.8.8", "an IPv4 address mapped into IPv6"),
        ("::8.8.8.8", "an IPv4 address mapped into IPv6"),
        ("64:ff9b::a00:1", "NAT64"),
        ("64:ff9b:1::1", "NAT64"),
        ("2002:a00:1::1", "6to4"),
        ("2001:0:a00:1::", "Teredo"),
        ("2001:10::1", "reserved"),
        ("fe80::1", "link-local"),
        ("fe80::1%eth0", "an address with a zone id"),
        ("2a00:1450:4001::1%eth0", "an address with a zone id"),
        ("fc00::1", "a private network"),
        ("fec0::1", "a private network"),
        ("4000::1", "reserved"),
        ("2a00:1450::5efe:a00:1", "ISATAP"),
    ],
)
def test_an_address_that_is_not_public_is_named(address: str, name: str) -> None:
    """E7: every special range has a name in the refusal, whatever is embedded in it."""
    assert refusal(ip_address(address)) == name


@pytest.mark.parametrize(
    "address",
    [
        "1.1.1.1",
        "8.8.8.8",
        "93.184.216.34",
        "100.63.255.255",
        "100.128.0.0",
        "172.15.255.255",
        "172.32.0.0",
        "198.20.0.0",
        "2a00:1450:4001::1",
        "2606:4700::1111",
    ],
)
def test_the_nearest_public_addresses_pass(address: str) -> None:
    """The control: the neighbours of the ranges are ordinary addresses."""
    assert refusal(ip_address(address)) is None


@pytest.mark.parametrize("place", range(4))
def test_one_bad_answer_condemns_the_set(place: int) -> None:
    """E6: a mixed answer is how a name gets a second try at a private address. Wherever it is in the answer."""
    good = [ip_address(each) for each in ("1.1.1.1", "8.8.8.8", "2606:4700::1111")]
    with pytest.raises(RefusedError, match=r"a\.example resolves to an address that is a private network"):
        require_public("a.example", (*good[:place], ip_address("10.0.0.1"), *good[place:]))
    require_public("a.example", tuple(good))


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "router",
        "x.localhost",
        "printer.local",
        "metadata.google.internal",
        "metadata.goog",
        "metadata.tencentyun.com",
        "1.0.0.127.in-addr.arpa",
        "abc.onion",
    ],
)
def test_local_and_metadata_names_are_refused_without_a_look_up(host: str) -> None:
    """E7: some names are answered by the machine or its cloud, and never by the public tree."""
    with pytest.raises(RefusedError) as refused:
        parse_host(host)
    assert refused.value.rule == "egress.address"
