"""Make one line of one record and read it back: the hash chain. Pure: no I/O, no clock.

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
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import datetime
from typing import Any, Literal, cast

import rfc8785

from glovebox_audit.event import NOT_YET, CallEvent, Event

#: ``prev`` of the first record.
GENESIS = "0" * 64

#: Longest line with its line feed, which bounds a reader's memory. Kept arguments are the only large part, and the
#: transports cap a request well below this.
MAX_LINE_BYTES = 1 << 20

#: Version of the record format. It is not written: a record of a later one has ``format`` at its top.
FORMAT = 1

#: ``head.json`` always has this length, so that one write replaces it within one disk sector.
HEAD_BYTES = 256

# The integers every JSON reader agrees on (RFC 8785, section 3.2.2.3).
_MAX_INTEGER = 2**53 - 1
# Numbers from here on are written with an exponent (RFC 8785, section 3.2.2.3, as ECMAScript does).
_EXPONENT_FROM = 1e21
# A number, where a value can stand, that Python and ECMAScript may write differently: one with an exponent, a whole one
# with a fraction, a long one. Between those both write the shortest digits that read back as the same number. A colon
# counts only after a key's end, and an exponent only with its sign: else one digest in ten would match. A fixed set of
# first characters, then digits: the matcher skips other text three times as fast.
_DELICATE = re.compile(r'[:,\[](?:(?<=[,\[])|(?<=":))-?[0-9]+(?:(?:\.[0-9]+)?e[-+]|\.0[,\]}]|(?<=[0-9]{16}))', re.ASCII)
_ENCODE = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode

#: Crockford's base 32 in lower case, without ambiguous letters (https://www.crockford.com/base32.html).
ID_DIGITS = "0123456789abcdefghjkmnpqrstvwxyz"
ID_TIME_DIGITS = 10

_RANDOM_DIGITS = 16
_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)
NAME = re.compile(r"[A-Za-z0-9._:@-]{1,128}", re.ASCII)
_FORMS = {"server": NAME, "kind": NAME, "call_id": NAME, "prev": _HASH, "hash": _HASH}
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", re.ASCII)
# The end of a record, in at most ``_LINK_BYTES``: before it are its call and its data.
_LINK = re.compile(
    rb'(?P<field>"hash":"(?P<hash>[0-9a-f]{64})",)"kind":"[A-Za-z0-9._:@-]{1,128}","prev":"(?P<prev>[0-9a-f]{64})"'
    rb',"seq":(?P<seq>[0-9]{1,16}),"server":"[A-Za-z0-9._:@-]{1,128}","time":"[0-9T:.Z-]{27}"}\n\Z'
)
_LINK_BYTES = 640
_KEYS = frozenset({"seq", "time", "server", "kind", "call_id", "data", "prev", "hash"})


class EvidenceError(Exception):
    """Bytes that do not prove their claim, or break a rule of the format; the message is the exact reason."""

    def __init__(
        self, reason: str, *, kind: Literal["newer", "edited", "unsealed"] | None = None, seq: int | None = None
    ) -> None:
        """Take the reason; of a record with another hash than it claims also its number, which cannot be trusted.

        ``kind`` is ``newer`` for a format that this version does not support, ``edited`` for such a record,
        ``unsealed`` for records in the current segment, which is not signed yet.
        """
        super().__init__(reason)
        self.kind = kind
        self.seq = seq


def newer_format(version: int) -> EvidenceError:
    """Return the error for bytes of a format that this version does not support."""
    reason = f"made by a newer Glovebox (format {version}; this one knows {FORMAT}): upgrade to read it"
    return EvidenceError(reason, kind="newer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """An event to be chained: all but its place, its time and its server."""

    kind: str
    call_id: str | None
    data: Mapping[str, Any]
    encoded: bytes
    """``data`` as canonical JSON."""
    parts: Mapping[str, bytes] = field(default_factory=dict)
    """The same field by field."""
    table: "Draft | None" = None
    """The ``sandbox.table`` that it names, to be in the same segment before it."""

    def of_call(self, call_id: str, whose: Mapping[str, str]) -> "Draft":
        """Return this event of this call, with these fields; raises ValueError unless drafted for that."""
        if self.call_id is not None:
            raise ValueError("it was drafted of a call")
        parts = {**self.parts, **{name: canonical(value) for name, value in whose.items()}}
        return replace(self, call_id=call_id, data={**self.data, **whose}, encoded=join_parts(parts), parts=parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line of the log."""

    seq: int
    time: str
    """RFC 3339, UTC, microseconds. A wall clock: it may step back, ``seq`` never does."""
    server: str
    """Id of the server process that wrote it."""
    kind: str
    call_id: str | None
    """Absent if the event concerns the server as a whole."""
    data: Mapping[str, Any]
    """The event's other fields, as JSON. Do not modify."""
    prev: str
    """``hash`` of the record before."""
    hash: str
    """Of this record without this field: SHA-256, 64 hex digits."""
    line: bytes
    """Line feed included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The end of the chain, as in ``head.json`` and in anchors kept elsewhere."""

    seq: int = 0
    """Number of the last record; 0 for an empty log."""
    hash: str = GENESIS
    size: int = 0
    """Bytes of the log up to and including it, from the first byte of its first segment."""


