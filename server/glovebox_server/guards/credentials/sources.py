"""Reads a credential's value from where its profile says: a variable, a file, a keyring or a program.

No value is ever in a message: what a source gave is described by what is wrong with it.
"""

import errno
import importlib
import json
import os
import shlex
import signal
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
from anyio.abc import Process

from glovebox_server.redaction import without_paths

MAX_BYTES: Final = 64 * 1024
"""What is read of a file or a program's output: a signed token of the largest kind has 8 KiB."""
SECONDS: Final = 10.0
"""How long a program or a keyring may take: a helper that asks a token service needs one or two."""
SHORTEST: Final = 16
"""Letters and digits of a value: a shorter one could not be told from ordinary text in an answer."""
_LONGEST: Final = 8192
_TOKENS: Final = ("value", "token", "access_token", "id_token")
_ASKING: Final = dict[str, object]()
"""Entries that a keyring is asked for. A thread cannot be ended: of an entry there is one, however long it hangs."""
_EXPIRIES: Final = ("expires", "expirationTimestamp", "expiration", "token_expiry", "expiry")
_ALONE: Final = (
    f"It has to be the value alone: {SHORTEST} to {_LONGEST} printable characters without blanks, {SHORTEST} of them "
    "letters or digits."
)
_JSON: Final = 'It prints JSON such as {"value": "...", "expires": "2026-01-01T00:00:00Z"}: run it by hand.'
_UNLOCK: Final = "Unlock it as the server's user: it may be asking somebody at a screen."
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
"""What to do, by what the system says."""


class CredentialError(Exception):
    """A credential's value could not be had; ``reason`` and ``fix`` hold nothing of it, and no host path."""

    def __init__(self, reason: str, fix: str) -> None:
        """Say what is wrong with the source, and what the operator can do."""
        super().__init__(reason)
        self.reason = without_paths(reason)
        self.fix = without_paths(fix)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Value:
    """What a source gave. It has no ``repr``, so that no log shows it by accident."""

    text: str
    """Printable ASCII without blanks."""
    expires: datetime | None = None
    """When it stops working; None where the source does not say."""


async def read(source: str) -> Value:
    """Read the value that ``source`` names: ``env:``, ``file:``, ``keyring:`` or ``exec:``.

    Raises:
        CredentialError: it is not there, cannot be read, is no credential, or has expired.
    """
    kind, _, where = source.partition(":")
    match kind:
        case "env":
            # Not by name: somebody may have put a key there.
            fix = "Set it where the server is started, and start it again."
            value = _plain(os.environ.get(where), "its variable", "is not set or empty", fix)
        case "file":
            value = await anyio.to_thread.run_sync(_of_file, Path(where))
        case "keyring":
            value = await _of_keyring(where)
        case _:
            value = await _of_program(where)
    if value.expires is not None and value.expires <= datetime.now(UTC):
        fix = "Have it print one that is valid: sign in again where it has it from, and compare this host's clock."
        raise CredentialError("what its program printed has expired", fix)
    return value


def _plain(text: str | None, whence: str, none: str, fix: str, expires: datetime | None = None) -> Value:
    """Check that a text can be a value.

    Args:
        text: what the source gave.
        whence: how it is called in the reason.
        none: what is said of it where the source gave nothing.
        fix: what to do then.
        expires: when the value stops working.
    """
    if not text:
        raise CredentialError(f"{whence} {none}", fix)
    if problem := _problem(text):
        raise CredentialError(f"{whence} does not hold a credential: {problem}", _ALONE)
    return Value(text=text, expires=expires)


def _problem(text: str) -> str:
    """Say of a text why it is no value, without anything of it; nothing where it is one."""
    if "\n" in text or "\r" in text:
        return "it has several lines"
    if not text.isascii() or not text.replace(" ", "").isprintable():
        return "it has characters that are no printable ASCII"
    if " " in text:
        return "it has blanks"
    if len(text) > _LONGEST:
        return f"it has more than {_LONGEST} characters"
    return "" if sum(map(str.isalnum, text)) >= SHORTEST else f"it has fewer than {SHORTEST} letters and digits"


