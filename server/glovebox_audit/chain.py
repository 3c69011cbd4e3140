"""The hash chain: how one record becomes one line, and how a line is read back. Pure: no I/O, no clock.

Rule 1  A line is the RFC 8785 canonical JSON of one record, in UTF-8, ended by one line feed.
Rule 2  ``hash`` is the SHA-256, in lower-case hex, of the canonical JSON of the same record without ``hash``.
Rule 3  ``prev`` is the ``hash`` of the record before; the first record has ``GENESIS`` there.
Rule 4  ``seq`` counts from 1 without holes.
Rule 5  A line that is not byte for byte what these rules make of its content is not a record.

Sources: RFC 8785 (JSON Canonicalization Scheme), RFC 3339 (time), FIPS 180-4 (SHA-256).
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

import rfc8785

#: What the first record is chained to.
GENESIS = "0" * 64

#: Longest line, its line feed included. Kept arguments are the only large part of a record and the transports cap a
#: request well below this; the bound keeps every reader's memory small whatever the file holds.
MAX_LINE_BYTES = 1 << 20

#: Version of the format of records. It is not written: a record of a later one says ``format`` at its top.
FORMAT = 1

#: ``head.json`` always has this length, so that one write replaces all of it within one disk sector.
HEAD_BYTES = 256

# The integers every JSON reader agrees on (RFC 8785, section 3.2.2.3).
_MAX_INTEGER = 2**53 - 1
# Numbers from here on are written with an exponent (RFC 8785, section 3.2.2.3, by way of ECMAScript).
_EXPONENT_FROM = 1e21
# A number, where a value can stand, that Python and ECMAScript may write differently: one with an exponent, a whole one
# with a fraction, a long one. Between those both write the shortest digits that are read back as the same number.
# Behind a colon only where a key ends, and an exponent with its sign: one digest in ten looked like a number else.
# It begins with one set of characters, and digits: the matcher skips over the rest of a text three times as fast.
_DELICATE = re.compile(r'[:,\[](?:(?<=[,\[])|(?<=":))-?[0-9]+(?:(?:\.[0-9]+)?e[-+]|\.0[,\]}]|(?<=[0-9]{16}))', re.ASCII)
_ENCODE = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode

#: Crockford's base 32 in lower case: no letter that is mistaken for a digit (https://www.crockford.com/base32.html).
ID_DIGITS = "0123456789abcdefghjkmnpqrstvwxyz"
ID_TIME_DIGITS = 10

_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9._:@-]{1,128}", re.ASCII)
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", re.ASCII)
# How a record ends, in at most so many bytes: what is before is its call and its data.
_LINK = re.compile(
    rb'(?P<field>"hash":"(?P<hash>[0-9a-f]{64})",)"kind":"[A-Za-z0-9._:@-]{1,128}","prev":"(?P<prev>[0-9a-f]{64})"'
    rb',"seq":(?P<seq>[0-9]{1,16}),"server":"[A-Za-z0-9._:@-]{1,128}","time":"[0-9T:.Z-]{27}"}\n\Z'
)
_LINK_BYTES = 640
_KEYS = frozenset({"seq", "time", "server", "kind", "call_id", "data", "prev", "hash"})


class EvidenceError(Exception):
    """These bytes do not prove what they claim to; the message is the exact reason."""


class RecordError(EvidenceError):
    """These bytes are not a record: they break a rule of the format."""


class NewerFormatError(RecordError):
    """These bytes have a format that this version does not know."""

    def __init__(self, version: int) -> None:
        """Take the version of the format."""
        super().__init__(f"made by a newer Glovebox (format {version}; this one knows {FORMAT}): upgrade to read it")


class EditedRecordError(RecordError):
    """These bytes have the form of a record, but the hash they claim is not the hash of their content."""

    def __init__(self, seq: int, claimed: str) -> None:
        """Take the number and the hash the line claims; neither can be trusted."""
        super().__init__("the content does not have the hash the record claims")
        self.seq = seq
        self.claimed = claimed


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """An event ready to be chained: everything but its place, its time and its server."""

    kind: str
    call_id: str | None
    data: Mapping[str, Any]
    encoded: bytes
    """``data`` as canonical JSON."""
    parts: Mapping[str, bytes] | None = None
    """The same field by field, of what is drafted before its call comes: that waits for nothing then."""

    def of_call(self, call_id: str, whose: Mapping[str, str]) -> "Draft":
        """The same event with these fields too, of this call: for what was drafted before its call came.

        Raises:
            ValueError: it was not drafted for that.
        """
        if self.parts is None:
            raise ValueError("it was drafted of a call")
        parts = {**self.parts, **{name: canonical(value) for name, value in whose.items()}}
        return Draft(kind=self.kind, call_id=call_id, data={**self.data, **whose}, encoded=join_parts(parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line of the log."""

    seq: int
    """Place in the chain, from 1."""
    time: str
    """When it was written: RFC 3339, UTC, microseconds. A wall clock: it may step back, ``seq`` never does."""
    server: str
    """Id of the server process that wrote it."""
    kind: str
    """Which event, e.g. ``call.decided``."""
    call_id: str | None
    """The call it belongs to; None for what concerns the server as a whole."""
    data: Mapping[str, Any]
    """The event's other fields, as JSON. Not to be changed."""
    prev: str
    """``hash`` of the record before."""
    hash: str
    """SHA-256 of this record without this field, 64 hex digits."""
    line: bytes
    """The exact bytes in the file, line feed included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The end of the chain: what ``head.json`` remembers and what an anchor outside of this machine states."""

    seq: int = 0
    """Number of the last record; 0 for an empty log."""
    hash: str = GENESIS
    """Its hash."""
    size: int = 0
    """Bytes of the log up to and including it, from the first byte of its first segment."""


