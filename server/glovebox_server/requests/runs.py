"""Runs: one piece of work of one principal. Ids, and the handles by which a client without a session names its run.

A run is a connection over stdio, a session over HTTP, else what a handle of ours names, else the principal's client. It
is stateless: ids of sessions and clients are derived, and a handle carries its own proof. Pure except for randomness.
"""

import base64
import hashlib
import hmac
import secrets

from glovebox_audit.chain import ID_DIGITS
from glovebox_sandboxes.contract.errors import RefusedError

_ID_DIGITS = 26
_MAC_BYTES = 16
#: ``r_``, 26 characters, a full stop and 16 bytes in base64 without padding.
_HANDLE_CHARACTERS = 2 + _ID_DIGITS + 1 + 22


class Runs:
    """Names runs, and makes and checks the handles of one state directory."""

    def __init__(self, key: bytes) -> None:
        """Take the key that its servers share for this use."""
        self._key = key

    def new(self) -> str:
        """Return a new id of a run: ``r_`` and 26 characters (130 bits)."""
        return _id(secrets.token_bytes(_ID_DIGITS))

    def of_session(self, principal: str, session: str) -> str:
        """Return the id of the run of one session of a principal."""
        return _id(self._mac("session", principal, session))

    def of_client(self, principal: str, client: str | None) -> str:
        """Return the id of the default run of a principal's client."""
        return _id(self._mac("client", principal, client or ""))

    def handle(self, principal: str, run: str) -> str:
        """Return what a client of this principal sends to continue a run; invalid for any other principal."""
        proof = base64.urlsafe_b64encode(self._mac("handle", principal, run)[:_MAC_BYTES]).decode().rstrip("=")
        return f"{run}.{proof}"

    def named(self, principal: str, handle: object) -> str:
        """Return the run of a handle. Raises RefusedError if it was not made here for this principal."""
        if isinstance(handle, str) and len(handle) == _HANDLE_CHARACTERS:
            run = handle.partition(".")[0]
            if hmac.compare_digest(_bytes(self.handle(principal, run)), _bytes(handle)):
                return run
        raise RefusedError(
            "run.handle",
            "The run named in _meta is none that this server gave to this caller.",
            "Send the handle as it came with a result, or leave it out.",
        )

    def _mac(self, use: str, *parts: str) -> bytes:
        # Lengths first: no two lists of parts are the same bytes.
        encoded = [_bytes(part) for part in (use, *parts)]
        message = b"".join(len(part).to_bytes(4, "big") + part for part in encoded)
        return hmac.digest(self._key, message, hashlib.sha256)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # JSON can hold unpaired surrogates


def _id(entropy: bytes) -> str:
    return "r_" + "".join(ID_DIGITS[byte & 31] for byte in entropy[:_ID_DIGITS])