def _of_file(path: Path) -> Value:
    try:
        # Non-blocking, so that a FIFO in its place holds nothing up.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if stat.S_ISDIR(found.st_mode):
                raise CredentialError("its file is a folder", "Name the file in it that holds the value alone.")
            if not stat.S_ISREG(found.st_mode):
                raise CredentialError("its file is no plain file", "Name the file that holds the value alone.")
            if found.st_mode & stat.S_IRWXO:
                raise CredentialError("others may read or change its file", "Run `chmod o= FILE`.")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                data = file.read(MAX_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        fix = _OF_FILES.get(error.errno or 0, "Read it by hand, as the server's user.")
        raise CredentialError(f"its file cannot be read: {error.strerror}", fix) from None
    if len(data) > MAX_BYTES:
        raise CredentialError(f"its file has more than {MAX_BYTES} bytes", _ALONE)
    text = data.decode("ascii", "replace").rstrip("\r\n")
    return _plain(text, "its file", "is empty", "Write the value into it, alone.")


async def _of_keyring(where: str) -> Value:
    service, _, user = where.rpartition("/")

    def ask() -> str | None:
        mine = object()
        if _ASKING.setdefault(where, mine) is not mine:  # in the thread, so that of two who ask at once one does
            raise CredentialError("the keyring still has not answered", _UNLOCK)
        try:
            found: str | None = importlib.import_module("keyring").get_password(service, user)
            return found
        finally:
            del _ASKING[where]

    with anyio.move_on_after(SECONDS):
        try:
            text = await anyio.to_thread.run_sync(ask, abandon_on_cancel=True)
        except CredentialError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a keyring's backend raises
            raise _of_backend(error) from None
        fix = "Run `keyring set SERVICE USER` as the server's user, with those of source."
        return _plain(text, "its entry in the keyring", "is not there or empty", fix)
    raise CredentialError(f"the keyring did not answer within {SECONDS:g} seconds", _UNLOCK)


def _of_backend(error: Exception) -> CredentialError:
    """Say what a keyring raised, by its class's name: its text may hold anything."""
    if isinstance(error, ModuleNotFoundError) and error.name == "keyring":
        fix = "Install the Python package keyring beside the server, and start it again."
        return CredentialError("the Python package keyring is not installed", fix)
    name = type(error).__name__
    if name == "KeyringLocked":
        return CredentialError("the keyring is locked", _UNLOCK)
    if name == "NoKeyringError":
        fix = "Set one up for the server's user, or name another source: env, file or exec."
        return CredentialError("there is no keyring here", fix)
    fix = "Run `keyring get SERVICE USER` as the server's user, with those of source."
    return CredentialError(f"the keyring failed: {name}", fix)


async def _of_program(command: str) -> Value:
    argv = shlex.split(command)
    try:
        # A session of its own, so that what it starts ends with it; a call that is cancelled now ends it below.
        with anyio.CancelScope(shield=True):
            process = await anyio.open_process(argv, stdin=-3, stderr=-3, start_new_session=True)
    except OSError as error:
        reason = f"its program cannot be started: {error.strerror}"
        fix = _OF_PROGRAMS.get(error.errno or 0, "Start it by hand, as the server's user.")
        raise CredentialError(reason, fix) from None
    fix = "Run it by hand, as the server's user."
    try:
        with anyio.move_on_after(SECONDS):
            data = await _read(process)
            if len(data) > MAX_BYTES:
                raise CredentialError(f"its program printed more than {MAX_BYTES} bytes", _JSON)
            if (status := await process.wait()) < 0:
                raise CredentialError(f"its program was ended by signal {-status}", fix)
            if status:
                raise CredentialError(f"its program ended with status {status}", fix)
            return _of_json(data)
        fix = "Run it by hand, as the server's user, with nothing to read from: it may be asking for something."
        raise CredentialError(f"its program did not end within {SECONDS:g} seconds", fix)
    finally:
        await _end(process)


async def _end(process: Process) -> None:
    """End a program with what it started. One that runs as another user, by sudo, cannot be: nobody waits for it."""
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


def _of_json(data: bytes) -> Value:
    """Find the token and its expiry where credential helpers print them.

    Beside our own ``value`` and ``expires``: OAuth's token response (RFC 6749 section 5.1), Kubernetes'
    ExecCredential (``status``) and what ``gcloud config config-helper`` prints (``credential``).
    """
    if not data.strip():
        raise CredentialError("its program printed nothing", _JSON)
    try:
        said: Any = json.loads(data)
    except (ValueError, RecursionError):
        raise CredentialError("its program did not print JSON", _JSON) from None
    for table in ("status", "credential"):
        if isinstance(said, dict) and isinstance(said.get(table), dict):
            said = said[table]
    token = next((said[key] for key in _TOKENS if isinstance(said.get(key), str)), None) if _is(said) else None
    if token is None:
        raise CredentialError("its program's JSON holds no token", _JSON)
    return _plain(token, "what its program printed", "is empty", _JSON, _expiry(said))


def _is(said: object) -> bool:
    return isinstance(said, dict)


def _expiry(said: Mapping[str, Any]) -> datetime | None:
    seconds = said.get("expires_in")
    try:
        if seconds is not None:
            return datetime.now(UTC) + timedelta(seconds=float(seconds))
        when = next((said[key] for key in _EXPIRIES if said.get(key) is not None), None)
        return None if when is None else datetime.fromisoformat(when).astimezone(UTC)
    except (ValueError, TypeError, OverflowError):
        raise CredentialError("its program's JSON has an expiry that cannot be read", _JSON) from None
