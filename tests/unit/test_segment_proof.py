"""Inclusion proofs: one call's records were in the log, shown without anybody else's."""

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.fixtures import segments
from tests.fixtures.audit_logs import decided, finished

from glovebox_audit import chain, read
from glovebox_audit.bundle import evidence
from glovebox_audit.bundle.evidence import prove
from glovebox_audit.chain import EvidenceError, draft
from glovebox_audit.file import LogFile
from glovebox_audit.receipts import dsse


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A log of several sealed segments, and a call that spans two of them."""
    place = tmp_path / "audit"
    file = LogFile(place, "s_1", segments.rotation())
    file.commit([draft(decided("c_long", principal="token:ours"))])
    segments.fill(place, 12)
    file.commit([draft(finished("c_long"))])
    segments.fill(place, 12, first=20)
    file.close()
    return place


def made(directory: Path, call_id: str) -> bytes:
    """The proof of a call."""
    return prove(directory, "call", call_id, lambda: ({}, {}))


def test_a_call_is_proved_by_the_proof_and_the_key_alone(directory: Path) -> None:
    """Its records, byte for byte, and of others nothing but hashes; also where it lies in two segments."""
    content = made(directory, "c_long")
    found = evidence.read(content, segments.KEYS)
    assert [record.line for record in found.records] == [each.line for each in read.records_of(directory, "c_long")]
    numbers = [seal.segment for seal in found.seals]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    assert len(numbers) > 1
    assert b"c_1" not in content
    assert b"local:0" not in content
    assert b"token:ours" in content


def test_every_call_of_a_sealed_segment_can_be_proved(directory: Path) -> None:
    """Whatever its place in the tree; one that is not there has no proof, and by another key nothing is proved."""
    for number in range(8):
        assert len(evidence.read(made(directory, f"c_{number}"), segments.KEYS).records) == 2
    with pytest.raises(EvidenceError, match="no record of call c_none"):
        made(directory, "c_none")
    other = Ed25519PrivateKey.from_private_bytes(b"\1" * 32).public_key()
    with pytest.raises(EvidenceError, match="seal 1: it was signed with another key"):
        evidence.read(made(directory, "c_1"), {dsse.key_id(other): other})


def test_what_is_not_sealed_yet_cannot_be_proved(directory: Path) -> None:
    """Nobody has signed it; once it is sealed it can (the control)."""
    segments.fill(directory, 1, first=99, size=10**9)
    with pytest.raises(EvidenceError, match="still being written"):
        made(directory, "c_99")
    file = LogFile(directory, "s_2", segments.rotation(10**9))
    assert file.seal() is not None
    file.close()
    assert evidence.read(made(directory, "c_99"), segments.KEYS).id == "c_99"


def test_a_segment_that_was_changed_gives_no_proof(directory: Path) -> None:
    """The root is not the one that was signed; the other segments do (the control)."""
    path = directory / "segments" / "000001.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[1].replace(b"run_python", b"run_pythom"), *lines[2:]]))
    with pytest.raises(EvidenceError, match="segment 1 is not what was sealed"):
        made(directory, "c_long")
    assert made(directory, "c_20")


def changed(content: bytes, change: Any) -> bytes:
    """A proof in canonical form, with one thing in it that is not so."""
    fields = json.loads(content)
    change(fields)
    return chain.canonical(fields) + b"\n"


def record(fields: Any, place: int = 0) -> Any:
    """One of the records in a proof."""
    return fields["segments"][0]["records"][place]


def swap(fields: Any) -> None:
    """Put the records in another order."""
    fields["segments"][0]["records"].reverse()


LIES: dict[str, tuple[Any, str]] = {
    "another call": (lambda x: x.update(id="c_2"), "record 1 of segment 1: it is another call's"),
    "another place": (lambda x: record(x).update(index=record(x)["index"] + 1), "record 1 of segment 1: its path does"),
    "a place beyond": (lambda x: record(x).update(index=1000), "record 1 of segment 1: its path does not lead"),
    "a negative place": (lambda x: record(x).update(index=-1), "record 1 of segment 1: its path does not lead"),
    "a shorter path": (lambda x: record(x)["path"].pop(), "record 1 of segment 1: its path does not lead"),
    "a longer path": (lambda x: record(x)["path"].append("00" * 32), "record 1 of segment 1: its path does not lead"),
    "a short node": (lambda x: record(x)["path"].__setitem__(0, "00"), "its fields: segments.0.records.0.path.0"),
    "a node in capitals": (
        lambda x: record(x)["path"].__setitem__(0, record(x)["path"][0].upper()),
        "its fields: segments.0.records.0.path.0",
    ),
    "another record": (
        lambda x: record(x, 1).update(record=record(x, 1)["record"].replace("12.5", "99.5")),
        "record 2 of segment 1: its path does not lead",
    ),
    "no record": (lambda x: x["segments"][0].update(records=[]), "segment 1 has 2 of its records, and the bundle 0"),
    "no segment": (lambda x: x.update(segments=[]), "it has no record of call c_0"),
    "a key more": (lambda x: x.update(more=1), "does not have its fields"),
    "a wrong index": (lambda x: record(x).update(index=True), "its fields: segments.0.records.0.index"),
    "a record twice": (lambda x: x["segments"][0]["records"].append(record(x)), "of its records, and the bundle 3"),
    "another order": (swap, "not in the order of the log"),
    "a segment twice": (lambda x: x["segments"].append(x["segments"][0]), "segment 1 does not follow the one before"),
    "no seal": (lambda x: x["segments"][0].update(seal=None), "its fields: segments.0.seal"),
    "another type": (lambda x: x.update(type="x"), "does not have its fields"),
    "a newer type": (lambda x: x.update(type=evidence.TYPE[:-1] + "3"), "made by a newer Glovebox"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LIES)
def test_a_proof_that_lies_is_refused_with_the_place(directory: Path, name: str) -> None:
    """Each with its reason; the proof as it was holds (the control)."""
    content = made(directory, "c_0")
    assert evidence.read(content, segments.KEYS)
    change, reason = LIES[name]
    with pytest.raises(EvidenceError) as caught:
        evidence.read(changed(content, change), segments.KEYS)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("call/v1", "seal 1: its statement is not https://glovebox"), ("segment/v3", "seal 1: made by a newer Glovebox")],
)
def test_a_receipt_is_no_seal(directory: Path, kind: str, reason: str) -> None:
    """What the key signed as something else proves no segment."""
    envelope = segments.SIGNER.sign(chain.canonical({"predicateType": f"https://glovebox.dev/attestation/{kind}"}))
    with pytest.raises(EvidenceError, match=reason):
        evidence.read(segments.sealed_by(made(directory, "c_1"), envelope), segments.KEYS)
