"""Reads credentials' values from their sources, and keeps each only while it may be used.

A source is a variable, a file or a program. No message holds a value: it says what is wrong with the source. Values
are kept only in memory.
"""

import os
import re
import shlex
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
from anyio.abc import Process, TaskGroup
from pydantic import BaseModel, ValidationError

from glovebox_audit.segments.anchors import own_session
from glovebox_profiles.model import Credential
from glovebox_sandboxes.contract.errors import DiagnosedError
from glovebox_server.errors import without_paths
from glovebox_server.guards.redaction.detector import Forms, derive_forms

MAX_BYTES: Final = 64 * 1024
"""Read of a file or a program's output: the largest kind of signed token has 8 KiB."""
SECONDS: Final = 10.0
"""Timeout of a program: a helper that asks a token service needs one or two."""
SHORTEST: Final = 16
"""Letters and digits of a value: a shorter one looks like ordinary text in an answer."""
_LONGEST: Final = 8192
_ALONE: Final = (
    f"It has to be the value alone: {SHORTEST} to {_LONGEST} printable characters without blanks, {SHORTEST} of them "
    "letters or digits."
)
_VALUE: Final = re.compile(f"[!-~]{{1,{_LONGEST}}}")
_JSON: Final = 'It prints JSON such as {"value": "...", "expires": "2026-01-01T00:00:00Z"}: run it by hand.'
_FILE: Final = "Name in source a file that the server's user can read, in folders that it can enter."
_PROGRAM: Final = "Name an executable program by its full path; a script begins with #! and its interpreter."
EARLY: Final = timedelta(seconds=30)
"""A value is refreshed this long before it expires: a request may take that long to arrive."""
AHEAD: Final = timedelta(seconds=60)
"""Before that, calls use the current value while the next is read."""
UNSAID: Final = timedelta(seconds=60)
"""Lifetime of a value without expiry: a helper is not started for every request."""
AGAIN: Final = timedelta(seconds=5)
"""Backoff after a failure: a call that asks in a loop starts no storm of helpers."""
KEPT: Final = 3
"""Values of one source that stay masked: a replaced one may still be valid."""


def unusable(reason: str, fix: str) -> DiagnosedError:
    """Return the failure of a source; neither part may hold anything of a value, and no host path is left in them."""
    return DiagnosedError("credential", without_paths(reason), without_paths(fix))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CredentialValue:
    """A credential's value. It has no ``repr``, so that no log shows it by accident."""

    text: str
    expires: datetime | None = None


async def read(source: str) -> CredentialValue:
    """Read the value that ``source`` names: ``env:``, ``file:`` or ``exec:``.

    Raises DiagnosedError: it is missing, unreadable, no credential, or expired.
    """
    kind, _, where = source.partition(":")
    match kind:
        case "env":
            # Not by name: a key may have been put there.
            fix = "Set it where the server is started, and start it again."
            value = _plain(os.environ.get(where), "its variable", "is not set or empty", fix)
        case "file":
            value = await anyio.to_thread.run_sync(_of_file, Path(where))
        case _:
            value = await _of_program(where)
    if value.expires is not None and value.expires <= datetime.now(UTC):
        fix = "Have it print one that is valid: sign in again where it has it from, and compare this host's clock."
        raise unusable("what its program printed has expired", fix)
    return value


def _plain(text: str | None, whence: str, none: str, fix: str, expires: datetime | None = None) -> CredentialValue:
    """Check that a text can be a value; ``none`` and ``fix`` describe an empty source."""
    if not text:
        raise unusable(f"{whence} {none}", fix)
    if not _VALUE.fullmatch(text) or sum(map(str.isalnum, text)) < SHORTEST:
        raise unusable(f"{whence} does not hold a credential", _ALONE)
    return CredentialValue(text=text, expires=expires)


class _Printed(BaseModel):
    """The answer of a program; without a time zone its expiry is in UTC."""

    value: str
    expires: datetime | None = None


