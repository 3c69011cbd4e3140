"""Reads credentials' values from their sources, and keeps each only while it may be used.

A source is a variable, a file or a program. No message holds a value: it says what is wrong with the source. Values
are kept only in memory.
"""

import errno
import json
import os
import shlex
import signal
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
from anyio.abc import Process, TaskGroup

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
_JSON: Final = 'It prints JSON such as {"value": "...", "expires": "2026-01-01T00:00:00Z"}: run it by hand.'
_OF_FILES: Final = {
    errno.ENOENT: "Make it where source says, or name there where it is.",
    errno.ENOTDIR: "Make it where source says, or name there where it is.",
    errno.EACCES: "Let the server's user read it and enter its folders: `chown USER FILE`, `chmod 600 FILE`.",
    errno.ELOOP: "Name the file itself: links lead in a circle.",
}
_OF_PROGRAMS: Final = {
    errno.ENOENT: "Name it by its full path; a script's first line has to name an interpreter that is there.",
    errno.EACCES: "Make it executable for the server's user: `chmod u+x PROGRAM`.",
    errno.ENOEXEC: "Name a program of this machine; a script begins with #! and what runs it.",
}
"""Fixes, by the system's error."""
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
    """Printable ASCII without blanks."""
    expires: datetime | None = None
    """Expiry; None if the source gives none."""


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
    if problem := _problem(text):
        raise unusable(f"{whence} does not hold a credential: {problem}", _ALONE)
    return CredentialValue(text=text, expires=expires)


def _problem(text: str) -> str:
    """Return why a text is no value, without quoting it; empty if it is one."""
    if "\n" in text or "\r" in text:
        return "it has several lines"
    if not text.isascii() or not text.replace(" ", "").isprintable():
        return "it has characters that are no printable ASCII"
    if " " in text:
        return "it has blanks"
    if len(text) > _LONGEST:
        return f"it has more than {_LONGEST} characters"
    return "" if sum(map(str.isalnum, text)) >= SHORTEST else f"it has fewer than {SHORTEST} letters and digits"


