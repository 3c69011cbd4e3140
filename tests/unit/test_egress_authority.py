"""The authority of one sandbox: what it certifies, and that nobody believes it anything else."""

import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from glovebox_profiles.egress.rules import EgressRule
from glovebox_server.egress.authority import Authority

RULES = [EgressRule(host="docs.example.org"), EgressRule(host="*.files.example.net"), EgressRule(host="93.184.216.34")]


def handshake(authority: Authority, leaf: str, name: str, directory: Path) -> str:
    """Have a strict client of Python's believe a leaf for a name: what went wrong, nothing if it does."""
    path = directory / "leaf.pem"
    path.write_text(leaf)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(path)
    client = ssl.create_default_context(cadata=authority.pem.decode())
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, server_hostname=name)
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(3):
        for side in (ours, theirs):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as problem:
                return problem.verify_message
    return ""


def test_a_leaf_is_believed_for_its_host_alone(tmp_path: Path) -> None:
    authority = Authority(RULES)
    leaf = authority.leaf("docs.example.org")
    assert handshake(authority, leaf, "docs.example.org", tmp_path) == ""
    assert "Hostname mismatch" in handshake(authority, leaf, "other.example.org", tmp_path)
    assert handshake(Authority(RULES), leaf, "docs.example.org", tmp_path) != ""
    below = authority.leaf("a.files.example.net")
    assert handshake(authority, below, "a.files.example.net", tmp_path) == ""


@pytest.mark.parametrize("name", ["docs.example.com", "example.org", "bank.example"])
def test_its_own_certificate_forbids_hosts_of_no_rule(name: str, tmp_path: Path) -> None:
    """Even with its key, nobody could be another host to this sandbox's programs."""
    authority = Authority(RULES)
    assert handshake(authority, authority.leaf(name), name, tmp_path) == "permitted subtree violation"


def test_without_hosts_it_certifies_nothing(tmp_path: Path) -> None:
    """No rule names a host: an empty list of constraints would have meant all of them."""
    authority = Authority([EgressRule(host="93.184.216.34")])
    assert handshake(authority, authority.leaf("docs.example.org"), "docs.example.org", tmp_path) != ""


def test_its_key_is_in_nothing_that_it_gives_away() -> None:
    """One private key is in a leaf, and it is the leaf's."""
    authority = Authority(RULES)
    leaf = authority.leaf("docs.example.org")
    assert leaf == authority.leaf("docs.example.org")
    assert leaf.count("PRIVATE KEY") == 2
    assert b"PRIVATE" not in authority.pem
    key = serialization.load_pem_private_key(leaf.encode(), None).public_key()
    certified = x509.load_pem_x509_certificates(leaf[leaf.index("-----BEGIN CERT") :].encode())
    assert [each.public_key() for each in certified] == [key]
    assert x509.load_pem_x509_certificate(authority.pem).public_key() != key