def _of_file(path: Path) -> CredentialValue:
    try:
        # Non-blocking: a FIFO in its place must not block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise unusable("its file is no plain file", "Name the file that holds the value alone.")
            if found.st_mode & stat.S_IRWXO:
                raise unusable("others may read or change its file", "Run `chmod o= FILE`.")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                data = file.read(MAX_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise unusable(f"its file cannot be read: {error.strerror}", _FILE) from None
    if len(data) > MAX_BYTES:
        raise unusable(f"its file has more than {MAX_BYTES} bytes", _ALONE)
    text = data.decode("ascii", "replace").rstrip("\r\n")
    return _plain(text, "its file", "is empty", "Write the value into it, alone.")


async def _of_program(command: str) -> CredentialValue:
    fix = "Run it by hand, as the server's user."
    try:
        async with own_session(shlex.split(command), stdin=-3) as process:
            with anyio.move_on_after(SECONDS):
                data = await _read(process)
                if len(data) > MAX_BYTES:
                    raise unusable(f"its program printed more than {MAX_BYTES} bytes", _JSON)
                if (status := await process.wait()) < 0:
                    raise unusable(f"its program was ended by signal {-status}", fix)
                if status:
                    raise unusable(f"its program ended with status {status}", fix)
                return _of_json(data)
    except OSError as error:
        raise unusable(f"its program cannot be started: {error.strerror}", _PROGRAM) from None
    fix = "Run it by hand, as the server's user, with nothing to read from: it may be asking for something."
    raise unusable(f"its program did not end within {SECONDS:g} seconds", fix)


async def _read(process: Process) -> bytes:
    data = b""
    if process.stdout is not None:
        async for piece in process.stdout:
            data += piece
            if len(data) > MAX_BYTES:
                break
    return data


def _of_json(data: bytes) -> CredentialValue:
    try:
        printed = _Printed.model_validate_json(data, strict=True)
    except ValidationError:  # its message would quote the value
        raise unusable("its program did not print such JSON as it has to", _JSON) from None
    expires = printed.expires
    if expires is not None and expires.tzinfo is None:
        expires = expires.replace(tzinfo=UTC)
    return _plain(printed.value, "what its program printed", "is empty", _JSON, expires)


_NEVER: Final = datetime.min.replace(tzinfo=UTC)


@dataclass(slots=True, repr=False)
class _HeldSource:
    """The cached value of one source, and its read under way."""

    value: CredentialValue | None = None
    soon: datetime = _NEVER
    """From then on the next value is read, while this one is used."""
    until: datetime = _NEVER
    failure: Exception | None = None
    again: datetime = _NEVER
    """Until then it is not read again after a failure."""
    reading: anyio.Event | None = None
    """Set once the one read under way is over; None without one."""
    seen: dict[str, Forms] = field(default_factory=dict)
    """The forms of its last values, the newest last."""


class CredentialCache:
    """The values that one server holds, by their source."""

    def __init__(self, tasks: TaskGroup, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        """Start empty.

        Programs run in ``tasks``, also ahead. A cancelled call cancels no read, so none can start one over and over.
        """
        self._tasks = tasks
        self._clock = clock
        self._held: defaultdict[str, _HeldSource] = defaultdict(_HeldSource)
        self._forms: dict[frozenset[str], Forms] = {}  # of several sources together; few, as profiles have few keys

    async def value(self, source: str) -> CredentialValue:
        """Return the value of a source, read again if the cached one is too old.

        Raises DiagnosedError: it is unavailable.
        """
        held, now = self._held[source], self._clock()
        if source.startswith(("env:", "file:")):
            value = await read(source)  # as cheap as looking whether it has changed
            await self._mask(held, value)
            return value
        before, is_good = held.value, now < held.until
        if now >= held.again and not (is_good and now < held.soon) and held.reading is None:
            held.reading = anyio.Event()
            self._tasks.start_soon(self._read, source, held, held.reading)
        if not is_good and held.reading is not None:
            await held.reading.wait()
            is_good = held.value is not before  # however short it lives: else waiting calls would starve each other
        if held.value is None or not is_good:
            raise held.failure or unusable("the server was ending", "Start it again.")
        return held.value

    async def _read(self, source: str, held: _HeldSource, over: anyio.Event) -> None:
        held.failure = None
        try:
            value = await read(source)
            await self._mask(held, value)  # before it is returned to a caller
        except Exception as failure:  # noqa: BLE001 - raised where it is awaited
            held.failure = failure
            held.again = self._clock() + AGAIN if isinstance(failure, DiagnosedError) else _NEVER
        else:
            now = self._clock()
            until = now + UNSAID if value.expires is None else value.expires - EARLY
            # A value that lives for a minute is not read without a pause.
            held.soon = until if value.expires is None else max(until - AHEAD, now + (until - now) / 2)
            held.value, held.until = value, until
        finally:
            held.reading = None
            over.set()

    def used(self, credentials: Iterable[Credential]) -> dict[bytes, str]:
        """Return the encodings of all values of these sources, with their names."""
        return {form: each.name for each in credentials for form in self.forms([each])}

    def forms(self, credentials: Iterable[Credential]) -> Forms:
        """Return the same without names, for results: one object until a source gives another value."""
        sources = frozenset(credential.source for credential in credentials)
        if (known := self._forms.get(sources)) is None:
            values = [value for source in sources for value in self._held[source].seen.values()]
            known = self._forms[sources] = {form: name for value in values for form, name in value.items()}
        return known

    async def _mask(self, held: _HeldSource, value: CredentialValue) -> None:
        """Remember a value's forms, so that they are masked in every result."""
        seen = held.seen
        if value.text in seen:
            seen[value.text] = seen.pop(value.text)
            return
        seen[value.text] = await anyio.to_thread.run_sync(derive_forms, "of the server", value.text)
        if len(seen) > KEPT:
            del seen[next(iter(seen))]
        self._forms.clear()
