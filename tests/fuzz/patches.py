"""Marks of a patch: plain words, few of them; what is no header names nothing. Applied, it makes what it says."""

from contextlib import suppress

from tests.fuzz.harness import bounded

from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server.artifacts.diff_form import WorkBudget
from glovebox_server.artifacts.names import MAX_NAMES, patch_risks
from glovebox_server.promotion.plan import made

OLD = {"bytes": b"\0\1\n", "gone": b"gone", "run.sh": b"same\n", "text file": b"a\nb\n"}
"""What the seed ``ours`` was made from."""


def check(data: bytes) -> None:
    """Any bytes."""
    with bounded():
        whole = patch_risks(data, WorkBudget())
    assert len(whole) < 60
    assert all(mark.isprintable() and len(mark) < 100 * MAX_NAMES for mark in whole)
    signed = b"".join(b"+" + line + b"\n" for line in data.split(b"\n") if not line.startswith(b"++ "))
    assert not any("it touches" in mark for mark in patch_risks(signed, WorkBudget()))
    with suppress(RefusedError), bounded():
        assert all(".git" not in each.name.split("/") for each in made(data, OLD.get))
