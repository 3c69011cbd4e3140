"""Bearer tokens: one file per name in the state directory, made on first start, refused where others could read it.

No MCP and no HTTP here. Nothing in this module prints or logs a token.
"""

import hashlib
import hmac
import os
import re
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio

from glovebox_server import secret_files
from glovebox_server.cli.actions import client_config
from glovebox_server.secret_files import SecretDirectory, SecretUnusable

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

_TOO_MANY = f"it holds more than {MAX_TOKENS} tokens"

#: Longer than a tick of any file system's clock, in nanoseconds.
_TICK_NS = 2_000_000_000

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}", re.ASCII)
_TOKEN = re.compile(r"[A-Za-z0-9_-]{32,128}", re.ASCII)


#: What changes when a file does: its name, inode, length and time of change.
_Stamp = tuple[str, int, int, int]


class TokensUnusable(SecretUnusable):
    """The tokens cannot be read safely, so the server does not listen."""

    kind = "token file"


def load(directory: Path) -> dict[str, str]:
    """Return all tokens by name; the name is the caller's identity (``token:<name>``).

    Makes the directory (0700) and a token ``default`` (0600) where there is none yet. More are added by writing files.

    Args:
        directory: a directory of its own, below the state directory.

    Raises:
        TokensUnusable: the directory or a file is a link, belongs to another user, is open to others, or holds
            something else than a token.
    """
    with secret_files.opened(directory, TokensUnusable) as place:
        names = place.names()
        if not names:
            # Of two servers that start together, one makes it and both read it.
            place.make(DEFAULT_NAME, f"gbx_{secrets.token_urlsafe(_TOKEN_BYTES)}\n".encode())
            names = [DEFAULT_NAME]
        if len(names) > MAX_TOKENS:
            raise TokensUnusable(directory, _TOO_MANY, "Remove the unused ones.")
        return {name: _read(place, name) for name in names}


class TokenFiles:
    """The tokens in a directory, as they are now. Not for two threads at once."""

    def __init__(self, directory: Path) -> None:
        """Read them; raises like ``load``."""
        self._directory = directory
        self._seen: list[_Stamp] | None = []
        self.tokens = load(directory)
        self.problems: tuple[SecretUnusable, ...] = ()

    def look(self) -> bool:
        """Read them again where anything changed; ``tokens`` and ``problems`` say what is so then.

        Where a file cannot be used, what it held before stays in force; a file that is gone is gone.

        Returns:
            Whether either is another than before.
        """
        stamps = _stamps(self._directory)
        if stamps == self._seen:
            return False
        before, told = self.tokens, [str(each) for each in self.problems]
        try:
            self._read_all()
        except SecretUnusable as problem:
            self.problems = (problem,)
        except OSError as problem:  # the system's own, such as too many open files
            reason = problem.strerror or str(problem)
            self.problems = (TokensUnusable(self._directory, reason, "It is tried again in a second."),)
            stamps = []
        # What changed in the last moments may change again within the same tick of the file system's clock.
        fresh = max((each[-1] for each in stamps or ()), default=0) > time.time_ns() - _TICK_NS
        self._seen = [] if fresh else stamps
        return self.tokens != before or [str(each) for each in self.problems] != told

    def _read_all(self) -> None:
        found: dict[str, str] = {}
        problems: list[SecretUnusable] = []
        with secret_files.opened(self._directory, TokensUnusable) as place:
            names = place.names()
            for name in names[:MAX_TOKENS]:
                try:
                    found[name] = _read(place, name)
                except TokensUnusable as problem:
                    problems.append(problem)
                    if name in self.tokens:
                        found[name] = self.tokens[name]
        if len(names) > MAX_TOKENS:
            problems.append(TokensUnusable(self._directory, _TOO_MANY, "Remove the unused ones."))
            found = {name: token for name, token in self.tokens.items() if name in names}
        self.tokens, self.problems = found, tuple(problems)


class Callers:
    """Who may come in: the tokens in force, and for each what says that it no longer is."""

    def __init__(self, tokens: Mapping[str, str]) -> None:
        """Take the tokens by name."""
        self._tokens = dict(tokens)
        self._removals = {name: anyio.Event() for name in tokens}
        self.unusable = 0
        """Files of tokens that cannot be used."""

    def __len__(self) -> int:
        """How many share the server; at least one."""
        return max(1, len(self._tokens))

    def owner(self, presented: str) -> str | None:
        """The name of the token that was presented, or None; see ``owner``."""
        return owner(self._tokens, presented)

    def removal(self, name: str) -> anyio.Event:
        """Set once the token that has this name now is removed or replaced."""
        return self._removals[name]

    def replace(self, tokens: Mapping[str, str]) -> set[str]:
        """Have other tokens in force; returns the names of those that no longer are, the same name with another too."""
        removed = {name for name, token in self._tokens.items() if tokens.get(name) != token}
        for name in removed:
            self._removals.pop(name).set()
        self._tokens = dict(tokens)
        self._removals = {name: self._removals.get(name) or anyio.Event() for name in tokens}
        return removed


def _stamps(directory: Path) -> list[_Stamp] | None:
    """What changes when a file of the directory does; None where that cannot be looked at."""
    try:
        places = [directory, *(Path(each) for each in os.scandir(directory))]
        found = [(place.name, place.lstat()) for place in places]
    except OSError:
        return None
    return sorted((name, each.st_ino, each.st_size, each.st_ctime_ns) for name, each in found)


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
        launcher = Path(sys.executable).with_name("glovebox")
        program = [str(launcher)] if launcher.is_file() else [sys.executable, "-I", "-m", "glovebox_server"]
        return client_config.for_stdio([*program, "serve", *arguments])
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


def _read(place: SecretDirectory, name: str) -> str:
    path = place.path / name
    if not _NAME.fullmatch(name):
        raise TokensUnusable(path, "its name is not 1 to 32 of a-z 0-9 -", f"Rename or remove {path}.")
    content = place.read(name, MAX_FILE_BYTES).decode("ascii", "replace").strip()
    if not _TOKEN.fullmatch(content):
        reason = "it does not hold one token of 32 to 128 letters, digits, - and _"
        raise TokensUnusable(path, reason, f"Remove {path}; where there is no other, a new one is made.")
    return content
