"""Every byte of an inclusion proof counts, and no bytes crash its reader."""

import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given
from tests.fixtures import segments
from tests.fixtures.draws import draws

from glovebox_audit.bundle import evidence
from glovebox_audit.bundle.evidence import prove
from glovebox_audit.chain import EvidenceError
from glovebox_audit.segments import merkle


def _made() -> bytes:
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "audit"
        segments.fill(directory, 8, size=4000)
        return prove(directory, "call", "c_1", lambda: ({}, {}))


PROOF = _made()


def test_the_untouched_proof_holds() -> None:
    """Control for everything below."""
    assert len(evidence.read(PROOF, segments.KEYS).records) == 2


@draws(500)
@given(st.integers(0, len(PROOF) - 1), st.integers(1, 255))
def test_any_changed_byte_is_found(place: int, change: int) -> None:
    """In the records, the paths, the seal, and between them; the maker's version is no part of the proof."""
    assume(not 0 <= place - PROOF.rindex(evidence.VERSION.encode()) < len(evidence.VERSION))
    content = PROOF[:place] + bytes([PROOF[place] ^ change]) + PROOF[place + 1 :]
    with pytest.raises(EvidenceError):
        evidence.read(content, segments.KEYS)


@draws(200)
@given(st.integers(0, len(PROOF)), st.binary(max_size=40), st.integers(0, 40))
def test_any_other_bytes_are_found(place: int, content: bytes, gone: int) -> None:
    """Put in, taken away, or both."""
    other = PROOF[:place] + content + PROOF[place + gone :]
    if other != PROOF:
        with pytest.raises(EvidenceError):
            evidence.read(other, segments.KEYS)


@draws(200)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_no_proof(content: bytes) -> None:
    """The reader has one way to refuse."""
    with pytest.raises(EvidenceError):
        evidence.read(content, segments.KEYS)


@draws(200)
@given(st.lists(st.binary(max_size=4), min_size=1, max_size=70), st.data())
def test_a_tree_that_grows_is_the_tree_of_its_leaves(contents: list[bytes], data: st.DataObject) -> None:
    """Leaf by leaf or at once: one root; each path leads to it, and with another leaf to another one."""
    leaves = [merkle.leaf_hash(content) for content in contents]
    tree = merkle.Tree()
    for leaf in leaves:
        tree.add(leaf)
    levels = merkle.levels(leaves)
    assert [f"sha256:{each.hex()}" for each in levels[-1]] == [tree.root()]
    index = data.draw(st.integers(0, len(leaves) - 1))
    way = merkle.path(levels, index)
    assert merkle.root_of(leaves[index], index, len(leaves), way) == tree.root()
    assert merkle.root_of(merkle.leaf_hash(b"another"), index, len(leaves), way) != tree.root()
