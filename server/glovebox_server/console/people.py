"""Keep the people who may use the console: single-use links, and the sessions they begin. A SQLite file; no HTTP.

Rule 1  A link or a session is a secret of 256 bits, of which the file has the SHA-256: who reads it can use neither.
Rule 2  A link begins one session, within five minutes; a session ends after eight hours, when it is revoked, or when a
        console begins.
Rule 3  Time is the boot clock, as of approvals: no jump of the wall clock prolongs one, and a reboot ends all.
Rule 4  A person is their name: two sessions of one name are one person, wherever answers are counted.
"""

import hashlib
import secrets
import sqlite3
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server.guards.budgets.spending import Clocks
from glovebox_server.stores import database
from glovebox_server.stores.database import Database

Role = Literal["viewer", "approver", "operator"]
"""A viewer reads; an approver decides too; an operator also stops what runs, and lifts stops."""
ROLES: Final[tuple[Role, ...]] = get_args(Role)
NAME_FORM: Final = "[a-z][a-z0-9._-]{0,31}"
LINK_MS: Final = 5 * 60_000
SESSION_MS: Final = 8 * 3_600_000
MOST: Final = 64
"""Links and sessions at one time: of more the oldest are forgotten."""
_SCHEMA: Final = """
    CREATE TABLE entries (
        hash TEXT PRIMARY KEY, kind TEXT NOT NULL, name TEXT NOT NULL, role TEXT NOT NULL, boot TEXT NOT NULL,
        ends REAL NOT NULL, made INTEGER NOT NULL
    ) WITHOUT ROWID
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """Somebody with a session."""

    name: str
    role: Role
    seconds_left: float

    @property
    def principal(self) -> str:
        """Return the name as records have it, and quorums count it."""
        return f"console:{self.name}"

    def may(self, role: Role) -> bool:
        """Return whether they may do what this role may."""
        return ROLES.index(self.role) >= ROLES.index(role)


def opened(state_dir: Path) -> AbstractContextManager[Database]:
    """Open the file of a state directory, creating it if missing. Raises StoreError."""
    return database.opened(state_dir / database.DIRECTORY / "console.sqlite", _SCHEMA)


class People:
    """All links and sessions, in one transaction, at one moment."""

    def __init__(self, db: sqlite3.Connection, at: Clocks) -> None:
        self._db, self._at = db, at

    def invite(self, name: str, role: Role) -> str:
        """Return the secret of a new link."""
        return self._add("link", name, role, LINK_MS)

    def enter(self, secret: str) -> tuple[str, Person]:
        """Use a link up; return the secret of the session that it begins, and whose it is.

        Raises RefusedError if there is none: it was used, has expired, or was never made.
        """
        found = self._person("link", secret)
        if found is None:
            reason = "This link was used, has expired, or is none of this console's."
            raise RefusedError("console.link", reason, "Have a new one made: `glovebox console link`.")
        self._db.execute("DELETE FROM entries WHERE hash = ?", (_hash(secret),))
        session = self._add("session", found.name, found.role, SESSION_MS)
        return session, Person(name=found.name, role=found.role, seconds_left=SESSION_MS / 1000)

    def find(self, session: str) -> Person | None:
        """Return whose session this is; None if it is none, or over."""
        return self._person("session", session)

    def begin(self) -> None:
        """End all sessions, as a console begins: who had its port in between may have been sent their secrets."""
        self._db.execute("DELETE FROM entries WHERE kind = 'session'")

    def leave(self, session: str) -> None:
        """End one session."""
        self._db.execute("DELETE FROM entries WHERE hash = ?", (_hash(session),))

    def listed(self) -> list[Person]:
        """Return everybody with a session, the oldest first."""
        rows = self._rows("kind = 'session' ORDER BY made")
        return [found for row in rows if (found := self._read(row)) is not None]

    def revoke(self, name: str) -> int:
        """End all sessions and links of a name; return their number."""
        return self._db.execute("DELETE FROM entries WHERE name = ?", (name,)).rowcount

    def _add(self, kind: str, name: str, role: Role, lasts: int) -> str:
        secret, at = secrets.token_urlsafe(32), self._at
        self._db.execute("DELETE FROM entries WHERE boot != ? OR ends <= ?", (at.boot, at.since_boot))
        self._db.execute(
            "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?)",
            (_hash(secret), kind, name, role, at.boot, at.since_boot + lasts, at.wall),
        )
        self._db.execute(
            "DELETE FROM entries WHERE hash IN"
            " (SELECT hash FROM entries WHERE kind = ? ORDER BY ends DESC LIMIT -1 OFFSET ?)",
            (kind, MOST),
        )
        return secret

    def _person(self, kind: str, secret: str) -> Person | None:
        rows = self._rows("kind = ? AND hash = ?", kind, _hash(secret))
        return self._read(rows[0]) if rows else None

    def _rows(self, where: str, *values: object) -> list[tuple[str, str, str, float]]:
        asked = f"SELECT name, role, boot, ends FROM entries WHERE {where}"  # noqa: S608 - of ours
        return self._db.execute(asked, values).fetchall()

    def _read(self, row: tuple[str, str, str, float]) -> Person | None:
        name, role, boot, ends = row
        left = (ends - self._at.since_boot) / 1000
        known = next((each for each in ROLES if each == role), None)
        if known is None or boot != self._at.boot or left <= 0:
            return None
        return Person(name=name, role=known, seconds_left=left)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
