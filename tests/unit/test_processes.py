"""Where requests go among several server processes, and when a process is started again; nothing here is started."""

import itertools
import os
import socket
from collections.abc import Iterator

import pytest

from glovebox_server.transport import processes
from glovebox_server.transport.processes import Seat, Seats, usual


@pytest.fixture
def seats() -> Iterator[Seats]:
    """What three processes share, of which the last does not serve."""
    found = Seats(3, socket.socket())
    found.up[0] = found.up[1] = True
    yield found
    for each in (found.listener, *itertools.chain.from_iterable(found.inboxes)):
        each.close()


@pytest.mark.parametrize(("processors", "expected"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 4), (64, 4)])
def test_there_is_a_process_for_two_processors(processors: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least one, at most four."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    assert usual() == expected


def test_new_connections_go_where_fewest_are(seats: Seats) -> None:
    """What was given and not taken yet counts, too; equals get them by turns, who does not serve gets none."""
    first = Seat(number=0, seats=seats)

    def goes() -> int:
        return first.owner_of(b"GET /health HTTP/1.1", new=True)

    seats.load[0] = 1  # the one that is looked at
    assert {goes(), goes(), goes()} == {0, 1}
    seats.load[0] = 3
    assert [goes() for _ in range(4)] == [1] * 4
    seats.handed[0][1] = 4
    seats.handed[1][1] = 3
    assert [goes() for _ in range(4)] == [0] * 4
    seats.taken[1] = 6
    assert [goes() for _ in range(4)] == [1] * 4
    seats.up[1] = False
    assert [goes() for _ in range(4)] == [0] * 4
    assert first.owner_of(b"GET /health HTTP/1.1", new=False) == 0


@pytest.mark.parametrize(("number", "owner"), [("00", 0), ("01", 1), ("02", 0), ("03", 0), ("ff", 0), ("0A", 0)])
def test_an_id_names_a_process_that_serves(number: str, owner: int, seats: Seats) -> None:
    """Of any other, a request stays where it came; and what only looks like an id decides nothing."""
    seat, session = Seat(number=0, seats=seats), number + "1" * 30
    heads = [f"POST /mcp HTTP/1.1\r\nmcp-session-id: {session}", f"POST /messages?x=1&session_id={session} HTTP/1.1"]
    for head in heads:
        assert seat.owner_of(head.encode(), new=False) == owner
    other = f"GET /sse?session_id={session} HTTP/1.1\r\nReferer: /messages/?session_id={session}"
    longer = (
        f"POST /messages/?session_id={session}1 HTTP/1.1\r\nX-Mcp-Session-Id: {session}\r\nMcp-Session-Id: {session}1"
    )
    deeper = f"POST /x?y=/messages/?session_id={session} HTTP/1.1"  # found, it would take time by the head's square
    for head in (other, longer, deeper):
        assert seat.owner_of(head.encode(), new=False) == 0


def test_a_process_is_started_again_later_each_time_unless_it_lasted(
    seats: Seats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a tenth of a second to five; the parent's own end is none of them."""
    now = 1000.0
    ended: list[tuple[int, int]] = []
    monkeypatch.setattr(processes, "monotonic", lambda: now)
    monkeypatch.setattr(os, "fork", itertools.count(100).__next__)
    monkeypatch.setattr(os, "waitpid", lambda *_: ended.pop() if ended else (0, 0))
    parent = processes._Parent(seats)
    parent.start()
    assert parent.living == {100: 0}  # alone: what keeps it from starting would keep all
    parent.announced = True
    parent.start()
    assert parent.living == {100: 0, 101: 1, 102: 2}
    assert parent.patience() == 3600
    pauses = []
    for pid, lasted in [(101, 0), *zip(range(103, 110), (0, 1, 0, 0, 0, 0, 61), strict=True)]:
        now += lasted
        seats.load[1] = 7
        ended.append((pid, 9))
        parent.reap()
        assert (seats.up[1], seats.load[1]) == (0, 0)
        pauses.append(round(parent.patience(), 1))
        parent.start()
        assert len(parent.living) == 2
        now += parent.patience() + 0.001
        parent.start()
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 0.1]
    with monkeypatch.context() as full:
        full.setattr(os, "fork", lambda: os.kill(0x7FFFFFFF, 0))  # an OSError of the system's
        ended.append((110, 0))
        parent.reap()
        now += parent.patience() + 0.001
        assert parent.start() is None
        assert round(parent.patience(), 1) == 0.4
        with pytest.raises(OSError, match="No such process"):
            processes._Parent(seats).start()
    now += parent.patience() + 0.001
    parent.start()
    parent.ending = True
    ended.extend([(100, 0), (102, 3 << 8)])
    parent.reap()
    assert parent.start() is None
    assert (list(parent.living.values()), parent.code) == ([1], 3)
