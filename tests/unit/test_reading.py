"""Each caller's share of the time in which requests are read, in a clock that jumps."""

import string

import anyio
import pytest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from tests.fixtures.callers import a_token
from tests.fixtures.pools import jumping
from tests.fixtures.steps import counting

from glovebox_server.transport import auth
from glovebox_server.transport.auth import (
    AHEAD_SECONDS,
    ALONE_SECONDS,
    CALL_SECONDS,
    REQUEST_SECONDS,
    SHARE,
    WHOLE,
    RequestTurns,
)
from glovebox_server.transport.stdio import MessageError
from glovebox_server.transport.tokens import Callers

CALLERS = 250  # connections of one token in the attack that was seen; a token alone has up to 900


class Slow:
    """Reading that takes a time: each body so many seconds of the loop."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.spent = 0.0
        self.reading = RequestTurns(lambda: anyio.current_time() + self.spent)

    async def read(self, caller: str) -> None:
        """Read one body of this caller's."""
        async with self.reading.turn(caller):
            self.reading.charge(caller, REQUEST_SECONDS)
            self.spent += self.seconds


@jumping
async def test_one_who_sends_much_is_read_at_its_share() -> None:
    """250 bodies that take 5 ms to read: one after the other, and in all no more than a quarter of the time."""
    # The control: another caller, meanwhile, is read at once.
    slow = Slow(0.005)
    read: list[float] = []

    async def send() -> None:
        await slow.read("token:much")
        read.append(slow.reading._clock())

    async with anyio.create_task_group() as tasks:
        for _ in range(CALLERS):
            tasks.start_soon(send)
        await anyio.sleep(3)
        assert 0 < len(read) < CALLERS
        before = anyio.current_time()
        await slow.read("token:other")
        assert anyio.current_time() == before
    whole = CALLERS * slow.seconds * WHOLE
    assert read[-1] - read[0] >= (whole - AHEAD_SECONDS) / SHARE - 1
    for first, last in zip(read, read[50:], strict=False):
        # Within any stretch: what is spent of the loop is the share of it, and what one may be ahead.
        assert 50 * slow.seconds * WHOLE <= SHARE * (last - first) + AHEAD_SECONDS + 2 * slow.seconds * WHOLE


@jumping
async def test_ordinary_requests_never_wait() -> None:
    """A thousand a second, at the 20 µs that reading one takes."""
    slow = Slow(20e-6)
    for _ in range(5_000):
        before = anyio.current_time()
        await slow.read("token:a")
        assert anyio.current_time() == before
        await anyio.sleep(0.001)


