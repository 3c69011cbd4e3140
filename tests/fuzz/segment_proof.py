"""Inclusion proofs: proved only as they were made, byte for byte; else EvidenceError with a reason."""

import json

from tests.fixtures.segments import PUBLIC, SIGNER
from tests.fuzz.harness import SEEDS, bounded

from glovebox_audit import chain
from glovebox_audit.chain import EvidenceError
from glovebox_audit.segments.proof import Proved, verify

PROOF = (SEEDS / "segment_proof" / "made").read_bytes()[1:]


def check(data: bytes) -> None:
    """First byte: whether the rest is a proof, or the statement of its seal, which our own key signs."""
    if not data:
        return
    content = data[1:]
    if data[0] & 1:
        fields = json.loads(PROOF)
        fields["segments"][0]["seal"] = SIGNER.sign(content)
        content = chain.canonical(fields) + b"\n"
    with bounded():
        try:
            proved: Proved | None = verify(content, PUBLIC, SIGNER.key_id)
        except EvidenceError as refused:
            said, proved = str(refused), None
    if proved is None:
        assert 0 < len(said) < 3000
        assert said.isprintable()
        return
    assert proved.key_id == SIGNER.key_id
    if data[0] & 1:
        assert proved.seals[0].payload() == data[1:]
    else:
        assert content == PROOF
