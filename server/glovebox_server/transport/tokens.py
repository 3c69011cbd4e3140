"""Bearer tokens: one file per name in the state directory with only a hash, refused if others can read it.

No MCP and no HTTP here. Nothing in this module prints or logs a token.

A token is 256 random bits, so its plain SHA-256 is enough at rest: a slow hash makes guesses expensive, and of these
there is nothing to guess. It must also be fast, because every request of a stranger costs one.
"""

import contextlib
import hashlib
import math
import os
import re
import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import anyio
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from glovebox_sandboxes import strict_json
from glovebox_server import secret_files
from glovebox_server.secret_files import Mark, SecretDirectory, SecretFileError

#: Below the state directory.
DIRECTORY = "tokens"
_KIND = "token file"
#: Tokens in one directory: each second their files are looked at, all in some 20 ms, beside the event loop.
MAX_TOKENS = 4096
#: Longest token file in bytes, line feed included.
MAX_FILE_BYTES = 1024
#: Seconds between two notes of when a token was last used.
USED_SECONDS = 300.0
#: 32 random bytes cannot be guessed, whatever the rate.
_TOKEN_BYTES = 32
_TOO_MANY = f"it holds more than {MAX_TOKENS} tokens"
#: Files without content whose time of change says when the token of that name was last used.
_USED = ".used"
#: A secret that another system mounts: the token itself.
_MOUNTED = re.compile(rb"[A-Za-z0-9_-]{32,128}")
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}", re.ASCII)
#: Name of a role or a workflow, as in policy.toml.
_ROLE = r"^[a-z][a-z0-9-]{0,63}$"


class Token(BaseModel):
    """One token without its secret: its owner, its hash, and its bindings, as its file has them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(default="", exclude=True)
    """The file's, and the caller's: ``token:<name>``."""
    version: Literal[1] = 1
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    made: AwareDatetime | None = None
    expires: AwareDatetime | None = None
    role: str | None = Field(default=None, pattern=_ROLE)
    workflow: str | None = Field(default=None, pattern=_ROLE)

    @property
    def principal(self) -> str:
        """Return the id of its principal."""
        return f"token:{self.name}"


def digest_of(presented: str) -> str:
    """Return the SHA-256 of a token, in hex."""
    return hashlib.sha256(presented.encode("utf-8", "surrogatepass")).hexdigest()


def is_name(name: str) -> bool:
    """Return whether this can be the name of a token."""
    return _NAME.fullmatch(name) is not None


def load(directory: Path, roles: Collection[str] | None = ()) -> dict[str, Token]:
    """Return all tokens by name; the name is the caller's identity (``token:<name>``).

    Raises SecretFileError: the directory or a file is a link, belongs to another user, is open to others, holds
    anything but a token, or one that is bound to a missing role.

    Args:
        directory: a directory of its own, below the state directory; made (0700) if missing.
        roles: the existing roles; None accepts any.
    """
    found, problems = _read_all(directory, roles, {})
    if problems:
        raise problems[0]
    return found


def _read_all(
    directory: Path, roles: Collection[str] | None, known: dict[str, tuple[Mark, Token]]
) -> tuple[dict[str, Token], list[SecretFileError]]:
    """Return the tokens, and what is wrong with other files. Raises SecretFileError for the directory.

    ``known`` is what was read before, and is brought up to date: of files that did not change nothing is read again.
    """
    found: dict[str, Token] = {}
    marked: dict[str, tuple[Mark, Token]] = {}
    problems: list[SecretFileError] = []
    with secret_files.opened(directory, _KIND) as place:
        names = place.names()
        for name in names[:MAX_TOKENS]:
            try:
                mark, (before, token) = place.mark(name), known.get(name, (None, None))
                if token is None or mark is None or mark != before:
                    token = _read(place, name)
                marked[name] = mark, token
                _require_role(token, place.path, roles)
                found[name] = token
            except SecretFileError as problem:
                problems.append(problem)
    known.clear()
    known.update(marked)
    if len(names) > MAX_TOKENS:
        problems.append(SecretFileError(_KIND, directory, _TOO_MANY, "Remove the unused ones."))
    return found, problems


def create(
    place: Path, name: str, *, role: str | None = None, workflow: str | None = None, lifetime: timedelta | None = None
) -> tuple[Token, str] | None:
    """Make a token; only its hash is kept.

    Raises SecretFileError: see ``load``; or there are ``MAX_TOKENS``.

    Returns:
        The record, and the token itself, which cannot be read again; None if the name is taken.
    """
    secret = f"gbx_{secrets.token_urlsafe(_TOKEN_BYTES)}"
    made = datetime.now(UTC).replace(microsecond=0)
    expires = None if lifetime is None else made + lifetime
    token = Token(name=name, sha256=digest_of(secret), made=made, expires=expires, role=role, workflow=workflow)
    with secret_files.opened(place, _KIND) as directory, directory.locked():
        names = directory.names()
        if name in names:
            return None
        if len(names) >= MAX_TOKENS:
            reason = f"it holds {MAX_TOKENS} tokens, and no more may be"
            raise SecretFileError(_KIND, place, reason, "Revoke unused ones.")
        if not directory.make(name, encode(token)):
            return None
    return token, secret


def encode(token: Token) -> bytes:
    """Return the content of a token's file."""
    return token.model_dump_json(exclude_none=True).encode() + b"\n"