@jumping
async def test_a_flood_of_cheap_requests_gets_a_share_once_another_calls() -> None:
    """Requests as cheap to read as there are: their answers cost the loop too."""
    # The control: the same flood, alone or ten seconds after another's request, never waits.
    slow = Slow(20e-6)
    cost = REQUEST_SECONDS + slow.seconds * WHOLE

    async def flood(seconds: float) -> int:
        sent, until = 0, anyio.current_time() + seconds
        while anyio.current_time() < until:
            await slow.read("token:much")
            sent += 1
            await anyio.sleep(0.001)
        return sent

    assert await flood(1) == pytest.approx(1_000, abs=2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(slow.read, "token:other")
        assert await flood(2) <= (2 * SHARE + AHEAD_SECONDS) / cost + 5
    await anyio.sleep(ALONE_SECONDS)
    assert await flood(1) == pytest.approx(1_000, abs=2)


@jumping
async def test_what_is_malformed_is_paid_for_too() -> None:
    """An error frees nobody from waiting, and the next one is read."""
    slow = Slow(0.1)

    async def refused() -> None:
        async with slow.reading.turn("token:a"):
            slow.spent += slow.seconds
            raise MessageError(-32700, "no")

    before = anyio.current_time()
    for _ in range(3):
        with pytest.raises(MessageError):
            await refused()
    assert anyio.current_time() - before >= 2 * (0.1 * WHOLE - AHEAD_SECONDS) / SHARE - 1


@jumping
async def test_one_that_stops_waiting_gives_its_turn_up() -> None:
    """A client that left, or was told to come later, keeps nobody waiting."""
    slow = Slow(0.1)
    await slow.read("token:a")
    with anyio.move_on_after(0.1) as wait:
        await slow.read("token:a")
    assert wait.cancelled_caught
    with anyio.fail_after(2 * 0.1 * WHOLE / SHARE):
        await slow.read("token:a")


@jumping
async def test_so_many_callers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who came last: subjects of an authorization server are without number. A debt of theirs stays (the control)."""
    monkeypatch.setattr("glovebox_server.transport.auth.MAX_ACCOUNTS", 10)
    slow = Slow(0.1)
    for number in range(30):
        await slow.read(f"oauth:i#{number}")
    assert list(slow.reading._accounts) == [f"oauth:i#{number}" for number in range(20, 30)]
    began = anyio.current_time()
    await slow.read("oauth:i#29")
    assert anyio.current_time() - began > 0.1
    async with slow.reading.turn("oauth:i#waited"):
        for number in range(10):
            await slow.read(f"oauth:i#other-{number}")
        slow.reading.charge("oauth:i#waited", 1)
    assert "oauth:i#waited" not in slow.reading._accounts


class Gate:
    """The gate of a server, in a clock that jumps, before an application that takes 10 ms to answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(auth, "RequestTurns", lambda: RequestTurns(anyio.current_time))
        callers = Callers({name: a_token(name, name[0] * 40) for name in ("much", "other")})
        self.gate = auth.AuthMiddleware(self._answer, hosts=["here"], callers=callers)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.sleep(0.01)
        await Response("done")(scope, receive, send)

    async def call(self, caller: str, path: str = "/mcp") -> int:
        """Make one call; the answer's status."""
        body = b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{}}'
        headers = {"host": "here", "authorization": f"Bearer {caller[0] * 40}", "content-length": str(len(body))}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope: Scope = {"type": "http", "method": "POST", "path": path, "headers": raw}
        status = 0

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)

        await self.gate(scope, receive, send)
        return status


@jumping
async def test_one_call_at_a_time_never_waits_and_many_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside another caller: a hundred one after the other take their own time, 250 at once their share's."""
    gate = Gate(monkeypatch)
    began = anyio.current_time()
    for _ in range(100):
        assert [await gate.call("other"), await gate.call("much")] == [200, 200]
    assert anyio.current_time() - began == pytest.approx(200 * 0.01)
    began = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        for _ in range(CALLERS):
            tasks.start_soon(gate.call, "much")
    whole = CALLERS * CALL_SECONDS / SHARE
    assert whole * 0.95 < anyio.current_time() - began < whole + CALLERS * REQUEST_SECONDS / SHARE


async def test_a_request_takes_the_same_steps_however_many_others_have_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside open requests of 4 other callers and of 26."""
    gate, taken, over = Gate(monkeypatch), set(), anyio.Event()

    async def hold(scope: Scope, receive: Receive, send: Send) -> None:
        if scope[auth.PRINCIPAL_SCOPE_KEY].id != "token:much":
            await over.wait()
        await Response("done")(scope, receive, send)

    gate.gate.inner, others = hold, string.ascii_uppercase
    gate.gate.callers = Callers({name: a_token(name, name[0] * 40) for name in ("much", *others)})
    assert await gate.call("much") == 200
    async with anyio.create_task_group() as tasks:
        for number, other in enumerate(others, 1):
            tasks.start_soon(gate.call, other)
            await anyio.wait_all_tasks_blocked()
            if number in (4, 26):
                with counting() as count:
                    await gate.call("much")
                taken.add(count.total())
        over.set()
    assert len(taken) == 1
    assert not gate.gate._requests
    assert not gate.gate._alike.total()


@jumping
async def test_over_the_older_transport_one_call_after_another_is_a_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is answered before the call is made, so nobody has waited for one. The control is the test before."""
    gate = Gate(monkeypatch)
    await gate.call("other")
    began = anyio.current_time()
    for _ in range(100):
        await gate.call("much", "/messages/")
    assert anyio.current_time() - began > 99 * CALL_SECONDS / SHARE - AHEAD_SECONDS / SHARE
