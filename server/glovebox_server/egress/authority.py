"""The certificate authority of one sandbox: certifies the names for which the guest terminates TLS.

Only its sandbox trusts it, and it lives as long as the call. Its key stays in the broker. The keys it certifies go to
the guest, where they can only decrypt what the sandbox's own programs send.
"""

from collections.abc import Sequence
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING

from glovebox_profiles.egress.rules import EgressRule
from glovebox_profiles.egress.targets import parse_address

if TYPE_CHECKING:
    from glovebox_server.egress.issuer import Issuer

MAX_LEAVES = 128
"""Hosts of one call: as many as a profile has rules. Only wildcard rules such as ``*.example.org`` could need more."""


class Authority:
    """A certificate authority, made on first use in a worker thread: until then it costs nothing."""

    def __init__(self, rules: Sequence[EgressRule]) -> None:
        """Certify hosts of these rules only, as the certificate's name constraints say (RFC 5280 section 4.2.1.10)."""
        self._hosts = sorted({rule.host.removeprefix("*.") for rule in rules if parse_address(rule.host) is None})
        self._leaves: dict[str, str] = {}
        self._making = Lock()

    def certificate(self) -> bytes:
        """Return the authority's own certificate, as PEM."""
        with self._making:
            return self._issuer.pem

    def has_room(self, host: str) -> bool:
        """Return whether a host has a certificate or can still get one."""
        return host in self._leaves or len(self._leaves) < MAX_LEAVES

    def leaf(self, host: str) -> str:
        """Return a new key and its certificate for a host, as PEM; the same ones when called again."""
        with self._making:
            if host not in self._leaves:
                self._leaves[host] = self._issuer.leaf(host)
            return self._leaves[host]

    @cached_property
    def _issuer(self) -> "Issuer":
        from glovebox_server.egress.issuer import Issuer  # noqa: PLC0415 - most servers never need it

        return Issuer(self._hosts)