def recordable(value: object) -> object:
    """Return a copy of ``value`` that canonical JSON can hold.

    A value without an exact form becomes text, because a hostile file name or number must not make an event
    unrecordable. Lone surrogates become backslash escapes; integers beyond ±(2**53 - 1), NaN and infinities become text
    (``0x…``, ``nan``, ``inf``).

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
        if not math.isfinite(value):
            return str(value)
        # RFC 8785 writes a whole number below 1e21 without exponent: it would read back as an integer.
        return _recordable(int(value)) if value.is_integer() and abs(value) < _EXPONENT_FROM else value
    if isinstance(value, Mapping):
        return {str(_recordable(str(key))): _recordable(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_recordable(item) for item in value]
    raise ValueError(f"{type(value).__name__} has no place in JSON")


def _dumps(value: object) -> bytes:
    return rfc8785.dumps(cast("Any", value))


def canonical(value: object) -> bytes:
    """Return ``recordable(value)`` as RFC 8785 canonical JSON in UTF-8; raises like it. Keys are text."""
    return _plain(value) or _dumps(recordable(value))


def _plain(value: object) -> bytes | None:
    """Encode with the standard library, ten times as fast; None if it could differ.

    It equals RFC 8785 as long as all text is ASCII (else keys could sort differently, or surrogates be unpaired) and no
    number is delicate. A false match inside a text only costs the time.
    """
    try:
        text = _ENCODE(value)
    except (TypeError, ValueError, RecursionError):
        return None
    # A number alone has nothing before it for the pattern to begin with.
    plain = text.isascii() and not text[0].isdigit() and text[0] != "-" and _DELICATE.search(text) is None
    return text.encode() if plain else None


def join_parts(parts: Mapping[str, bytes]) -> bytes:
    """Return the canonical JSON of an object of encoded values; its keys are ASCII names."""
    return b"{" + b",".join(b'"%s":%s' % (name.encode(), parts[name]) for name in sorted(parts)) + b"}"


def digest(value: object) -> str:
    """Return the ``digest_of`` the canonical JSON; raises like ``recordable``."""
    return digest_of(canonical(value))


def digest_of(content: bytes) -> str:
    """Return ``sha256:`` and the hex digest."""
    return "sha256:" + hashlib.sha256(content).hexdigest()


def seal(draft: Draft, *, seq: int, time: str, server: str, prev: str) -> Record:
    """Give ``draft`` its place in the chain.

    ``data`` is by far the largest part and is encoded once. The keys around it are written in canonical order, so the
    bytes before and after ``hash`` serve both the digest and the line.
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
    """Read one line, line feed included, and prove that it is canonical.

    Raises:
        EvidenceError: it is none; never another exception, whatever the bytes. ``kind`` is ``edited`` if the form is
            right and the hash is not, and ``newer`` if it says that it has a later format.
    """
    if len(line) > MAX_LINE_BYTES:
        raise EvidenceError(f"the line is longer than {MAX_LINE_BYTES} bytes")
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise EvidenceError("the line is not JSON") from error
    if isinstance(fields, dict) and type(fields.get("format")) is int and FORMAT < fields["format"] <= _MAX_INTEGER:
        raise newer_format(fields["format"])
    if not isinstance(fields, dict) or not _KEYS - {"call_id"} <= fields.keys() <= _KEYS:
        raise EvidenceError("the line does not have a record's keys")
    claimed = fields["hash"]
    shaped = (
        type(fields["seq"]) is int
        and 0 < fields["seq"] <= _MAX_INTEGER
        and isinstance(fields["data"], dict)
        and _is_time(fields["time"])
        and all(_matches(form, fields[name]) for name, form in _FORMS.items() if name in fields)
    )
    if not shaped:
        raise EvidenceError("a field of the record has the wrong form")
    try:
        encoded = _plain(fields["data"]) or _dumps(fields["data"])
    except (ValueError, RecursionError) as error:
        raise EvidenceError("the record holds a value that canonical JSON does not") from error
    draft = Draft(kind=fields["kind"], call_id=fields.get("call_id"), data=fields["data"], encoded=encoded)
    record = seal(draft, seq=fields["seq"], time=fields["time"], server=fields["server"], prev=fields["prev"])
    if record.line == line:
        return record
    if record.hash != claimed and record.line.replace(record.hash.encode(), claimed.encode()) == line:
        raise EvidenceError("the content does not have the hash the record claims", kind="edited", seq=record.seq)
    raise EvidenceError("the line is not in canonical form")