def _of_file(path: Path) -> CredentialValue:
    try:
        # Non-blocking: a FIFO in its place must not block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if stat.S_ISDIR(found.st_mode):
                raise unusable("its file is a folder", "Name the file in it that holds the value alone.")
            if not stat.S_ISREG(found.st_mode):
                raise unusable("its file is no plain file", "Name the file that holds the value alone.")
            if found.st_mode & stat.S_IRWXO:
                raise unusable("others may read or change its file", "Run `chmod o= FILE`.")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                data = file.read(MAX_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        fix = _OF_FILES.get(error.errno or 0, "Read it by hand, as the server's user.")
        raise unusable(f"its file cannot be read: {error.strerror}", fix) from None
    if len(data) > MAX_BYTES:
        raise unusable(f"its file has more than {MAX_BYTES} bytes", _ALONE)
    text = data.decode("ascii", "replace").rstrip("\r\n")
    return _plain(text, "its file", "is empty", "Write the value into it, alone.")


async def _of_program(command: str) -> CredentialValue:
    argv = shlex.split(command)
    try:
        # A session of its own, so that its children end with it; a cancelled call ends it below.
        with anyio.CancelScope(shield=True):
            process = await anyio.open_process(argv, stdin=-3, stderr=-3, start_new_session=True)
    except OSError as error:
        reason = f"its program cannot be started: {error.strerror}"
        fix = _OF_PROGRAMS.get(error.errno or 0, "Start it by hand, as the server's user.")
        raise unusable(reason, fix) from None
    fix = "Run it by hand, as the server's user."
    try:
        with anyio.move_on_after(SECONDS):
            data = await _read(process)
            if len(data) > MAX_BYTES:
                raise unusable(f"its program printed more than {MAX_BYTES} bytes", _JSON)
            if (status := await process.wait()) < 0:
                raise unusable(f"its program was ended by signal {-status}", fix)
            if status:
                raise unusable(f"its program ended with status {status}", fix)
            return _of_json(data)
        fix = "Run it by hand, as the server's user, with nothing to read from: it may be asking for something."
        raise unusable(f"its program did not end within {SECONDS:g} seconds", fix)
    finally:
        await _end(process)


async def _end(process: Process) -> None:
    """End a program and its children. One that sudo runs as another user cannot be ended, nor waited for."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all of it has ended
    except PermissionError:
        if process.returncode is None:
            return
    with anyio.CancelScope(shield=True):
        await process.aclose()


async def _read(process: Process) -> bytes:
    data = b""
    if process.stdout is not None:
        async for piece in process.stdout:
            data += piece
            if len(data) > MAX_BYTES:
                break
    return data


def _of_json(data: bytes) -> CredentialValue:
    """Return ``value``, and ``expires`` if given: RFC 3339, with a time zone or in UTC."""
    if not data.strip():
        raise unusable("its program printed nothing", _JSON)
    try:
        table: Any = json.loads(data)
    except (ValueError, RecursionError):
        raise unusable("its program did not print JSON", _JSON) from None
    if not isinstance(table, dict) or not isinstance(table.get("value"), str):
        raise unusable("its program's JSON holds no value", _JSON)
    try:
        when = table.get("expires")
        expires = None if when is None else datetime.fromisoformat(when).astimezone(UTC)
    except (ValueError, TypeError, OverflowError):
        raise unusable("its program's JSON has an expiry that cannot be read", _JSON) from None
    return _plain(table["value"], "what its program printed", "is empty", _JSON, expires)


@dataclass(slots=True, repr=False)
class _Reading:
    """One read of a source, for all tasks that wait for it."""

    over: anyio.Event = field(default_factory=anyio.Event)
    value: CredentialValue | None = None
    failure: Exception | None = None

    async def result(self) -> CredentialValue:
        await self.over.wait()
        if self.value is None:
            raise self.failure or unusable("the server was ending", "Start it again.")
        return self.value


class CredentialCache:
    """The values that one server holds, by their source."""

    def __init__(
        self, tasks: TaskGroup | None = None, clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        """Start empty.

        Programs run in ``tasks``, also ahead. A cancelled call cancels no read, so none can start one over and over.
        With None they run in the call that needs them.
        """
        self._tasks = tasks
        self._clock = clock
        self._readings: dict[str, _Reading] = {}
        self._soon: dict[str, datetime] = {}
        self._values: dict[str, tuple[CredentialValue, datetime]] = {}
        self._failures: dict[str, tuple[DiagnosedError, datetime]] = {}
        self._locks: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)
        self._seen: defaultdict[str, dict[str, Forms]] = defaultdict(dict)  # by source and value, the newest last
        self._forms: dict[frozenset[str], Forms] = {}  # of several sources together; few, as profiles have few keys

    async def value(self, source: str) -> CredentialValue:
        """Return the value of a source, read again if the cached one is too old.

        Raises DiagnosedError: it is unavailable.
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

    def _good(self, source: str) -> CredentialValue | None:
        held = self._values.get(source)
        return held[0] if held is not None and self._clock() < held[1] else None

    async def _read_apart(self, source: str, reading: _Reading) -> None:
        try:
            reading.value = await self._read(source)
        except Exception as failure:  # noqa: BLE001 - raised where it is awaited
            reading.failure = failure
        finally:
            del self._readings[source]
            reading.over.set()

    async def _read(self, source: str) -> CredentialValue:
        """Read a value, unless that failed just now; each source has one read at a time."""
        failed = self._failures.get(source)
        if failed is not None and self._clock() < failed[1]:
            raise failed[0]
        try:
            value = await read(source)
        except DiagnosedError as failure:
            self._failures[source] = failure, self._clock() + AGAIN
            raise
        now = self._clock()
        until = now + UNSAID if value.expires is None else value.expires - EARLY
        # A value that lives for a minute is not read without a pause.
        self._soon[source] = until if value.expires is None else max(until - AHEAD, now + (until - now) / 2)
        await self._known(source, value)  # before it is returned to a caller
        self._values[source] = value, until
        self._failures.pop(source, None)
        return value

    def used(self, credentials: Iterable[Credential]) -> dict[bytes, str]:
        """Return the encodings of all values of these sources, with their names."""
        return {
            form: credential.name
            for credential in credentials
            for forms_of_value in self._seen.get(credential.source, {}).values()
            for form in forms_of_value
        }

    def forms(self, credentials: Iterable[Credential]) -> Forms:
        """Return the same without names, for results: one object until a source gives another value."""
        sources = frozenset(credential.source for credential in credentials)
        if (known := self._forms.get(sources)) is None:
            values = [value for source in sources for value in self._seen.get(source, {}).values()]
            known = self._forms[sources] = {form: name for value in values for form, name in value.items()}
        return known

    async def _known(self, source: str, value: CredentialValue) -> CredentialValue:
        """Remember a value's forms, so that they are masked in every result."""
        seen = self._seen[source]
        if value.text in seen:
            seen[value.text] = seen.pop(value.text)
            return value
        seen[value.text] = await anyio.to_thread.run_sync(derive_forms, "of the server", value.text)
        if len(seen) > KEPT:
            del seen[next(iter(seen))]
        self._forms.clear()
        return value