def recordable(value: object) -> object:
    """Return a copy of ``value`` in plain dicts, lists, text and numbers that canonical JSON can hold.

    What it cannot hold exactly becomes text instead of an error, because a hostile file name or number must not make
    an event unrecordable: lone surrogates become backslash escapes; integers beyond ±(2**53 - 1), NaN and infinities
    become text (``0x…``, ``nan``, ``inf``).

    Raises:
        ValueError: the value holds an object that is no JSON at all, or is nested too deeply.
    """
    try:
        return _recordable(value)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _recordable(value: object) -> object:
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, bool | int | None):
        return value if value is None or abs(value) <= _MAX_INTEGER else hex(value)
    if isinstance(value, float):
        return _recordable_float(value)
    if isinstance(value, Mapping):
        return {str(_recordable(str(key))): _recordable(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_recordable(item) for item in value]
    raise ValueError(f"{type(value).__name__} has no place in JSON")


def _recordable_float(value: float) -> object:
    if not math.isfinite(value):
        return str(value)
    # RFC 8785 writes a whole number below 1e21 without exponent: it would be read back as an integer.
    return _recordable(int(value)) if value.is_integer() and abs(value) < _EXPONENT_FROM else value


def _dumps(value: object) -> bytes:
    return rfc8785.dumps(cast("Any", value))


def canonical(value: object) -> bytes:
    """Return ``recordable(value)`` as RFC 8785 canonical JSON in UTF-8; raises like ``recordable``. Keys are text."""
    return _plain(value) or _dumps(recordable(value))


def _plain(value: object) -> bytes | None:
    """The same, ten times as fast, by the standard library's C encoder; None where it could differ.

    It writes what RFC 8785 wants as long as all text is ASCII (else keys could sort differently, and surrogates could
    be alone) and no number is delicate. What looks like one inside a text only costs the time.
    """
    try:
        text = _ENCODE(value)
    except (TypeError, ValueError, RecursionError):
        return None
    # A number alone has nothing before it that the pattern could begin with.
    plain = text.isascii() and not text[0].isdigit() and text[0] != "-" and _DELICATE.search(text) is None
    return text.encode() if plain else None


def join_parts(parts: Mapping[str, bytes]) -> bytes:
    """Return the canonical JSON of an object whose values are encoded; its keys are ASCII names."""
    return b"{" + b",".join(b'"%s":%s' % (name.encode(), parts[name]) for name in sorted(parts)) + b"}"


def digest(value: object) -> str:
    """Return ``sha256:`` and the hex digest of the canonical JSON of ``value``; raises like ``recordable``."""
    return "sha256:" + hashlib.sha256(canonical(value)).hexdigest()


def seal(draft: Draft, *, seq: int, time: str, server: str, prev: str) -> Record:
    """Give ``draft`` its place in the chain.

    ``data`` is by far the largest part and is encoded once: the keys around it are written in their canonical order,
    so that the bytes before and after ``hash`` serve both the digest and the line.
    """
    call = b"" if draft.call_id is None else b'"call_id":' + rfc8785.dumps(draft.call_id) + b","
    front = b"{" + call + b'"data":' + draft.encoded + b","
    back = f'"kind":"{draft.kind}","prev":"{prev}","seq":{seq},"server":"{server}","time":"{time}"}}'.encode()
    value = hashlib.sha256(front + back).hexdigest()
    return Record(
        seq=seq,
        time=time,
        server=server,
        kind=draft.kind,
        call_id=draft.call_id,
        data=draft.data,
        prev=prev,
        hash=value,
        line=front + f'"hash":"{value}",'.encode() + back + b"\n",
    )


def parse(line: bytes) -> Record:
    """Read one line, line feed included, and prove that it is exactly what its content makes.

    Raises:
        EditedRecordError: the form is right, the hash is not.
        NewerFormatError: it says that it has a later format.
        RecordError: anything else; never another exception, whatever the bytes.
    """
    if len(line) > MAX_LINE_BYTES:
        raise RecordError(f"the line is longer than {MAX_LINE_BYTES} bytes")
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordError("the line is not JSON") from error
    if isinstance(fields, dict) and type(fields.get("format")) is int and FORMAT < fields["format"] <= _MAX_INTEGER:
        raise NewerFormatError(fields["format"])
    if not isinstance(fields, dict) or not _KEYS - {"call_id"} <= fields.keys() <= _KEYS:
        raise RecordError("the line does not have a record's keys")
    claimed = fields["hash"]
    shaped = (
        type(fields["seq"]) is int
        and 0 < fields["seq"] <= _MAX_INTEGER
        and isinstance(fields["data"], dict)
        and _is_time(fields["time"])
        and _matches(_NAME, fields["server"])
        and _matches(_NAME, fields["kind"])
        and ("call_id" not in fields or _matches(_NAME, fields["call_id"]))
        and _matches(_HASH, fields["prev"])
        and _matches(_HASH, claimed)
    )
    if not shaped:
        raise RecordError("a field of the record has the wrong form")
    try:
        encoded = _dumps(fields["data"])
    except (ValueError, RecursionError) as error:
        raise RecordError("the record holds a value that canonical JSON does not") from error
    draft = Draft(kind=fields["kind"], call_id=fields.get("call_id"), data=fields["data"], encoded=encoded)
    record = seal(draft, seq=fields["seq"], time=fields["time"], server=fields["server"], prev=fields["prev"])
    if record.line == line:
        return record
    if record.hash != claimed and record.line.replace(record.hash.encode(), claimed.encode()) == line:
        raise EditedRecordError(record.seq, claimed)
    raise RecordError("the line is not in canonical form")


def linked(line: bytes, before: Head) -> Head | None:
    """The end of the chain with this line, where it goes on behind ``before``; None where it does not.

    Ten times as fast as ``parse``, and it proves only that the line has the hash it claims.
    """
    found = _LINK.search(line, max(0, len(line) - _LINK_BYTES))
    if found is None or (int(found["seq"]), found["prev"].decode()) != (before.seq + 1, before.hash):
        return None
    content = hashlib.sha256(line[: found.start()])
    content.update(line[found.end("field") : -1])
    if content.hexdigest() != found["hash"].decode():
        return None
    return Head(seq=before.seq + 1, hash=content.hexdigest(), size=before.size + len(line))


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_time(value: object) -> bool:
    try:
        return isinstance(value, str) and _matches(_TIME, value) and datetime.fromisoformat(value) is not None
    except ValueError:  # a thirteenth month
        return False


def is_name(text: str) -> bool:
    """Say whether ``text`` may be a server id, an event kind or a call id: 1 to 128 of ``A-Z a-z 0-9 . _ : @ -``."""
    return _matches(_NAME, text)


def time_of(identifier: str) -> float | None:
    """Return the Unix time in seconds that the id of a call carries; None for what is no such id."""
    digits = identifier.partition("_")[2][:ID_TIME_DIGITS]
    if len(digits) < ID_TIME_DIGITS or not set(digits) <= set(ID_DIGITS):
        return None
    return sum(ID_DIGITS.index(digit) << (5 * place) for place, digit in enumerate(reversed(digits))) / 1000


def encode_head(head: Head) -> bytes:
    """Return the ``HEAD_BYTES`` bytes of ``head.json``: canonical JSON, padded with spaces, ended by a line feed."""
    text = rfc8785.dumps({"hash": head.hash, "seq": head.seq, "size": head.size})
    return text.ljust(HEAD_BYTES - 1) + b"\n"


def parse_head(content: bytes) -> Head:
    """Read what ``encode_head`` wrote.

    Raises:
        RecordError: the bytes are anything else.
    """
    try:
        fields = json.loads(content[:HEAD_BYTES])
        head = Head(hash=fields["hash"], seq=fields["seq"], size=fields["size"])
        if encode_head(head) == content and _matches(_HASH, head.hash) and min(head.seq, head.size) >= 0:
            return head
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise RecordError("not the head of an audit log") from error
    raise RecordError("not the head of an audit log")


def parse_anchor(text: str) -> Head:
    """Read an anchor, ``SEQ:HASH`` as ``glovebox audit head`` prints it; the size is not part of it.

    Raises:
        ValueError: the text is anything else.
    """
    seq, _, value = text.partition(":")
    if not re.fullmatch(r"[0-9]{1,16}", seq, re.ASCII) or not _matches(_HASH, value):
        raise ValueError(f"{text[:100]!r} is not an anchor: it is SEQ:HASH, as `glovebox audit head` prints it")
    return Head(seq=int(seq), hash=value)
