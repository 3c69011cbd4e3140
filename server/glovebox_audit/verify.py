"""Verify offline that a log is whole, in bounded memory, and name the lines where it is not.

Found: a changed byte, a removed, added, repeated or moved line, a cut end, a chain rewritten without ``head.json``, and
any other bytes; in a whole chain, a record that does not fit its call, as a second end. Not found without an anchor
kept elsewhere, because the chain has no secret: a log and a ``head.json`` both put back to an earlier state or
rewritten as a whole, and well-made records added by someone who may write the files.
"""

from collections.abc import Sequence
from pathlib import Path

from glovebox_audit import chain, read
from glovebox_audit.chain import EvidenceError, Head
from glovebox_audit.read import Snapshot
from glovebox_audit.segments import files, verified
from glovebox_audit.segments.files import HEAD_NAME, LOG_NAME
from glovebox_audit.segments.verified import VerifiedSegments
from glovebox_audit.verifier.report import VerifyReport
from glovebox_audit.verifier.verifier import Keys, Verifier


def verify(
    directory: Path,
    anchor: Head | None = None,
    *,
    anchors: Sequence[Head] = (),
    keys: Keys | None = None,
    new: bool = False,
) -> VerifyReport:
    """Check the log, or a copy of it, also while servers write to it.

    Args:
        directory: of the log or the copy.
        anchor: a record kept elsewhere, that must be in it.
        anchors: likewise, except those of records before the oldest segment, which retention may have removed.
        keys: one of which must have signed each seal; None leaves the signatures unproved.
        new: read only what follows the last segment found whole, and remember the new end.

    Raises:
        AuditError: there is no log, or it cannot be read.
    """
    while True:
        try:
            report = _verify(directory, anchor, anchors, keys or {}, new=new)
            # What is remembered may be what is wrong.
            if report.ok or not report.known:
                return report
            return _verify(directory, anchor, anchors, keys or {}, new=False)
        except FileNotFoundError:  # retention removed it in this moment: the next look does not find it
            continue


def _verify(directory: Path, anchor: Head | None, anchors: Sequence[Head], keys: Keys, *, new: bool) -> VerifyReport:
    with read.opened(directory) as snapshot:
        verifier = Verifier(keys)
        if anchor is not None:
            verifier.expect(anchor, "anchor")
        oldest = _oldest(snapshot) if anchors else 0
        for each in anchors:
            if each.seq > oldest:
                verifier.expect(each, "anchor")
        try:
            verifier.expect(chain.parse_head(snapshot.head or b""), "head")
        except EvidenceError:
            how = "missing" if snapshot.head is None else "damaged"
            verifier.note(None, None, "head", f"{HEAD_NAME} is {how}, so a cut end cannot be told", file=HEAD_NAME)
        for stray in snapshot.strays:
            verifier.note(None, None, "foreign", "it is no segment of the log", file=stray)
        known = verified.load(directory) if new else None
        if known is not None and verified.fits(known, directory, snapshot.sealed, keys):
            with snapshot.segment(snapshot.sealed[0]) as (log, _):
                verifier.resume(known, files.start_of(files.line_at(log.fileno(), 0)))
        state = _read(verifier, snapshot)
        if known is not None:
            verifier.forgotten(set(known.stamps) - set(snapshot.sealed))
        report = verifier.report(snapshot.sealed)
        if new and report.ok and state is not None:
            verified.save(directory, state)
        return report


def _oldest(snapshot: Snapshot) -> int:
    """Return the number of the last record before the oldest segment; 0 if none was removed."""
    if not snapshot.sealed or snapshot.sealed[0] == 1:
        return 0
    with snapshot.segment(snapshot.sealed[0]) as (log, _):
        return files.start_of(files.line_at(log.fileno(), 0)).before.seq


def _read(verifier: Verifier, snapshot: Snapshot) -> VerifiedSegments | None:
    """Verify every unknown segment; return what is known then of the sealed ones."""
    stamps = verified.stamps(snapshot.directory, snapshot.sealed)
    state: VerifiedSegments | None = None
    expected = snapshot.sealed[0] if snapshot.sealed else 0
    for number in snapshot.sealed:
        if expected < number:
            verifier.missing(expected, number)
        expected = number + 1
        if number <= verifier.last_known:
            continue
        with snapshot.segment(number) as (log, size):
            verifier.begin(files.name(number), number)
            verifier.run(read.lines(log, 0, size))
            verifier.end_sealed(number)
            state = verifier.state(stamps)
    if snapshot.log is not None:
        verifier.begin(LOG_NAME, expected or None)
        verifier.run(read.lines(snapshot.log, 0, snapshot.size))
    verifier.finish()
    return state
