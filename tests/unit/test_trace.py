"""Trace context is read strictly: what is no trace parent is nobody's, and what is recorded is plain text."""

import pytest

from glovebox_server.calls import Trace
from glovebox_server.requests import trace_of

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_trace_parent_is_taken_as_it_is() -> None:
    """The control of what follows."""
    assert trace_of(PARENT) == Trace(parent=PARENT)
    state = "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7, 1tenant@sys=a b"
    assert trace_of(PARENT, state) == Trace(parent=PARENT, state=state)


@pytest.mark.parametrize(
    "parent",
    [
        "", PARENT.upper(), PARENT + "\n", f" {PARENT}", f"{PARENT}-00", PARENT[:-1], "ff" + PARENT[2:],
        PARENT.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32), PARENT.replace("00f067aa0ba902b7", "0" * 16),
        PARENT.replace("0", "٠"), "\x1b]0;x", None, 7, [PARENT],
    ],
)  # fmt: skip
def test_what_is_no_trace_parent_is_left_out(parent: object) -> None:
    """With its state, which means nothing then."""
    assert trace_of(parent, "a=b") is None


@pytest.mark.parametrize(
    "state",
    [
        "", ",", "a", "=b", "A=b", "a=b=c", "a=\n", "a=\x1b", "a=é", "a= ", "a=" + "x" * 511, 7, ["a=b"],
    ],
)  # fmt: skip
def test_a_state_that_is_none_leaves_the_parent(state: object) -> None:
    """As the standard has it."""
    assert trace_of(PARENT, state) == Trace(parent=PARENT)
