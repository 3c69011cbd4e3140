"""Holds the values of credentials for a server, each only as long as it may be used; one is read once at a time."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import anyio
import anyio.to_thread

from glovebox_profiles.model import Credential
from glovebox_server.egress.credentials.redact import Form, Forms, forms
from glovebox_server.egress.credentials.sources import CredentialUnavailable, Value, read

EARLY: Final = timedelta(seconds=30)
"""A value is read again so long before it expires: a request with it may take that long to arrive."""
UNSAID: Final = timedelta(seconds=60)
"""How long one is held whose source says no expiry: a helper is not started for every request."""
AGAIN: Final = timedelta(seconds=5)
"""After a failure, how long nobody tries again: a call that asks in a loop starts no storm of helpers."""
KEPT: Final = 3
"""Values of one source that go on to be looked for: one that was replaced by another may still be valid."""


class Held:
    """The values that one server holds, by their source; kept in memory alone."""

    def __init__(self, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._clock = clock
        self._values: dict[str, tuple[Value, datetime]] = {}
        self._failures: dict[str, tuple[CredentialUnavailable, datetime]] = {}
        self._locks: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)
        self._seen: defaultdict[str, dict[str, Forms]] = defaultdict(dict)  # by source and value, the newest last
        self.forms: Forms = {}
        """The ways of writing the values that were handed out: what no result may hold."""

    async def value(self, source: str) -> Value:
        """Return the value that a source names, read anew where the one that is held is too old.

        Raises:
            CredentialUnavailable: it cannot be had.
        """
        if source.startswith(("env:", "file:")):
            return await self._known(source, await read(source))  # as cheap as looking whether it has changed
        async with self._locks[source]:
            now = self._clock()
            held = self._values.get(source)
            if held is not None and now < held[1]:
                return held[0]
            failed = self._failures.get(source)
            if failed is not None and now < failed[1]:
                raise failed[0]
            try:
                value = await read(source)
            except CredentialUnavailable as failure:
                self._failures[source] = failure, self._clock() + AGAIN
                raise
            until = self._clock() + UNSAID if value.expires is None else value.expires - EARLY
            await self._known(source, value)  # before anybody can be given it
            self._values[source] = value, until
            self._failures.pop(source, None)
            return value

    def used(self, credentials: Sequence[Credential]) -> dict[bytes, Form]:
        """Return the ways of writing what the sources of these have given, with their names."""
        return {
            form: Form(name=each.name, least=its.least)
            for each in credentials
            for its_forms in self._seen.get(each.source, {}).values()
            for form, its in its_forms.items()
        }

    async def _known(self, source: str, value: Value) -> Value:
        """See to it that no result will hold a value."""
        seen = self._seen[source]
        if value.text in seen:
            seen[value.text] = seen.pop(value.text)
            return value
        seen[value.text] = await anyio.to_thread.run_sync(forms, "of the server", value.text)
        if len(seen) > KEPT:
            del seen[next(iter(seen))]
        self.forms = {form: its for each in self._seen.values() for one in each.values() for form, its in one.items()}
        return value
