"""Bearer tokens: one file per name in the state directory, made on first start, refused where others could read it.

No MCP and no HTTP here. Nothing in this module prints or logs a token.
"""

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from server import client_config

#: Where they lie, below the state directory.
DIRECTORY = "tokens"

#: The token that is made when there is none.
DEFAULT_NAME = "default"

#: Tokens in one directory; each is compared on each request.
MAX_TOKENS = 64

#: Longest token file in bytes, line feed included.
MAX_FILE_BYTES = 256

#: Of web servers with TLS, RFC 9110, 4.2.2.
HTTPS_PORT = 443

#: 32 random bytes: nobody guesses them, whatever the rate.
_TOKEN_BYTES = 32

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}", re.ASCII)
_TOKEN = re.compile(r"[A-Za-z0-9_-]{32,128}", re.ASCII)


class TokensUnusable(Exception):  # noqa: N818 - the state of things, as the other failures
    """The tokens cannot be read safely, so the server does not listen."""

    def __init__(self, path: Path, reason: str, fix: str) -> None:
        """Say which path, what is wrong with it, and the command that repairs it."""
        super().__init__(f"token file {path}: {reason}. {fix}")
        self.path = path
        self.reason = reason
        self.fix = fix


def load(directory: Path) -> dict[str, str]:
    """Return all tokens by name; the name is the caller's identity (``token:<name>``).

    Makes the directory (0700) and a token ``default`` (0600) where there is none yet. More are added by writing files.

    Args:
        directory: a directory of its own, below the state directory.

    Raises:
        TokensUnusable: the directory or a file is a link, belongs to another user, is open to others, or holds
            something else than a token.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        place = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise TokensUnusable(directory, f"it is not a directory: {error.strerror}", "Remove it.") from error
    try:
        _check(os.fstat(place), stat.S_IFDIR, directory, "700")
        names = sorted(name for name in os.listdir(place) if not name.startswith("."))  # noqa: PTH208 - by descriptor
        if not names:
            _make(place, DEFAULT_NAME)
            names = [DEFAULT_NAME]
        if len(names) > MAX_TOKENS:
            raise TokensUnusable(directory, f"it holds more than {MAX_TOKENS} tokens", "Remove the unused ones.")
        return {name: _read(place, name, directory / name) for name in names}
    finally:
        os.close(place)


def client_configuration(
    state_dir: Path, *, transport: str, host: str, port: int, arguments: Sequence[str] = ()
) -> str:
    """Return what to paste into clients, with the token ``default`` for ``http``; for the operator's terminal only.

    Args:
        state_dir: where the tokens are.
        transport: ``stdio`` or ``http``.
        host: name or address by which clients reach the server.
        port: and the port; ``HTTPS_PORT`` stands for a proxy with TLS.
        arguments: options of ``glovebox serve`` for clients that start it themselves.

    Raises:
        TokensUnusable: see ``load``.
    """
    if transport == "stdio":
        # Absolute paths: desktop applications start servers with another PATH and in another directory.
        program = shutil.which(sys.argv[0]) or sys.argv[0]
        return client_config.for_stdio([str(Path(program).absolute()), "serve", *arguments])
    known = load(state_dir / DIRECTORY)
    token = known.get(DEFAULT_NAME) or next(iter(known.values()))
    # The server itself speaks no TLS: on this port it is a proxy's.
    scheme = "https" if port == HTTPS_PORT else "http"
    return client_config.for_http(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}", token)


def owner(tokens: Mapping[str, str], presented: str) -> str | None:
    """Return the name of the token that was presented, or None.

    The time it takes depends neither on how much of a token is right nor on which one it is.
    """
    digest = hashlib.sha256(presented.encode("utf-8", "surrogatepass")).digest()
    found = None
    for name, token in tokens.items():
        if hmac.compare_digest(hashlib.sha256(token.encode()).digest(), digest):
            found = name
    return found


def _make(place: int, name: str) -> None:
    """Publish a whole file at once: of two servers that start together, one makes it and both read it."""
    draft = f".new-{secrets.token_hex(8)}"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=place)
    try:
        os.write(fd, f"gbx_{secrets.token_urlsafe(_TOKEN_BYTES)}\n".encode())
        os.fsync(fd)
        with contextlib.suppress(FileExistsError):
            os.link(draft, name, src_dir_fd=place, dst_dir_fd=place)
    finally:
        os.close(fd)
        os.unlink(draft, dir_fd=place)


def _read(place: int, name: str, path: Path) -> str:
    if not _NAME.fullmatch(name):
        raise TokensUnusable(path, "its name is not 1 to 32 of a-z 0-9 -", f"Rename or remove {path}.")
    try:
        # Non-blocking, so that a FIFO in the way cannot stop the server from starting.
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place)
    except OSError as error:
        reason = f"it cannot be opened as a file of its own: {error.strerror}"
        raise TokensUnusable(path, reason, f"Remove {path}; a new one is made.") from error
    try:
        _check(os.fstat(fd), stat.S_IFREG, path, "600")
        content = os.read(fd, MAX_FILE_BYTES + 1).decode("ascii", "replace").strip()
    finally:
        os.close(fd)
    if not _TOKEN.fullmatch(content):
        reason = "it does not hold one token of 32 to 128 letters, digits, - and _"
        raise TokensUnusable(path, reason, f"Remove {path}; a new one is made.")
    return content


def _check(found: os.stat_result, kind: int, path: Path, mode: str) -> None:
    if stat.S_IFMT(found.st_mode) != kind:
        raise TokensUnusable(path, "it is not what is expected there", f"Remove {path}.")
    if found.st_uid != os.geteuid():
        raise TokensUnusable(path, f"it belongs to user {found.st_uid}", f"Run `chown {os.geteuid()} {path}`.")
    if found.st_mode & 0o077:
        reason = f"others have access to it (mode {stat.S_IMODE(found.st_mode):03o})"
        raise TokensUnusable(path, reason, f"Remove it if others may have read it, else run `chmod {mode} {path}`.")
