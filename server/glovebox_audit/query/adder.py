"""Add lines of the log to the index, by their form alone: a record is proved when it is shown."""

import hashlib
import re
import sqlite3
from datetime import UTC, datetime
from typing import Any, BinaryIO

from glovebox_audit import chain
from glovebox_audit.events import WHOSE, CallDecided
from glovebox_audit.query import calls
from glovebox_audit.query.outcomes import RUNNING
from glovebox_audit.read import Gaps

#: Digits of a digest or an address that are searched: the rest would be most of the index.
HEX_KEPT = 12

#: Bytes of the log in one commit: what an interrupted query has to read again.
_COMMIT_BYTES = 64 << 20

#: Calls under way, and texts, cached in memory.
_MOST_OPEN = 65_536
_MOST_TEXTS = 200_000

_DIGEST = re.compile(rf"([0-9a-f]{{{HEX_KEPT}}})[0-9a-f]{{20,}}")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Adder:
    """A writer of one index. Its methods raise the errors in ``database.DAMAGED``; its caller begins transactions."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._execute = connection.execute
        self._calls = int(connection.execute("SELECT coalesce(max(id), 0) FROM calls").fetchone()[0])
        self._count = int(connection.execute("SELECT coalesce(max(texts), 0) FROM state").fetchone()[0])
        self._searchable = has_texts(connection)
        self._words: dict[str, int] = {
            word: number for number, word in connection.execute("SELECT id, word FROM words")
        }
        self._texts: dict[str, int] = {}
        # Calls under way: each with its number and its indexed texts.
        self._open: dict[str, tuple[int, set[str]]] = {}

    def add(self, file: BinaryIO, base: int, start: int, end: int, gaps: Gaps) -> int:
        """Add some of the whole lines between two offsets of a file.

        ``base`` is the offset in the log of the file's first byte. A line in a gap is no record. Return the offset in
        the file after the last line added; ``start`` if there is none.
        """
        file.seek(start)
        at = done = start
        fresh = True
        while at < end and done - start < _COMMIT_BYTES:
            raw = file.readline(min(chain.MAX_LINE_BYTES, end - at))
            whole = raw.endswith(b"\n")
            if fresh and whole and not gaps.hold(at):
                self._take(raw, base + at)
            if not raw:
                break
            fresh, at = whole, at + len(raw)
            done = at if whole else done
        return done

    def save(self, began: int, until: int, last: bytes) -> None:
        """Note that the index covers ``began`` to ``until`` and ends with the line ``last``."""
        self._execute("DELETE FROM state")
        values = (began, until, hashlib.sha256(last).digest(), self._count)
        self._execute("INSERT INTO state (began, until, line, texts) VALUES (?, ?, ?, ?)", values)
        if len(self._texts) > _MOST_TEXTS:
            self._texts.clear()
        if len(self._open) > _MOST_OPEN:
            self._open.clear()

    def _take(self, raw: bytes, offset: int) -> None:
        label = calls.label(raw)
        if label is None or label[0] in calls.UNSEARCHED:
            return
        kind, call = label
        fields = calls.fields(raw)
        if fields is None:
            return
        if kind == CallDecided.kind:
            self._begin(call, fields, offset)
        elif call not in self._open and not self._resume(call):
            return  # its beginning was removed
        self._note(call, fields["data"])
        outcome = calls.outcome(kind, fields["data"])
        if outcome is not None and outcome != RUNNING:
            number, _ = self._open.pop(call)
            self._execute("UPDATE calls SET outcome = ?, last = ? WHERE id = ?", (self._word(outcome), offset, number))

    def _begin(self, call: str, fields: Any, offset: int) -> None:
        data = fields["data"]
        whose = {name: clean("" if data.get(name) is None else str(data[name])) for name in WHOSE}
        # There may be as many runs as calls: they are no words, which all stay in memory.
        kept = (word if name == "run" else self._word(word) for name, word in whose.items())
        self._calls += 1
        try:
            time = microseconds(datetime.fromisoformat(fields["time"]))
        except ValueError:
            time = 0
        values = (self._calls, clean(call), *kept, self._word(RUNNING), time, offset)
        self._execute("INSERT INTO calls VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, NULL)", values)
        self._open[call] = (self._calls, set())

    def _word(self, word: str) -> int:
        if word not in self._words:
            self._words[word] = len(self._words) + 1
            self._execute("INSERT INTO words VALUES (?, ?)", (self._words[word], word))
        return self._words[word]

    def _resume(self, call: str) -> bool:
        found = self._execute("SELECT max(id) FROM calls WHERE call = ?", (clean(call),)).fetchone()[0]
        if found is not None:
            self._open[call] = (int(found), set())
        return found is not None

    def _note(self, call: str, data: Any) -> None:
        if not self._searchable:
            return
        number, noted = self._open[call]
        for text in calls.texts(data):
            if text not in noted:
                noted.add(text)
                self._execute("INSERT OR IGNORE INTO uses VALUES (?, ?)", (self._text(text), number))

    def _text(self, text: str) -> int:
        found = self._texts.get(text)
        if found is None:
            short = clean(_DIGEST.sub(r"\1", text))
            # A text with a digest belongs to one call, or is frequent enough to be cached.
            found = self._known(short) if short == text else self._added(short)
            self._texts[text] = found
        return found

    def _known(self, text: str) -> int:
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        found = self._execute("SELECT text FROM known WHERE digest = ?", (digest,)).fetchone()
        if found is not None:
            return int(found[0])
        number = self._added(text)
        self._execute("INSERT INTO known VALUES (?, ?)", (digest, number))
        return number

    def _added(self, text: str) -> int:
        self._count += 1
        self._execute("INSERT INTO texts (rowid, text) VALUES (?, ?)", (self._count, text))
        return self._count


def has_texts(connection: sqlite3.Connection) -> bool:
    """Return whether texts are indexed."""
    return connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'texts'").fetchone() is not None


def clean(text: str) -> str:
    """Return a text as SQLite can hold it."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def microseconds(time: datetime) -> int:
    """Return a time in microseconds since the epoch."""
    since = time - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
