"""Counts requests that never become a call, and records their number at bounded intervals.

Senders pay for none of it: a note is an addition in memory, and records are bounded by the clock and the number of
callers, not by the requests. The first after a pause is written at once, the others of the next pause together: a
killed server loses only those. No content of a request is kept: a record names rules of ours, and authenticated
callers.
"""

import hashlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Final, Protocol

import anyio

from glovebox_audit.events import Event, RequestsRefused
from glovebox_server.errors import AuditError

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
        """By rule, since the server began."""
        self._since: str | None = None
        self._new: dict[str, Counter[str]] = {}
        self._came = anyio.Event()

    def note(self, rule: str, principal: str | None = None) -> None:
        """Count one refusal by a rule of ours, never a word of the request's; ``principal`` is None for a stranger."""
        self.totals[rule] += 1
        if self._since is None:
            self._since = _now()
        _add(self._new, rule, _STRANGER if principal is None else _shown(principal), 1)
        self._came.set()

    async def record(self, log: _RefusalLog) -> int:
        """Write what was noted since the last record, if anything; keep it on failure. Returns the number of rows."""
        since, found = self._since, self._new
        if since is None:
            return 0
        self._since, self._new, self._came = None, {}, anyio.Event()
        rows = tuple(
            {**({"principal": principal} if principal else {}), "rule": rule, "count": count}
            for principal, counts in found.items()
            for rule, count in counts.items()
        )
        try:
            count = sum(counts.total() for counts in found.values())
            await log.append(RequestsRefused(since=since, count=count, refused=rows))
        except AuditError:
            self._since = since
            for principal, counts in found.items():
                for rule, count in counts.items():
                    _add(self._new, rule, principal, count)
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


def _add(counted: dict[str, Counter[str]], rule: str, principal: str, count: int) -> None:
    if principal and principal not in counted and len(counted) - (_STRANGER in counted) >= MAX_PRINCIPALS:
        principal = OTHERS
    rules = counted.setdefault(principal, Counter())
    rules[rule if rule in rules or len(rules) < MAX_RULES else OTHER] += count


def _shown(principal: str) -> str:
    """Return a caller's id; of a long one its beginning and its digest, which is unique."""
    if len(principal) <= _MAX_ID:
        return principal
    whole = hashlib.sha256(principal.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{principal[:_MAX_ID]}… sha256:{whole}"


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
