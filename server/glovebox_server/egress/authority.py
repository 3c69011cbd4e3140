"""The certificate authority of one sandbox: certifies the names for which the guest terminates TLS.

Only its sandbox trusts it, and it lives as long as the call. Its key stays in the broker. The keys it certifies go to
the guest, where they can only decrypt what the sandbox's own programs send.
"""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from ipaddress import ip_network
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from glovebox_profiles.egress.rules import EgressRule
from glovebox_profiles.egress.targets import parse_address
from glovebox_sandboxes.contract.errors import RefusedError

MAX_LEAVES: Final = 128
"""Hosts of one call: as many as a profile has rules. Only wildcard rules such as ``*.example.org`` could need more."""
_LIVES: Final = timedelta(hours=1)
"""Longer than any call, even if the clock is set back as much meanwhile."""
_NAME: Final = "Glovebox: this sandbox alone"
_NO_USES: Final = dict.fromkeys(
    ("digital_signature", "key_cert_sign", "content_commitment", "key_encipherment", "data_encipherment",
     "key_agreement", "crl_sign", "encipher_only", "decipher_only"), False
)  # fmt: skip


class Authority:
    """A certificate authority. Each of its certificates takes half a millisecond to make."""

    def __init__(self, rules: Iterable[EgressRule]) -> None:
        """Certify hosts of these rules only, as the certificate's name constraints say (RFC 5280 section 4.2.1.10)."""
        hosts = sorted({rule.host.removeprefix("*.") for rule in rules if parse_address(rule.host) is None})
        # A name type without a constraint is unrestricted: addresses are excluded, and no list of hosts is empty.
        permitted = [x509.DNSName(host) for host in hosts or ["invalid"]]
        excluded = [x509.IPAddress(ip_network(every)) for every in ("0.0.0.0/0", "::/0")]
        self._leaves: dict[str, str] = {}
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.pem = self._certify(
            _NAME, self._key.public_key(), "key_cert_sign",
            (x509.BasicConstraints(ca=True, path_length=0), True),
            (x509.NameConstraints(permitted, excluded), True),
        )  # fmt: skip
        """Its own certificate."""

    def leaf(self, host: str) -> str:
        """Return a new key and its certificate for a host, as PEM; the same ones when called again.

        Raises RefusedError: there are certificates for as many hosts as there may be.
        """
        if host in self._leaves:
            return self._leaves[host]
        if len(self._leaves) >= MAX_LEAVES:
            why = "This call has certificates for as many hosts as it can have."
            raise RefusedError("egress.attempts", why, "Ask fewer hosts, or make another call.")
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._certify(
            "Glovebox: inside this sandbox", key.public_key(), "digital_signature",
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), False),
            (x509.SubjectAlternativeName([x509.DNSName(host)]), False),
        )  # fmt: skip
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        self._leaves[host] = (private + certificate).decode("ascii")
        return self._leaves[host]

    def _certify(
        self, name: str, key: ec.EllipticCurvePublicKey, use: str, *further: tuple[x509.ExtensionType, bool]
    ) -> bytes:
        """Return a certificate as PEM; ``further``: its other extensions, and whether each is critical.

        Strict clients require the identifiers of both keys (RFC 5280 section 4.2.1.1).
        """
        subject, issuer = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, each)]) for each in (name, _NAME))
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _LIVES)
            .not_valid_after(now + _LIVES)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .add_extension(x509.KeyUsage(**_NO_USES | {use: True}), critical=True)
        )
        for extension, critical in further:
            certificate = certificate.add_extension(extension, critical)
        return certificate.sign(self._key, SHA256()).public_bytes(serialization.Encoding.PEM)