def revoke(directory: Path, name: str) -> bool:
    """Remove a token, whatever its file holds; return whether it existed.

    A running server stops accepting it within a second. Raises SecretFileError: it cannot be removed, or see ``load``
    of the directory.
    """
    with secret_files.opened(directory, _KIND) as place, place.locked():
        if name not in place.names():
            return False
        place.remove(name)
    (directory / _USED / name).unlink(missing_ok=True)
    return True


def note_used(directory: Path, names: Collection[str]) -> None:
    """Note that tokens are in use now, for ``token list`` alone; each once in ``USED_SECONDS``."""
    with contextlib.suppress(OSError):
        (directory / _USED).mkdir(mode=0o700, exist_ok=True)
        for name in names:
            noted = last_used(directory, name)
            if noted is None or abs(time.time() - noted.timestamp()) >= USED_SECONDS:
                (directory / _USED / name).touch(mode=0o600)


def last_used(directory: Path, name: str) -> datetime | None:
    """Return when a token was last used, within ``USED_SECONDS``."""
    try:
        return datetime.fromtimestamp(int((directory / _USED / name).lstat().st_mtime), UTC)
    except OSError:
        return None


class TokenFiles:
    """The current tokens in a directory. Not for two threads at once."""

    def __init__(self, directory: Path, roles: Collection[str] = ()) -> None:
        self.directory = directory
        self.tokens = load(directory, roles)
        self._known: dict[str, tuple[Mark, Token]] = {}
        self.problems: tuple[SecretFileError, ...] = ()

    def look(self, roles: Collection[str] = ()) -> bool:
        """Read the files again into ``tokens`` and ``problems``; return whether either changed.

        An unusable file keeps its earlier token in effect; a removed file ends its token.
        """
        before, told = self.tokens, [str(each) for each in self.problems]
        try:
            found, problems = _read_all(self.directory, roles, self._known)
            left = {n: each for n, each in before.items() if n in found or os.path.lexists(self.directory / n)}
            self.tokens = left if any(_TOO_MANY in str(each) for each in problems) else left | found
            self.problems = tuple(problems)
        except SecretFileError as problem:
            self.problems = (problem,)
        except OSError as problem:  # the system's own, such as too many open files
            reason = problem.strerror or str(problem)
            self.problems = (SecretFileError(_KIND, self.directory, reason, "It is tried again in a second."),)
        return self.tokens != before or [str(each) for each in self.problems] != told


