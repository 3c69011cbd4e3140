"""Rules 4 to 8 of the header of ``_glovebox_guest.wire``, streams and their credit, for both roles."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.fixtures.wire_peers import CREDIT, DATA, END, NOTE, RESET, ROLES, frame, opening, running, side

from _glovebox_guest.wire import MAX_DATA, MAX_OPEN, MAX_STREAM, WINDOW, ProtocolError, Wire

# Rule 4


@pytest.mark.parametrize("role", ["host", "guest"])
def test_streams_open_only_while_a_job_runs(role: str) -> None:
    """Rule 4: neither before the job, from either side, nor by ourselves after the outcome."""
    end = Wire("host" if role == "host" else "guest")
    with pytest.raises(ProtocolError, match="while starting"):
        end.receive(opening(1 if role == "host" else 2))
    with pytest.raises(ValueError, match="while starting"):
        end.open("k")
    host, guest = running()
    host.receive(guest.message("outcome", {}))
    with pytest.raises(ValueError, match="while done"):
        (host if role == "host" else guest).open("k")


def test_guest_streams_are_odd_and_host_streams_even() -> None:
    """Rule 4: 1, 3, 5 … and 2, 4, 6 …, up to MAX_STREAM."""
    host, guest = running()
    assert [guest.open("k")[0] for _ in range(3)] == [1, 3, 5]
    assert [host.open("k")[0] for _ in range(3)] == [2, 4, 6]
    host, guest = running()
    for _ in range(MAX_STREAM // 2 + 1):
        stream, _ = guest.open("k")
        guest.end(stream)
    assert stream == MAX_STREAM
    with pytest.raises(ValueError, match="used up"):
        guest.open("k")
    assert host.state == "running"


@pytest.mark.parametrize(
    ("role", "stream"), [("host", 2), ("host", 65_537), ("host", 2**32 - 1), ("guest", 1), ("guest", 65_536)]
)
def test_a_peer_opens_only_its_own_ids(role: str, stream: int) -> None:
    """Rule 4: of its own parity, up to MAX_STREAM."""
    end, _ = side(role)
    with pytest.raises(ProtocolError, match=f"may not open stream {stream}"):
        end.receive(opening(stream))


@ROLES
def test_ids_only_grow(role: str) -> None:
    """Rule 4: no id twice, none below an earlier one; gaps are fine."""
    end, first = side(role)
    end.receive(opening(first + 4) + frame(END, first + 4))
    for stream in (first, first + 2, first + 4):
        another, _ = side(role)
        another.receive(opening(first + 4) + frame(END, first + 4))
        with pytest.raises(ProtocolError, match="may not open"):
            another.receive(opening(stream))
    assert end.receive(opening(first + 6))


@ROLES
def test_so_many_streams_at_once_and_no_more(role: str) -> None:
    """Rule 4: MAX_OPEN; one that ended makes room."""
    end, first = side(role)
    for n in range(MAX_OPEN):
        end.receive(opening(first + 2 * n))
    with pytest.raises(ValueError, match="are open already"):
        end.open("k")
    end.receive(frame(END, first))
    end.receive(opening(first + 2 * MAX_OPEN))
    with pytest.raises(ProtocolError, match=f"more than {MAX_OPEN}"):
        end.receive(opening(first + 2 * MAX_OPEN + 2))


@ROLES
@pytest.mark.parametrize("kind", [DATA, NOTE, END])
def test_a_one_way_stream_is_one_way(role: str, kind: int) -> None:
    """Rule 4: the side that did not open it may send nothing on it, and we do not either."""
    end, first = side(role)
    stream, _ = end.open("k")
    with pytest.raises(ProtocolError, match="may not send"):
        end.receive(frame(kind, stream, {NOTE: b"{}", DATA: b"x", END: b""}[kind]))
    end, first = side(role)
    end.receive(opening(first))
    assert end.credit(first) == 0
    attempts: list[Callable[[], bytes]] = [
        lambda: end.data(first, b"x"),
        lambda: end.end(first),
        lambda: end.accept(first, {}),
    ]
    for attempt in attempts:
        with pytest.raises(ValueError, match=f"stream {first}"):
            attempt()


# Rule 5


@ROLES
def test_more_than_the_window_is_refused_until_credit_is_given(role: str) -> None:
    """Rule 5: WINDOW bytes and not one more; credit is given once half a window is owed, and allows as much again."""
    end, first = side(role)
    end.receive(opening(first))
    for _ in range(WINDOW // MAX_DATA):
        end.receive(frame(DATA, first, bytes(MAX_DATA)))
    other, _ = side(role)
    other.receive(opening(first))
    with pytest.raises(ProtocolError, match="exceed the window of 0"):
        other.receive(frame(DATA, first, bytes(MAX_DATA)) * (WINDOW // MAX_DATA) + frame(DATA, first, b"x"))
    assert end.consumed(first, WINDOW // 2 - 1) == b""
    assert end.consumed(first, 1) == frame(CREDIT, first, b'{"credit":%d}' % (WINDOW // 2))
    for _ in range(WINDOW // 2 // MAX_DATA):
        end.receive(frame(DATA, first, bytes(MAX_DATA)))
    with pytest.raises(ProtocolError, match="exceed the window of 0"):
        end.receive(frame(DATA, first, b"x"))


@ROLES
def test_credit_is_never_exceeded_and_never_exceeds_the_window(role: str) -> None:
    """Rules 5 and 8: too much is our mistake; nobody makes us send more by giving what was not taken."""
    end, _ = side(role)
    stream, _ = end.open("k")
    with pytest.raises(ValueError, match="exceed the credit"):
        end.data(stream, bytes(WINDOW + 1))
    assert end.credit(stream) == WINDOW
    assert len(end.data(stream, bytes(WINDOW))) == WINDOW + 9 * (WINDOW // MAX_DATA)
    assert end.credit(stream) == 0
    end, _ = side(role)
    stream, _ = end.open("k")
    end.data(stream, bytes(10))
    assert end.receive(frame(CREDIT, stream, {"credit": 10})) == [("credit", stream)]
    with pytest.raises(ProtocolError, match="more credit"):
        end.receive(frame(CREDIT, stream, {"credit": 1}))


@ROLES
@pytest.mark.parametrize("credit", [0, -1, WINDOW + 1, True, 1.0, "1", None, 10**30])
def test_a_senseless_credit_is_refused(role: str, credit: Any) -> None:
    """Rule 5: a peer gives back what it took: 1 to WINDOW bytes, a JSON integer."""
    end, _ = side(role)
    stream, _ = end.open("k")
    end.data(stream, bytes(WINDOW))
    with pytest.raises(ProtocolError, match=r"credit|fields"):
        end.receive(frame(CREDIT, stream, {"credit": credit}))


# Rule 6


@ROLES
@pytest.mark.parametrize("kind", [DATA, NOTE, END])
def test_nothing_follows_an_end(role: str, kind: int) -> None:
    """Rule 6: a direction that has ended stays so, whether the stream lives on (duplex) or not."""
    for duplex in (True, False):
        end, first = side(role)
        end.receive(opening(first, duplex=duplex) + frame(END, first))
        assert end.is_open(first) is duplex
        with pytest.raises(ProtocolError, match=r"not open|may not send"):
            end.receive(frame(kind, first, {NOTE: b"{}", DATA: b"x", END: b""}[kind]))


@ROLES
def test_a_duplex_stream_ends_when_both_directions_have(role: str) -> None:
    """Rule 6: in either order."""
    for ours_first in (True, False):
        end, first = side(role)
        end.receive(opening(first, duplex=True))
        steps: list[Callable[[], Any]] = [lambda: end.end(first), lambda: end.receive(frame(END, first))]  # noqa: B023
        for step in steps if ours_first else reversed(steps):
            assert end.is_open(first)
            step()
        assert not end.is_open(first)


@ROLES
def test_a_reset_ends_both_directions_at_once(role: str) -> None:
    """Rule 6: and says why; what may have crossed ours, of any kind, is ignored."""
    end, first = side(role)
    end.receive(opening(first, duplex=True))
    assert end.receive(frame(RESET, first, {"why": 1})) == [("reset", first, {"why": 1})]
    assert not end.is_open(first)
    with pytest.raises(ProtocolError, match="not open"):
        end.receive(frame(DATA, first, b"x"))
    with pytest.raises(ValueError, match="not open"):
        end.data(first, b"x")
    end, first = side(role)
    end.receive(opening(first, duplex=True))
    assert end.reset(first, {"why": 2}) == frame(RESET, first, b'{"why":2}')
    late = frame(DATA, first, b"x") + frame(NOTE, first, {}) + frame(CREDIT, first, {"credit": 1})
    assert end.receive(late + frame(END, first) + frame(RESET, first, {})) == []


@ROLES
def test_window_and_reset_may_cross_an_end(role: str) -> None:
    """Rule 6: the peer cannot know yet that a stream is over; resetting one that is sends nothing."""
    end, _ = side(role)
    stream, _ = end.open("k")
    end.data(stream, b"x")
    end.end(stream)
    assert end.receive(frame(CREDIT, stream, {"credit": 1}) + frame(RESET, stream, {})) == []
    end, _ = side(role)
    stream, _ = end.open("k")
    assert end.reset(stream)
    assert end.reset(stream) == b""
    assert end.consumed(stream, WINDOW) == b""


@ROLES
@pytest.mark.parametrize(("kind", "body"), [(CREDIT, {"credit": 1}), (RESET, {}), (DATA, b"x"), (END, b""), (NOTE, {})])
@pytest.mark.parametrize("offset", [0, 1])
def test_no_frame_is_for_a_stream_that_never_was(role: str, kind: int, body: Any, offset: int) -> None:
    """Rule 6: the exceptions are for streams that were once open."""
    end, first = side(role)
    with pytest.raises(ProtocolError, match=r"never opened|not open"):
        end.receive(frame(kind, first + 10 + offset, body))


# Rule 7


@ROLES
def test_a_note_answers_an_open_once(role: str) -> None:
    """Rule 7: from the side that accepted, one time; neither side may answer itself."""
    end, _ = side(role)
    stream, _ = end.open("k", duplex=True)
    assert end.receive(frame(NOTE, stream, {"status": 200})) == [("accept", stream, {"status": 200})]
    with pytest.raises(ProtocolError, match="may not send a note"):
        end.receive(frame(NOTE, stream, {}))
    end, first = side(role)
    end.receive(opening(first, duplex=True))
    with pytest.raises(ProtocolError, match="may not send a note"):
        end.receive(frame(NOTE, first, {}))
    stream, _ = end.open("k", duplex=True)
    with pytest.raises(ValueError, match="takes no note"):
        end.accept(stream, {})
    end.accept(first, {})
    with pytest.raises(ValueError, match="takes no note"):
        end.accept(first, {})


# Rule 8


def test_a_broken_wire_stays_broken() -> None:
    """Rule 8: bytes after a broken rule are not believed, whatever they are."""
    host, guest = running()
    _, frames = guest.open("k")
    with pytest.raises(ProtocolError):
        host.receive(b"\xff" * 20)
    with pytest.raises(ProtocolError):
        host.receive(frames)
