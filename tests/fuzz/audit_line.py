"""One line of the audit log, its head and an anchor: the exact bytes that were written, or a refusal."""

from contextlib import suppress

from tests.fuzz.harness import bounded, text

from glovebox_audit import chain
from glovebox_audit.chain import EvidenceError


def check(data: bytes) -> None:
    """The whole input is each of the three in turn."""
    with bounded():
        with suppress(EvidenceError):
            assert chain.parse(data).line == data
        with suppress(EvidenceError):
            assert chain.encode_head(chain.parse_head(data)) == data
        with suppress(ValueError):
            anchor = chain.parse_anchor(text(data))
            assert chain.parse_anchor(f"{anchor.seq}:{anchor.hash}") == anchor
    # What hostile bytes become before they are recorded is recorded as one thing.
    shown = chain.canonical({"name": text(data)})
    assert chain.canonical({"name": chain.recordable(text(data))}) == shown
