"""Holds the values of credentials for a server, each only as long as it may be used; one is read once at a time."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from glovebox_profiles.model import Credential
from glovebox_server.guards.credentials.sources import CredentialError, Value, read
from glovebox_server.guards.redaction.detector import Forms, forms

EARLY: Final = timedelta(seconds=30)
"""A value is read again so long before it expires: a request with it may take that long to arrive."""
AHEAD: Final = timedelta(seconds=60)
"""And so long before that, whoever asks has the one that is held, while the next is read."""
UNSAID: Final = timedelta(seconds=60)
"""How long one is held whose source says no expiry: a helper is not started for every request."""
AGAIN: Final = timedelta(seconds=5)
"""After a failure, how long nobody tries again: a call that asks in a loop starts no storm of helpers."""
KEPT: Final = 3
"""Values of one source that go on to be looked for: one that was replaced by another may still be valid."""


@dataclass(slots=True, repr=False)
class _Reading:
    """One reading of a source, for all who wait for it."""

    over: anyio.Event = field(default_factory=anyio.Event)
    value: Value | None = None
    failure: Exception | None = None

    async def result(self) -> Value:
        await self.over.wait()
        if self.value is None:
            raise self.failure or CredentialError("the server was ending", "Start it again.")
        return self.value


class CredentialCache:
    """The values that one server holds, by their source; kept in memory alone."""

    def __init__(
        self, tasks: TaskGroup | None = None, clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        """Hold none yet.

        Args:
            tasks: where values are read, also ahead: a call that ends while it waits ends no reading, so none can
                have one begun over and over. With None they are read when they are needed, by who needs them.
            clock: the time.
        """
        self._tasks = tasks
        self._clock = clock
        self._readings: dict[str, _Reading] = {}
        self._soon: dict[str, datetime] = {}
        self._values: dict[str, tuple[Value, datetime]] = {}
        self._failures: dict[str, tuple[CredentialError, datetime]] = {}
        self._locks: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)
        self._seen: defaultdict[str, dict[str, Forms]] = defaultdict(dict)  # by source and value, the newest last
        self._forms: dict[frozenset[str], Forms] = {}  # of several sources together; few, as profiles have few keys

    async def value(self, source: str) -> Value:
        """Return the value that a source names, read anew where the one that is held is too old.

        Raises:
            CredentialError: it cannot be had.
        """
        if source.startswith(("env:", "file:")):
            return await self._known(source, await read(source))  # as cheap as looking whether it has changed
        value = self._good(source)
        if self._tasks is None:
            async with self._locks[source]:
                return self._good(source) or await self._read(source)
        if value is not None and self._clock() < self._soon[source]:
            return value
        reading = self._readings.get(source)
        if reading is None:
            reading = self._readings[source] = _Reading()
            self._tasks.start_soon(self._read_apart, source, reading)
        return value or await reading.result()

    def _good(self, source: str) -> Value | None:
        held = self._values.get(source)
        return held[0] if held is not None and self._clock() < held[1] else None

    async def _read_apart(self, source: str, reading: _Reading) -> None:
        try:
            reading.value = await self._read(source)
        except Exception as failure:  # noqa: BLE001 - whoever needs it is told
            reading.failure = failure
        finally:
            del self._readings[source]
            reading.over.set()

    async def _read(self, source: str) -> Value:
        """Read a value, unless that failed just now; of one source there is one reading at a time."""
        failed = self._failures.get(source)
        if failed is not None and self._clock() < failed[1]:
            raise failed[0]
        try:
            value = await read(source)
        except CredentialError as failure:
            self._failures[source] = failure, self._clock() + AGAIN
            raise
        now = self._clock()
        until = now + UNSAID if value.expires is None else value.expires - EARLY
        # One that lives for a minute is not read without a pause.
        self._soon[source] = until if value.expires is None else max(until - AHEAD, now + (until - now) / 2)
        await self._known(source, value)  # before anybody can be given it
        self._values[source] = value, until
        self._failures.pop(source, None)
        return value

    def used(self, credentials: Iterable[Credential]) -> dict[bytes, str]:
        """Return the ways of writing what the sources of these have given, with their names."""
        return {
            form: credential.name
            for credential in credentials
            for forms_of_value in self._seen.get(credential.source, {}).values()
            for form in forms_of_value
        }

    def forms(self, credentials: Iterable[Credential]) -> Forms:
        """Return the same without names, for results: the same object until a source gives another value."""
        sources = frozenset(credential.source for credential in credentials)
        if (known := self._forms.get(sources)) is None:
            values = [value for source in sources for value in self._seen.get(source, {}).values()]
            known = self._forms[sources] = {form: name for value in values for form, name in value.items()}
        return known

    async def _known(self, source: str, value: Value) -> Value:
        """See to it that no result will hold a value."""
        seen = self._seen[source]
        if value.text in seen:
            seen[value.text] = seen.pop(value.text)
            return value
        seen[value.text] = await anyio.to_thread.run_sync(forms, "of the server", value.text)
        if len(seen) > KEPT:
            del seen[next(iter(seen))]
        self._forms.clear()
        return value
