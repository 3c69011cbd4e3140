"""Receipts: proved only as they were signed, byte for byte; else EvidenceError with a reason."""

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.fuzz.harness import SEEDS, bounded

from glovebox_audit import chain
from glovebox_audit.chain import EvidenceError
from glovebox_audit.receipts import dsse, statement
from glovebox_audit.receipts.statement import VerifiedReceipt, verify

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
SIGNED = (SEEDS / "receipt" / "signed").read_bytes()[1:]


def check(data: bytes) -> None:
    """First byte: whether the rest is an envelope, or a payload that our own key signs."""
    if not data:
        return
    content = data[1:]
    if data[0] & 1:
        content = chain.canonical(dsse.EnvelopeSigner(KEY).sign(content))
    with bounded():
        try:
            proved: VerifiedReceipt | None = verify(content, KEY.public_key())
        except EvidenceError as refused:
            said, proved = str(refused), None
    if proved is None:
        assert 0 < len(said) < 3000
        assert said.isprintable()
        return
    assert proved.key_id == dsse.key_id(KEY.public_key())
    if data[0] & 1:
        assert statement.parse(data[1:]) == proved.statement
    else:
        assert content.removesuffix(b"\n") == SIGNED.removesuffix(b"\n")
