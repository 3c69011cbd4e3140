"""Requests before they become calls: their run, their trace, and counts of those that never do. Independent of MCP.

A run is one piece of work of one principal: a connection over stdio, a session over HTTP, else what a handle of ours
names, else the principal's client. It is stateless: ids are derived, and a handle carries its own proof, with a key
that all servers of a state directory share. Each use of that has a derived key, so that a value made for one is
invalid for another (HKDF, RFC 5869).

Senders of refused requests pay for no record: a note is an addition in memory, and records are bounded by the clock
and the number of callers. The first after a pause is written at once, the others of the next pause together: a killed
server loses only those. A record names rules of ours and authenticated callers, and no content of a request.
"""

import base64
import hashlib
import hmac
import os
import re
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Protocol

import anyio
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from glovebox_audit.chain import ID_DIGITS
from glovebox_audit.event import Event
from glovebox_audit.events import RequestsRefused
from glovebox_audit.place import AuditError
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server import secret_files
from glovebox_server.calls import Trace
from glovebox_server.secret_files import SecretFileError

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


#: Version, trace, parent, flags. A later version may add more behind another hyphen, which is ignored.
_PARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)
#: Characters of a state: the least that a participant must pass on, and all that is kept.
_MAX_STATE: Final = 512

_MEMBER: Final = (
    r"[ \t]*(?:[a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e][ \t]*"
)
_STATE: Final = re.compile(f"{_MEMBER}(?:,{_MEMBER})*", re.ASCII)


def trace_of(parent: object, state: object = None) -> Trace | None:
    """Return a request's trace context; None without a valid ``traceparent``, without state if that is invalid.

    It is the caller's word: it is recorded, and decides nothing. Source: https://www.w3.org/TR/trace-context-2/.
    """
    if not isinstance(parent, str) or not _PARENT.fullmatch(parent):
        return None
    sound = isinstance(state, str) and len(state) <= _MAX_STATE and _STATE.fullmatch(state)
    return Trace(parent=parent, state=str(state) if sound else None)


KEYS = "keys"
KEY_NAME, NOTIFY_KEY = "server.key", "notify.key"
_KEY_KIND = "server key"
KEY_BYTES = 32


def load_key(state_dir: Path) -> bytes:
    """Return the key of a state directory; make it (0600) if missing.

    Raises SecretFileError if it is a link, another user's, open to others, or not ``KEY_BYTES`` long.
    """
    with secret_files.opened(state_dir / KEYS, _KEY_KIND) as place:
        if KEY_NAME not in place.names():
            place.make(KEY_NAME, secrets.token_bytes(KEY_BYTES))
        key = place.read(KEY_NAME, KEY_BYTES)
    if len(key) != KEY_BYTES:
        path = state_dir / KEYS / KEY_NAME
        raise SecretFileError(
            _KEY_KIND, path, f"it does not hold {KEY_BYTES} bytes", f"Remove {path}; a new one is made."
        )
    return key


def has_key(state_dir: Path) -> bool:
    """Return whether a server, or a command that makes calls, has ever used the state directory."""
    return os.path.lexists(state_dir / KEYS / KEY_NAME)


def derive_key(key: bytes, use: str) -> bytes:
    """Return the key for one use, e.g. ``runs``: ``KEY_BYTES`` long."""
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=f"glovebox {use}".encode()).derive(key)


#: Least time between records, in seconds: what a kill may lose, against 10 MB of log in a day of them.
PAUSE_SECONDS: Final = 5.0
#: Further seconds for each row of a record: the largest possible one is followed by a minute.
ROW_SECONDS: Final = 0.2
#: Callers that one record names, beside strangers; later ones are counted as ``OTHERS``. No id is a word without a
#: colon, as this is.
MAX_PRINCIPALS: Final = 32
OTHERS: Final = "others"
#: Rules that one record names of each caller; later ones are counted as ``OTHER``.
MAX_RULES: Final = 8
OTHER: Final = "other"
#: Characters of a caller's id that are shown: an authorization server chose the subject in it.
_MAX_ID: Final = 128
_STRANGER: Final = ""


class _RefusalLog(Protocol):
    async def append(self, event: Event) -> object:
        """See ``AuditLog.append``."""


class Refusals:
    """Counts of requests that were refused before they became calls, by caller and rule."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self._since: str | None = None
        self._new: Counter[tuple[str, str]] = Counter()
        self._came = anyio.Event()

    def note(self, rule: str, principal: str | None = None) -> None:
        """Count one refusal by a rule of ours, never a word of the request's; ``principal`` is None for a stranger."""
        self.totals[rule] += 1
        if self._since is None:
            self._since = _now()
        self._add(_STRANGER if principal is None else _shown(principal), rule, 1)
        self._came.set()

    def _add(self, principal: str, rule: str, count: int) -> None:
        if (principal, rule) not in self._new:
            callers = {caller for caller, _ in self._new} | {_STRANGER}
            principal = principal if principal in callers or len(callers) <= MAX_PRINCIPALS else OTHERS
            rules = [known for caller, known in self._new if caller == principal]
            rule = rule if rule in rules or len(rules) < MAX_RULES else OTHER
        self._new[principal, rule] += count

    async def record(self, log: _RefusalLog) -> int:
        """Write what was noted since the last record, if anything; keep it on failure. Returns the number of rows."""
        since, found = self._since, self._new
        if since is None:
            return 0
        self._since, self._new, self._came = None, Counter(), anyio.Event()
        rows = tuple(
            {**({"principal": principal} if principal else {}), "rule": rule, "count": count}
            for (principal, rule), count in found.items()
        )
        try:
            await log.append(RequestsRefused(since=since, count=found.total(), refused=rows))
        except AuditError:
            self._since = since
            for (principal, rule), count in found.items():
                self._add(principal, rule, count)
            self._came.set()
        return len(rows)

    @asynccontextmanager
    async def recorded(self, log: _RefusalLog) -> AsyncIterator[None]:
        """Write what is left at the block's end, however it ends."""
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await self.record(log)

    async def follow(self, log: _RefusalLog) -> None:
        """Write records until cancelled."""
        while True:
            await self._came.wait()
            with anyio.CancelScope(shield=True):  # else it would be unknown whether it was written
                rows = await self.record(log)
            await anyio.sleep(max(PAUSE_SECONDS, rows * ROW_SECONDS))


def _shown(principal: str) -> str:
    """Return a caller's id; of a long one its beginning and its digest, which is unique."""
    if len(principal) <= _MAX_ID:
        return principal
    whole = hashlib.sha256(principal.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{principal[:_MAX_ID]}… sha256:{whole}"


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
