"""Marks of a patch: the same however its bytes are cut, plain words, few of them; what is no header names nothing."""

from tests.fuzz.harness import bounded, pieces

from glovebox_server.artifacts.diff_form import WorkBudget
from glovebox_server.artifacts.patches import MAX_NAMES, PatchPaths


def _marks(data: bytes, size: int) -> tuple[str, ...]:
    paths = PatchPaths(WorkBudget())
    for piece in pieces(data, size):
        paths.feed(piece)
    return paths.risks()


def check(data: bytes) -> None:
    """First byte: the size of pieces."""
    if not data:
        return
    with bounded():
        whole, cut = _marks(data[1:], 0), _marks(data[1:], data[0])
    assert whole == cut
    assert len(whole) < 60
    assert all(mark.isprintable() and len(mark) < 100 * MAX_NAMES for mark in whole)
    signed = b"".join(b"+" + line + b"\n" for line in data[1:].split(b"\n") if not line.startswith(b"++ "))
    assert not any("it touches" in mark for mark in _marks(signed, 0))
