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
from glovebox_audit.chain import EvidenceError, Record
from glovebox_audit.events import CallDecided
from glovebox_audit.read import Snapshot
from glovebox_audit.segments import merkle
from glovebox_audit.segments.rotation import Seal, leaf, signed

Texts = Callable[[], tuple[Mapping[str, Any], Mapping[str, Any]]]
"""Profiles and policies in effect now, by digest."""


def make(directory: Path, of: str, identity: str, texts: Texts) -> bytes | None:
    """Return the bundle of a ``call`` or ``run``; None if the log has no record of it. Raises like ``prove``."""
    content = prove(directory, of, identity, texts)
    return None if content is None else archive.written(content, archive.parts(evidence.read(content, {})))


def prove(directory: Path, of: str, identity: str, texts: Texts) -> bytes | None:
    """Return the evidence of a ``call`` or ``run``, as ``evidence.read`` takes it; None if the log has no record of it.

    Raises:
        EvidenceError: a segment is not what was sealed, or its seal counts no records; of kind ``unsealed`` if some of
            its records are in the current segment.
        AuditError: the log cannot be read.
    """
    wanted = partial(is_of, of, identity)
    with reading.opened(directory) as snapshot:
        if snapshot.log is not None and any(
            line.record is not None and wanted(line.record)
            for line in reading.lines(snapshot.log, 0, snapshot.size)
            if identity.encode() in line.raw
        ):
            raise EvidenceError("its records go on being written: try again once the run is over", kind="unsealed")
        segments = list(_segments(snapshot, of, identity, wanted))
    if not any(each["records"] for each in segments):
        return None
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
    return told + b"\n"


def _segments(snapshot: Snapshot, of: str, identity: str, wanted: Callable[[Record], bool]) -> Iterable[dict[str, Any]]:
    for number in snapshot.sealed if of == "run" else _of_call(snapshot, identity):
        with suppress(FileNotFoundError):  # removed in this moment, the oldest first
            yield _segment(snapshot, number, of, identity, wanted)


def _segment(
    snapshot: Snapshot, number: int, of: str, identity: str, wanted: Callable[[Record], bool]
) -> dict[str, Any]:
    """Return a segment's part of the evidence: its seal, the counts, and the wanted records with their paths."""
    counts, leaves, records = merkle.Counts(), list[bytes](), list[tuple[int, str]]()
    last, text = b"", identity.encode()
    with snapshot.segment(number) as (log, size):
        for _, line, free in reading.raw_lines(log, 0, size):
            if free and last:
                counts.line(last)
                if text in last and (record := reading.parsed(last)[0]) is not None and wanted(record):
                    records.append((len(leaves), last.removesuffix(b"\n").decode()))
                leaves.append(leaf(last))
            last = line if free else last
    try:
        seal = signed(chain.parse(last).data, Seal, {})
    except EvidenceError as problem:
        raise EvidenceError(f"segment {number} has no seal: {problem}") from None
    tree, counted = merkle.levels(leaves), counts.leaves()
    if ([seal.root], seal.names_root) != (["sha256:" + each.hex() for each in tree[-1]], counts.root(counted)):
        raise EvidenceError(f"segment {number} is not what was sealed; see `glovebox audit verify`")
    return {
        "seal": last.removesuffix(b"\n").decode(),
        "counts": [each.model_dump() for each in merkle.shown(counted, merkle.name_of(of, identity))],
        "records": [{"index": index, "path": merkle.path(tree, index), "record": record} for index, record in records],
    }


def _of_call(snapshot: Snapshot, call_id: str) -> Iterable[int]:
    """Return the segments from a call's first record to its last."""
    holding: list[int] = []
    for number in reversed(snapshot.sealed):
        try:
            with snapshot.segment(number) as (log, size):
                kinds = {record.kind for record in reading.records_in(log, size, call_id)}
        except FileNotFoundError:  # removed in this moment, the oldest first
            break
        holding += [number] if kinds else []
        if CallDecided.kind in kinds:
            break
    return range(holding[-1], holding[0] + 1) if holding else ()
