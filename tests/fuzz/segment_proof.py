"""Inclusion proofs: proved only as they were made, byte for byte; else EvidenceError with a reason."""

from tests.fixtures.segments import KEYS, SIGNER, sealed_by
from tests.fuzz.harness import SEEDS, bounded

from glovebox_audit.bundle.evidence import Evidence, read
from glovebox_audit.chain import EvidenceError

PROOF = (SEEDS / "segment_proof" / "made").read_bytes()[1:]


def check(data: bytes) -> None:
    """First byte: whether the rest is a proof, or the statement of its seal, which our own key signs."""
    if not data:
        return
    content = data[1:]
    if data[0] & 1:
        content = sealed_by(PROOF, SIGNER.sign(content))
    with bounded():
        try:
            proved: Evidence | None = read(content, KEYS)
        except EvidenceError as refused:
            said, proved = str(refused), None
    if proved is None:
        assert 0 < len(said) < 3000
        assert said.isprintable()
        return
    assert proved.keys == (SIGNER.key_id,)
    if data[0] & 1:
        assert proved.seals[0].payload() == data[1:]
    else:
        assert content == PROOF
