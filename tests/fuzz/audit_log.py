"""Any edit of an audit log: it verifies only if it is byte for byte what was written."""

import atexit
import shutil
import tempfile
from pathlib import Path

from tests.fixtures.audit_logs import fill
from tests.fuzz.harness import bounded

from glovebox_audit import read
from glovebox_audit.segments.files import HEAD_NAME, LOG_NAME
from glovebox_audit.verify import verify

_PLACE = Path(tempfile.mkdtemp(prefix="glovebox-fuzz-"))
atexit.register(shutil.rmtree, _PLACE, ignore_errors=True)
fill(_PLACE / "written", 8)
LOG, HEAD = ((_PLACE / "written" / name).read_bytes() for name in (LOG_NAME, HEAD_NAME))
LINES = LOG.splitlines(keepends=True)


def _edited(content: bytes, edits: bytes) -> bytes:
    """Apply edits: two bytes of place, one of what to do, one of how much, and what an insertion inserts."""
    made, at = bytearray(content), 0
    while at + 4 <= len(edits):
        place = int.from_bytes(edits[at : at + 2]) % (len(made) + 1)
        what, count = edits[at + 2] % 5, edits[at + 3]
        at += 4
        if what == 0:
            made[place : place + 1] = bytes([count])
        elif what == 1:
            del made[place : place + count]
        elif what == 2:
            made[place:place] = edits[at : at + count]
            at += count
        else:  # a line of the log, put here or in place of the rest
            line = LINES[count % len(LINES)]
            made[place : place if what == 3 else len(made)] = line
    return bytes(made)


def check(data: bytes) -> None:
    """First byte: what is edited, log or head, or the log replaced by the input itself."""
    if not data:
        return
    log, head = LOG, HEAD
    if data[0] % 3 == 0:
        log = _edited(LOG, data[1:])
    elif data[0] % 3 == 1:
        head = _edited(HEAD, data[1:])
    else:
        log = data[1:]
    (_PLACE / LOG_NAME).write_bytes(log)
    (_PLACE / HEAD_NAME).write_bytes(head)
    with bounded():
        report = verify(_PLACE)
        read.tail(_PLACE, 3)
        list(read.records_of(_PLACE, "c_1"))
    assert report.ok is not bool(report.problems)
    assert report.ok is ((log, head) == (LOG, HEAD))