def _read(place: SecretDirectory, name: str) -> Token:
    path = place.path / name
    if not _NAME.fullmatch(name):
        raise SecretFileError(_KIND, path, "its name is not 1 to 32 of a-z 0-9 -", f"Rename or remove {path}.")
    content = place.read(name, MAX_FILE_BYTES)
    if _MOUNTED.fullmatch(content.strip()):
        return Token(name=name, sha256=digest_of(content.strip().decode()))
    try:
        strict_json.check(content if len(content) <= MAX_FILE_BYTES else b"")
        return Token.model_validate_json(content, strict=True).model_copy(update={"name": name})
    except ValueError:
        fix = f"Remove {path}, and make a new one: `glovebox token create {name}`."
        reason = "it does not hold what `token create` writes, nor a token of 32 to 128 letters, digits, - and _"
        raise SecretFileError(_KIND, path, reason, fix) from None


def _require_role(token: Token, directory: Path, roles: Collection[str] | None) -> None:
    """Refuse a token of another role than these; None accepts any."""
    if token.role is not None and roles is not None and token.role not in roles:
        known = f"the roles are {', '.join(sorted(roles))}" if roles else "there are no roles, since there is no policy"
        fix = f"`glovebox token revoke {token.name}` ends it; or add the role to the policy."
        reason = f"it is bound to a role that there is not, {token.role!r}: {known}"
        raise SecretFileError(_KIND, directory / token.name, reason, fix)


@dataclass(slots=True, weakref_slot=True, kw_only=True, eq=False)
class TokenGrant:
    """The grant of a token: its principal, its lifetime, and the events that end it."""

    principal: str
    roles: tuple[str, ...] = ()
    workflow: str | None = None
    user: str | None = None
    """The end user and the client in the token's claims, for the record."""
    scopes: tuple[str, ...] = ()
    expires: float | None = None
    """Unix time; None: never."""
    removed: anyio.Event = field(default_factory=anyio.Event)
    expired: anyio.Event = field(default_factory=anyio.Event)
    """Set once the token has expired, while something is under way with it."""

    def expire(self, now: float) -> bool:
        """Set ``expired`` if its time is over; return whether the grant has ended for any reason."""
        if self.expires is not None and self.expires <= now:
            self.expired.set()
        return self.expired.is_set() or self.removed.is_set()


class Callers:
    """The tokens in effect."""

    def __init__(self, tokens: Mapping[str, Token]) -> None:
        self._held: dict[str, tuple[Token, TokenGrant]] = {}
        self._names: dict[str, str] = {}
        """By the digests of tokens."""
        self.used: set[str] = set()
        """Names of the tokens used since the last note on disk, which empties it."""
        self.unusable = 0
        self.due = math.inf
        """Unix time before which none of them expires."""
        self.replace(tokens)

    def __len__(self) -> int:
        return len(self._held)

    def grant(self, presented: str) -> TokenGrant | None:
        """Return what a presented token grants, or None, at the same cost however many there are.

        Only digests are compared, by a look-up. How long that takes could tell something about the digest of a token at
        most, and nothing about the token: one that is nearly right has another digest altogether.
        """
        name = self._names.get(digest_of(presented))
        if name is None or (grant := self._held[name][1]).expire(time.time()):
            return None
        self.used.add(name)
        return grant

    def replace(self, tokens: Mapping[str, Token], now: float | None = None) -> set[str]:
        """Replace the tokens in effect, without expired ones; return the principals of removed or changed tokens."""
        now = time.time() if now is None else now
        before, self._held = self._held, {}
        for name, token in tokens.items():
            known, grant = before.get(name, (None, None))
            if grant is None or known != token:
                grant = TokenGrant(
                    principal=token.principal,
                    roles=() if token.role is None else (token.role,),
                    workflow=token.workflow,
                    expires=None if token.expires is None else token.expires.timestamp(),
                )
            if not grant.expire(now):
                self._held[name] = token, grant
        ends = [grant.expires for _, grant in self._held.values() if grant.expires is not None]
        self.due = min(ends, default=math.inf)
        self._names = {token.sha256: name for name, (token, _) in self._held.items()}
        removed = set()
        for name, (token, grant) in before.items():
            if name not in self._held or self._held[name][1] is not grant:
                removed.add(token.principal)
                if not grant.expire(now):
                    grant.removed.set()
        return removed
