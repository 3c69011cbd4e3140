"""Makes keys and certificates for ``authority``, which imports this late."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_network

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

_LIVES = timedelta(hours=1)
"""Longer than any call, even if the clock is set back as much meanwhile."""


class Issuer:
    """The key and certificate of an authority."""

    def __init__(self, hosts: Sequence[str]) -> None:
        """Make a key that certifies only these hosts and their subdomains."""
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._public = self._key.public_key()
        self._name = _name("Glovebox: this sandbox alone")
        # A name type without a constraint is unrestricted: addresses are excluded, and no list of hosts is empty.
        permitted = [x509.DNSName(host) for host in hosts or ["invalid"]]
        excluded = [x509.IPAddress(ip_network(every)) for every in ("0.0.0.0/0", "::/0")]
        self._certificate = (
            _blank(self._name, self._public, self._name, self._public)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.KeyUsage(**_NO_USES | {"key_cert_sign": True}), critical=True)
            .add_extension(x509.NameConstraints(permitted, excluded), critical=True)
            .sign(self._key, SHA256())
        )
        self.pem = _pem(self._certificate)

    def leaf(self, host: str) -> str:
        """Certify a new key for one host."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _blank(_name("Glovebox: inside this sandbox"), key.public_key(), self._name, self._public)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.KeyUsage(**_NO_USES | {"digital_signature": True}), critical=True)
            .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
            .sign(self._key, SHA256())
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return (private + _pem(certificate)).decode("ascii")


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _blank(
    subject: x509.Name, key: ec.EllipticCurvePublicKey, issuer: x509.Name, signer: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    """Begin a certificate; strict clients require the identifiers of both keys (RFC 5280 section 4.2.1.1)."""
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _LIVES)
        .not_valid_after(now + _LIVES)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
    )


_NO_USES = dict.fromkeys(
    ("digital_signature", "key_cert_sign", "content_commitment", "key_encipherment", "data_encipherment",
     "key_agreement", "crl_sign", "encipher_only", "decipher_only"), False
)  # fmt: skip


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
