"""Reads a credential's value from where its profile says: a variable, a file, a keyring or a program.

No value is ever in a message: what a source gave is described by what is wrong with it.
"""

import importlib
import json
import os
import re
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
_VALUE: Final = re.compile(rf"[\x21-\x7e]{{{SHORTEST},{_LONGEST}}}")
_TOKENS: Final = ("value", "token", "access_token", "id_token")
_EXPIRIES: Final = ("expires", "expirationTimestamp", "expiration", "token_expiry", "expiry")


class CredentialUnavailable(Exception):  # noqa: N818 - as the design's other failures
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
        CredentialUnavailable: it is not there, cannot be read, is no credential, or has expired.
    """
    kind, _, where = source.partition(":")
    match kind:
        case "env":
            value = _plain(os.environ.get(where), f"the variable {where}")
        case "file":
            value = await anyio.to_thread.run_sync(_of_file, Path(where))
        case "keyring":
            value = await _of_keyring(where)
        case _:
            value = await _of_program(where)
    if value.expires is not None and value.expires <= datetime.now(UTC):
        raise CredentialUnavailable(f"what {kind} gave has expired", "Renew it where it comes from.")
    return value


def _plain(text: str | None, whence: str, expires: datetime | None = None) -> Value:
    if not text:
        raise CredentialUnavailable(f"{whence} is not set or empty", "Set it before the server starts.")
    if not _VALUE.fullmatch(text) or sum(map(str.isalnum, text)) < SHORTEST:
        what = f"{SHORTEST} to {_LONGEST} printable characters without blanks, {SHORTEST} of them letters or digits"
        raise CredentialUnavailable(f"{whence} does not hold a credential", f"It has to be {what}.")
    return Value(text=text, expires=expires)


def _of_file(path: Path) -> Value:
    try:
        # Non-blocking, so that a FIFO in its place holds nothing up.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise CredentialUnavailable("its file is no plain file", "Name the file that holds the value alone.")
            if found.st_mode & stat.S_IRWXO:
                raise CredentialUnavailable("others may read or change its file", "Run `chmod o= FILE`.")
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise CredentialUnavailable(f"its file cannot be read: {error.strerror}", "Make it readable.") from None
    return _plain(data[:MAX_BYTES].decode("ascii", "replace").rstrip("\r\n"), "its file")


async def _of_keyring(where: str) -> Value:
    service, _, user = where.rpartition("/")
    fix = (
        "Install the Python package keyring beside the server, unlock the keyring, and run `keyring set SERVICE USER`."
    )

    def ask() -> str | None:
        found: str | None = importlib.import_module("keyring").get_password(service, user)
        return found

    with anyio.move_on_after(SECONDS):
        try:
            return _plain(await anyio.to_thread.run_sync(ask, abandon_on_cancel=True), "its entry in the keyring")
        except CredentialUnavailable:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a keyring's backend raises
            raise CredentialUnavailable(f"the keyring failed: {type(error).__name__}", fix) from None
    raise CredentialUnavailable(f"the keyring did not answer within {SECONDS:g} seconds", fix)


async def _of_program(command: str) -> Value:
    argv = shlex.split(command)
    try:
        # A session of its own, so that what it starts ends with it.
        process = await anyio.open_process(argv, stdin=-3, stderr=-3, start_new_session=True)
    except OSError as error:
        reason = f"its program cannot be started: {error.strerror}"
        raise CredentialUnavailable(reason, "Name it by its full path, and make it executable.") from None
    fix = "Run it by hand, as the server's user."
    try:
        with anyio.move_on_after(SECONDS):
            data = await _read(process)
            if len(data) > MAX_BYTES:
                raise CredentialUnavailable(f"its program printed more than {MAX_BYTES} bytes", fix)
            if status := await process.wait():
                raise CredentialUnavailable(f"its program ended with status {status}", fix)
            return _of_json(data)
        raise CredentialUnavailable(f"its program did not end within {SECONDS:g} seconds", fix)
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
    fix = 'It prints JSON such as {"value": "...", "expires": "2026-01-01T00:00:00Z"}.'
    try:
        said: Any = json.loads(data)
    except (ValueError, RecursionError):
        raise CredentialUnavailable("its program did not print JSON", fix) from None
    for table in ("status", "credential"):
        if isinstance(said, dict) and isinstance(said.get(table), dict):
            said = said[table]
    token = next((said[key] for key in _TOKENS if isinstance(said.get(key), str)), None) if _is(said) else None
    if token is None:
        raise CredentialUnavailable("its program's JSON holds no token", fix)
    return _plain(token, "what its program printed", _expiry(said, fix))


def _is(said: object) -> bool:
    return isinstance(said, dict)


def _expiry(said: Mapping[str, Any], fix: str) -> datetime | None:
    seconds = said.get("expires_in")
    try:
        if seconds is not None:
            return datetime.now(UTC) + timedelta(seconds=float(seconds))
        when = next((said[key] for key in _EXPIRIES if said.get(key) is not None), None)
        return None if when is None else datetime.fromisoformat(when).astimezone(UTC)
    except (ValueError, TypeError, OverflowError):
        raise CredentialUnavailable("its program's JSON has an expiry that cannot be read", fix) from None
