"""Verify offline that a log is whole, in bounded memory, and name the lines where it is not.

Found: a changed byte, a removed, added, repeated or moved line, a cut end, a chain rewritten without ``head.json``, and
any other bytes; in a whole chain, a record that does not fit its call, as a second end. Not found without an anchor
kept elsewhere, because the chain has no secret: a log and a ``head.json`` both put back to an earlier state or
rewritten as a whole, and well-made records added by someone who may write the files.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from glovebox_audit import chain, read
from glovebox_audit.chain import EvidenceError, Head
from glovebox_audit.segments import files
from glovebox_audit.segments.files import HEAD_NAME, LOG_NAME
from glovebox_audit.verifier import Keys, Verifier, VerifyReport


def verify(
    directory: Path, anchor: Head | None = None, *, anchors: Sequence[Head] = (), keys: Keys | None = None
) -> VerifyReport:
    """Check the log, or a copy of it, also while servers write to it.

    Args:
        directory: of the log or the copy.
        anchor: a record kept elsewhere, that must be in it.
        anchors: likewise, except those of records before the oldest segment, which retention may have removed.
        keys: one of which must have signed each seal; None leaves the signatures unproved.

    Raises:
        AuditError: there is no log, or it cannot be read.
    """
    while True:
        with suppress(FileNotFoundError):  # retention removed it in this moment: the next look does not find it
            return _verify(directory, anchor, anchors, Verifier(keys or {}))


def _verify(directory: Path, anchor: Head | None, anchors: Sequence[Head], verifier: Verifier) -> VerifyReport:
    with read.opened(directory) as snapshot:
        oldest = 0
        if anchors:
            with suppress(EvidenceError):
                oldest = files.start_of(snapshot.line(snapshot.start)).before.seq
        for each in (*([] if anchor is None else [anchor]), *(each for each in anchors if each.seq > oldest)):
            verifier.expect(each, "anchor")
        try:
            verifier.expect(chain.parse_head(snapshot.head or b""), "head")
        except EvidenceError:
            how = "missing" if snapshot.head is None else "damaged"
            verifier.note(None, None, "head", f"{HEAD_NAME} is {how}, so a cut end cannot be told", file=HEAD_NAME)
        for stray in snapshot.strays:
            verifier.note(None, None, "foreign", "it is no segment of the log", file=stray)
        following: int | None = None
        for number in snapshot.numbers:
            if number is not None and following is not None and following < number:
                verifier.missing(following, number)
            with snapshot.segment(number) as (log, size):
                name = LOG_NAME if number is None else files.name(number)
                verifier.verify(name, following if number is None else number, read.lines(log, 0, size))
            following = None if number is None else number + 1
        return verifier.report(len(snapshot.sealed))