def linked(line: bytes, before: Head) -> Head | None:
    """Return the chain's end with this line; None if it does not follow ``before``.

    Ten times as fast as ``parse``; proves only that the line has the hash it claims.
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
    """Return whether ``text`` may be an id or a kind: 1 to 128 of ``A-Z a-z 0-9 . _ : @ -``."""
    return _matches(NAME, text)


def new_call_id() -> str:
    """Return a new id of a call."""
    return new_id("c")


def new_id(kind: str) -> str:
    """Return the kind, ``_``, ten characters of Unix time in milliseconds and sixteen (80 bits) of randomness."""
    now = _encode(time.time_ns() // 1_000_000, ID_TIME_DIGITS)
    return f"{kind}_{now}{_encode(secrets.randbits(5 * _RANDOM_DIGITS), _RANDOM_DIGITS)}"


def _encode(number: int, digits: int) -> str:
    return "".join(ID_DIGITS[(number >> (5 * place)) & 31] for place in reversed(range(digits)))


def time_of(identifier: str) -> float | None:
    """Return the Unix time in seconds of a call's id; None for any other text."""
    digits = identifier.partition("_")[2][:ID_TIME_DIGITS]
    if len(digits) < ID_TIME_DIGITS or not set(digits) <= set(ID_DIGITS):
        return None
    return sum(ID_DIGITS.index(digit) << (5 * place) for place, digit in enumerate(reversed(digits))) / 1000


def encode_head(head: Head) -> bytes:
    """Return the ``HEAD_BYTES`` bytes of ``head.json``: canonical JSON, padded with spaces, then a line feed."""
    text = rfc8785.dumps({"hash": head.hash, "seq": head.seq, "size": head.size})
    return text.ljust(HEAD_BYTES - 1) + b"\n"


def parse_head(content: bytes) -> Head:
    """Parse what ``encode_head`` wrote; raises EvidenceError for any other bytes."""
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        fields = json.loads(content[:HEAD_BYTES])
        head = Head(hash=fields["hash"], seq=fields["seq"], size=fields["size"])
        if encode_head(head) == content and _matches(_HASH, head.hash) and min(head.seq, head.size) >= 0:
            return head
    raise EvidenceError("not the head of an audit log")


def parse_anchor(text: str) -> Head:
    """Parse ``SEQ:HASH``, an anchor without its size; raises ValueError for other text."""
    seq, _, value = text.partition(":")
    if not re.fullmatch(r"[0-9]{1,16}", seq, re.ASCII) or not _matches(_HASH, value):
        raise ValueError(f"{text[:100]!r} is not an anchor: it is SEQ:HASH, as `glovebox audit head` prints it")
    return Head(seq=int(seq), hash=value)


def draft(event: Event, **encoded: bytes) -> Draft:
    """Turn an event into a draft for the chain; a long field that is canonical JSON already may be given as such.

    Raises:
        ValueError: a field holds what is not JSON, the call id is not a name, or the record would be too long.
    """
    call_id = event.call_id if isinstance(event, CallEvent) and event.call_id != NOT_YET else None
    if call_id is not None and not NAME.fullmatch(call_id):
        raise ValueError("the call id is not a name")
    parts = {name: encoded.get(name) or canonical(value) for name, value in _data(event).items()}
    whole = join_parts(parts)
    if len(whole) > MAX_LINE_BYTES - 1024:  # which hold every other field at its longest
        raise ValueError(f"it is {len(whole)} bytes long and a record holds {MAX_LINE_BYTES - 1024}")
    return Draft(kind=event.kind, call_id=call_id, data=json.loads(whole), encoded=whole, parts=parts)


def _data(item: Any) -> dict[str, Any]:
    """Return the fields that have a value, those of listed parts too; no copy: a mapping may be of any kind."""
    found = {each.name: getattr(item, each.name) for each in fields(item) if each.name != "call_id"}
    for name, value in found.items():
        if isinstance(value, tuple) and value and is_dataclass(value[0]):
            found[name] = [_data(part) for part in value]
    return {name: value for name, value in found.items() if value is not None}
