"""Bearer tokens: one file per name in the state directory, made on first start, refused where others could read it.

No MCP and no HTTP here. Nothing in this module prints or logs a token.
"""

import hashlib
import hmac
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

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

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}", re.ASCII)
_TOKEN = re.compile(r"[A-Za-z0-9_-]{32,128}", re.ASCII)


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
            raise TokensUnusable(directory, f"it holds more than {MAX_TOKENS} tokens", "Remove the unused ones.")
        return {name: _read(place, name) for name in names}


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
        raise TokensUnusable(path, reason, f"Remove {path}; a new one is made.")
    return content
