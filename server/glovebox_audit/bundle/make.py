"""Make a bundle from a log: the records of one call or one run, and proof that there are no more."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from glovebox_audit import chain
from glovebox_audit import read as reading
from glovebox_audit.bundle import archive, evidence
from glovebox_audit.bundle.evidence import is_of
from glovebox_audit.chain import EvidenceError
from glovebox_audit.read import Snapshot
from glovebox_audit.segments import counts, proof
from glovebox_audit.segments.proof import NotSealedError

Texts = Callable[[], tuple[Mapping[str, Any], Mapping[str, Any]]]
"""Profiles and policies in effect now, by digest."""


def make(directory: Path, of: str, identity: str, texts: Texts) -> bytes | None:
    """Return the bundle of a ``call`` or ``run``; None if the log has no record of it.

    Raises:
        NotSealedError: some of its records are in the current segment.
        EvidenceError: a segment is not what was sealed, or its seal counts no records.
        AuditError: the log cannot be read.
    """
    wanted = partial(is_of, of, identity)
    with reading.opened(directory) as snapshot:
        if snapshot.log is not None and any(
            line.record is not None and wanted(line.record)
            for line in reading.lines(snapshot.log, 0, snapshot.size)
            if identity.encode() in line.raw
        ):
            raise NotSealedError
        segments = list(_segments(snapshot, of, identity, wanted))
    holding = [place for place, each in enumerate(segments) if each["records"]]
    if not holding:
        return None
    if of == "call":  # it begins and ends there
        segments = segments[holding[0] : holding[-1] + 1]
    lines = (each["record"].encode() + b"\n" for part in segments for each in part["records"])
    profiles, policies = evidence.named(map(chain.parse, lines))
    now = texts()
    told = chain.canonical(
        {
            "type": evidence.TYPE,
            "version": evidence.VERSION,
            "of": of,
            "id": identity,
            "segments": segments,
            "profiles": {digest: now[0].get(digest) for digest in profiles},
            "policies": {digest: now[1].get(digest) for digest in policies},
        }
    )
    content = told + b"\n"
    return archive.written(content, archive.parts(evidence.read(content, {})))


def _segments(
    snapshot: Snapshot, of: str, identity: str, wanted: Callable[[chain.Record], bool]
) -> Iterable[dict[str, Any]]:
    name = counts.name_of(of, identity)
    for number in snapshot.sealed:
        there = counts.Counts()
        with suppress(FileNotFoundError):  # removed in this moment, the oldest first
            found, record, seal = proof.part(snapshot, number, identity, wanted, there)
            leaves = there.leaves()
            if seal.names_root is None:
                if found["records"]:
                    reason = "was sealed by an earlier Glovebox, which did not count records"
                    raise EvidenceError(f"segment {number} {reason}: nothing shows that there are no others")
                continue
            if there.root(leaves) != seal.names_root:
                raise EvidenceError(f"segment {number} is not what was sealed; see `glovebox audit verify --all`")
            line = record.line.removesuffix(b"\n").decode()
            yield {"seal": line, "counts": counts.shown(leaves, name), "records": found["records"]}
