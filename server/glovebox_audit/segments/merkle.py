"""Merkle trees of Certificate Transparency: roots, and audit paths from one leaf to the root. Pure.

https://www.rfc-editor.org/rfc/rfc6962#section-2.1. Different hash prefixes keep leaves and nodes apart.
"""

import hashlib
from collections.abc import Sequence


def leaf_hash(content: bytes) -> bytes:
    """Return the hash of one leaf."""
    return hashlib.sha256(b"\0" + content).digest()


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

    def root(self) -> bytes:
        """Return the root over all leaves so far; of none, the hash of nothing."""
        if not self._roots:
            return hashlib.sha256().digest()
        found = self._roots[-1]
        for left in reversed(self._roots[:-1]):
            found = _node_hash(left, found)
        return found


def levels(leaves: Sequence[bytes]) -> list[list[bytes]]:
    """Return all nodes from the leaves to the root: pairs become one, a single one moves up."""
    found = [list(leaves)]
    while len(found[-1]) > 1:
        below = found[-1]
        above = [_node_hash(left, right) for left, right in zip(below[::2], below[1::2], strict=False)]
        found.append(above + below[len(above) * 2 :])
    return found


def path(tree: Sequence[Sequence[bytes]], index: int) -> list[bytes]:
    """Return the audit path of one leaf of ``levels``, from its neighbour up."""
    way = []
    for level in tree[:-1]:
        neighbour = index ^ 1
        if neighbour < len(level):
            way.append(level[neighbour])
        index //= 2
    return way


def root_of(leaf: bytes, index: int, size: int, way: Sequence[bytes]) -> bytes | None:
    """Return the root an audit path leads to; None if no tree of that size has such a path.

    https://www.rfc-editor.org/rfc/rfc9162#section-2.1.3.2
    """
    if not 0 <= index < size:
        return None
    place, last, found = index, size - 1, leaf
    for each in way:
        if last == 0:
            return None
        if place % 2 == 1 or place == last:
            found = _node_hash(each, found)
            while place % 2 == 0 and place != 0:
                place, last = place // 2, last // 2
        else:
            found = _node_hash(found, each)
        place, last = place // 2, last // 2
    return found if last == 0 else None
