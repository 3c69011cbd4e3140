"""Count the records of each call and run of a segment in a second tree, to detect one left out.

A leaf is a name and a number. A name is the digest of a call's or a run's id, so a neighbour's leaf, which proves an
absence, does not reveal an id. Leaves are sorted: what would lie between two neighbours is not there.
"""

import hashlib
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from glovebox_audit.segments import merkle


def name_of(kind: str, identity: str) -> str:
    """Return the name of a call (``call``) or a run (``run``)."""
    return hashlib.sha256(f"{kind}:{identity}".encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """One leaf."""

    name: str
    records: int

    @property
    def leaf(self) -> bytes:
        """Return its hash."""
        return merkle.leaf_hash(f"{self.name} {self.records}".encode())


class Counts:
    """A counter of the records of one segment."""

    def __init__(self) -> None:
        self._found: Counter[tuple[str, str]] = Counter()

    def line(self, line: bytes) -> None:
        """Count a record by its line; skip any other line, which chain verification finds."""
        try:
            fields = json.loads(line)
            self.record(fields.get("call_id"), fields["data"])
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return

    def record(self, call_id: str | None, data: Any) -> None:
        """Count a record."""
        if call_id is not None:
            self._found["call", call_id] += 1
        run = data.get("run")
        if run and isinstance(run, str):
            self._found["run", run] += 1

    def leaves(self) -> list[Count]:
        """Return all leaves, sorted."""
        named = ((name_of(*who), records) for who, records in self._found.items())
        return [Count(name=name, records=records) for name, records in sorted(named)]

    def root(self, leaves: Iterable[Count] | None = None) -> str:
        """Return the digest of the root of the tree over them."""
        tree = merkle.Tree()
        for each in self.leaves() if leaves is None else leaves:
            tree.add(each.leaf)
        return "sha256:" + tree.root().hex()


def shown(leaves: Sequence[Count], name: str) -> list[dict[str, Any]]:
    """Return the proof of a name's count: its leaf, or the two neighbours of its place."""
    place = bisect_left([each.name for each in leaves], name)
    there = place < len(leaves) and leaves[place].name == name
    tree = merkle.levels([each.leaf for each in leaves])
    return [
        {
            "index": index,
            "name": leaves[index].name,
            "records": leaves[index].records,
            "path": [node.hex() for node in merkle.path(tree, index)],
        }
        for index in ([place] if there else [place - 1, place])
        if 0 <= index < len(leaves)
    ]


def counted(told: Sequence[Any], name: str, size: int, root: str) -> int:
    """Return a name's count, as proved by ``shown`` and a seal.

    Raises:
        ValueError: they do not prove it; the message is the exact reason.
    """
    found = [_count(each, size, root) for each in told]
    if len(found) == 1 and found[0][1].name == name:
        return found[0][1].records
    before = [index for index, count in found if count.name < name]
    after = [index for index, count in found if count.name > name]
    last, following = (before or [-1])[0], (after or [size])[0]
    if len(before) > 1 or len(after) > 1 or len(before) + len(after) != len(found) or following != last + 1:
        raise ValueError("its counts show neither how many records there are nor that there are none")
    return 0


def _count(told: Any, size: int, root: str) -> tuple[int, Count]:
    try:
        count, index = Count(name=told["name"], records=told["records"]), told["index"]
        way = [bytes.fromhex(node) for node in told["path"]]
        shaped = [type(each) for each in (count.name, count.records, index)] == [str, int, int]
        shaped = shaped and told.keys() == {"index", "name", "records", "path"}
    except (AttributeError, TypeError, LookupError, ValueError):
        shaped = False
    if not shaped:
        raise ValueError("a count does not have its fields")
    leads = merkle.root_of(count.leaf, index, size, way)
    if leads is None or "sha256:" + leads.hex() != root:
        raise ValueError("a count's path does not lead to the root that was signed")
    return index, count
