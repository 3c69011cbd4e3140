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
from glovebox_audit.events import CallDecided
from glovebox_audit.read import Snapshot
from glovebox_audit.segments import counts, proof

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


def _segments(
    snapshot: Snapshot, of: str, identity: str, wanted: Callable[[chain.Record], bool]
) -> Iterable[dict[str, Any]]:
    name = counts.name_of(of, identity)
    for number in snapshot.sealed if of == "run" else _of_call(snapshot, identity):
        there = counts.Counts()
        with suppress(FileNotFoundError):  # removed in this moment, the oldest first
            found, record, seal = proof.part(snapshot, number, identity, wanted, there)
            leaves = there.leaves()
            if there.root(leaves) != seal.names_root:
                raise EvidenceError(f"segment {number} is not what was sealed; see `glovebox audit verify`")
            line = record.line.removesuffix(b"\n").decode()
            yield {"seal": line, "counts": counts.shown(leaves, name), "records": found["records"]}


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
