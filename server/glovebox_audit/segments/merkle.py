"""Merkle trees of Certificate Transparency: roots, and audit paths from one leaf to the root. Pure.

https://www.rfc-editor.org/rfc/rfc6962#section-2.1. Different hash prefixes keep leaves and nodes apart. A second
tree of a segment counts the records of each call and run, to detect one left out. A leaf is a name and a number. A name
is the digest of a call's or a run's id, so a neighbour's leaf, which proves an absence, does not reveal an id. Leaves
are sorted: what would lie between two neighbours is not there.
"""

import hashlib
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

#: A node of a path, in hex.
Node = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class ProofPart(BaseModel):
    """A part of a proof, as a stranger sends it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def leaf_hash(content: bytes) -> bytes:
    """Return the hash of one leaf: a record's line, without its line feed, or a count."""
    return hashlib.sha256(b"\0" + content.removesuffix(b"\n")).digest()


def _node_hash(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\1" + left + right).digest()


class Tree:
    """A tree that keeps only the roots of its whole subtrees: one for each bit of its size."""

    def __init__(self) -> None:
        self.size = 0
        self._roots: list[bytes] = []

    def add(self, leaf: bytes) -> None:
        """Append the leaf with this hash."""
        self._roots.append(leaf)
        self.size += 1
        size = self.size
        while size % 2 == 0:
            right = self._roots.pop()
            self._roots[-1] = _node_hash(self._roots[-1], right)
            size //= 2

    def root(self) -> str:
        """Return the digest of the root over all leaves so far; of none, the hash of nothing."""
        if not self._roots:
            return "sha256:" + hashlib.sha256().hexdigest()
        found = self._roots[-1]
        for left in reversed(self._roots[:-1]):
            found = _node_hash(left, found)
        return "sha256:" + found.hex()


def levels(leaves: Sequence[bytes]) -> list[list[bytes]]:
    """Return all nodes from the leaves to the root: pairs become one, a single one moves up."""
    found = [list(leaves)]
    while len(found[-1]) > 1:
        below = found[-1]
        above = [_node_hash(left, right) for left, right in zip(below[::2], below[1::2], strict=False)]
        found.append(above + below[len(above) * 2 :])
    return found


def path(tree: Sequence[Sequence[bytes]], index: int) -> list[str]:
    """Return the audit path of one leaf of ``levels``, from its neighbour up."""
    way = []
    for level in tree[:-1]:
        neighbour = index ^ 1
        if neighbour < len(level):
            way.append(level[neighbour].hex())
        index //= 2
    return way


def root_of(leaf: bytes, index: int, size: int, way: Sequence[str]) -> str | None:
    """Return the digest of the root an audit path leads to; None if no tree of that size has such a path.

    https://www.rfc-editor.org/rfc/rfc9162#section-2.1.3.2
    """
    if not 0 <= index < size:
        return None
    place, last, found = index, size - 1, leaf
    for each in map(bytes.fromhex, way):
        if last == 0:
            return None
        if place % 2 == 1 or place == last:
            found = _node_hash(each, found)
            while place % 2 == 0 and place != 0:
                place, last = place // 2, last // 2
        else:
            found = _node_hash(found, each)
        place, last = place // 2, last // 2
    return "sha256:" + found.hex() if last == 0 else None


def name_of(kind: str, identity: str) -> str:
    """Return the name of a call (``call``) or a run (``run``)."""
    return hashlib.sha256(f"{kind}:{identity}".encode()).hexdigest()


def _count(name: str, records: int) -> bytes:
    return leaf_hash(f"{name} {records}".encode())


class Contents:
    """The records of one segment so far: their tree, and how many each call and run has."""

    def __init__(self) -> None:
        self.tree = Tree()
        self._found: Counter[tuple[str, str]] = Counter()

    def add(self, line: bytes) -> bytes:
        """Add a line and return its leaf; one that is no record is not counted, and chain verification finds it."""
        leaf = leaf_hash(line)
        self.tree.add(leaf)
        with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
            fields = json.loads(line)
            self.count(fields.get("call_id"), fields["data"])
        return leaf

    def count(self, call_id: str | None, data: Any) -> None:
        """Count a record, whose line is in the tree already."""
        if call_id is not None:
            self._found["call", call_id] += 1
        run = data.get("run")
        if run and isinstance(run, str):
            self._found["run", run] += 1

    def leaves(self) -> list[tuple[str, int]]:
        """Return all leaves, sorted: each a name and its records."""
        return sorted((name_of(*who), records) for who, records in self._found.items())


def root_of_counts(leaves: Iterable[tuple[str, int]]) -> str:
    """Return the digest of the root of the tree over them."""
    tree = Tree()
    for each in leaves:
        tree.add(_count(*each))
    return tree.root()


class CountProof(ProofPart):
    """A count, and its path to the root that a seal names."""

    index: int
    name: str
    path: list[Node]
    records: int


def shown(leaves: Sequence[tuple[str, int]], name: str) -> list[CountProof]:
    """Return the proof of a name's count: its leaf, or the two neighbours of its place."""
    place = bisect_left(leaves, (name, 0))
    there = place < len(leaves) and leaves[place][0] == name
    tree = levels([_count(*each) for each in leaves])
    return [
        CountProof(index=index, name=leaves[index][0], records=leaves[index][1], path=path(tree, index))
        for index in ([place] if there else [place - 1, place])
        if 0 <= index < len(leaves)
    ]


def counted(told: Sequence[CountProof], name: str, size: int, root: str) -> int:
    """Return a name's count, as proved by ``shown`` and a seal.

    Raises:
        ValueError: they do not prove it; the message is the exact reason.
    """
    for each in told:
        if root_of(_count(each.name, each.records), each.index, size, each.path) != root:
            raise ValueError("a count's path does not lead to the root that was signed")
    if len(told) == 1 and told[0].name == name:
        return told[0].records
    before = [each.index for each in told if each.name < name]
    after = [each.index for each in told if each.name > name]
    last, following = (before or [-1])[0], (after or [size])[0]
    if len(before) > 1 or len(after) > 1 or len(before) + len(after) != len(told) or following != last + 1:
        raise ValueError("its counts show neither how many records there are nor that there are none")
    return 0
