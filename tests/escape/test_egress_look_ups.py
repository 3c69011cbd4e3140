"""E16: name servers that do not answer take a bounded number of threads, whatever becomes of the calls."""

import socket
import subprocess  # noqa: TID251 - a process of its own has to end
import sys
import threading
from collections.abc import Iterator
from functools import partial
from ipaddress import ip_address

import anyio
import anyio.to_thread
import pytest

from glovebox_profiles.egress.targets import Address
from glovebox_server.egress import dial
from glovebox_server.egress.dial import LOOK_UPS, LOOK_UPS_OF_ONE, LookUps, resolve
from glovebox_server.egress.events import PeerError

FOUND = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.1.1", 0))]
REFUSED = r"^The name a\.example was not looked up: too many look-ups still wait"


class Silent:
    """The C library's resolver, which answers names that begin with ``a`` when the test says so."""

    def __init__(self) -> None:
        self.answer = threading.Event()
        self.waiting = 0
        self._guard = threading.Lock()

    def getaddrinfo(self, host: str, *_: object, **__: object) -> object:
        """Hang, or answer at once."""
        if host.startswith("a"):
            with self._guard:
                self.waiting += 1
            self.answer.wait(60)
            with self._guard:
                self.waiting -= 1
        return FOUND


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Silent]:
    """No name server answers; whoever waits for a place gives up soon."""
    found = Silent()
    monkeypatch.setattr(socket, "getaddrinfo", found.getaddrinfo)
    monkeypatch.setattr(dial, "_PLACE_SECONDS", 0.05)
    yield found
    found.answer.set()


async def cancelled_calls(calls: int, resolver: dial.Resolver) -> None:
    """As many calls as this, each with the eight look-ups that it may have at one time, cancelled while they hang."""

    async def look_up() -> None:
        try:
            await resolve("a.example", resolver, 10)
        except PeerError:
            return

    for _ in range(calls):
        with anyio.move_on_after(0.02):
            async with anyio.create_task_group() as tasks:
                for _ in range(8):
                    tasks.start_soon(look_up)


async def until(silent: Silent, waiting: int) -> None:
    """Wait until so many threads hang, and no more."""
    with anyio.fail_after(10):
        while silent.waiting != waiting:  # noqa: ASYNC110 - threads are waited for
            await anyio.sleep(0.01)


async def test_cancelled_calls_of_one_principal_hold_its_share_and_no_more(silent: Silent) -> None:
    """Twenty calls with eight look-ups each leave 16 threads and a clear sentence; another principal is answered."""
    look_ups = LookUps()
    alice = partial(look_ups.addresses, principal="token:alice")
    await cancelled_calls(20, alice)
    await until(silent, LOOK_UPS_OF_ONE)
    assert LOOK_UPS_OF_ONE == 16
    with pytest.raises(PeerError, match=REFUSED):
        await resolve("a.example", alice, 10)
    assert await look_ups.addresses("b.example", "token:bob") == (ip_address("93.184.1.1"),)
    silent.answer.set()
    await until(silent, 0)
    with anyio.fail_after(10):
        while not await _answered(alice):  # noqa: ASYNC110 - a thread is waited for
            await anyio.sleep(0.01)


async def _answered(resolver: dial.Resolver) -> bool:
    """Whether there is a place again: a thread gives it back a moment after its answer."""
    try:
        return await resolver("b.example") == (ip_address("93.184.1.1"),)
    except PeerError:
        return False


async def test_all_principals_together_hold_no_more_than_the_server_bears(silent: Silent) -> None:
    """Ten principals that each would take their share: 64 threads in all, then everybody gets the sentence."""
    look_ups = LookUps()
    for number in range(10):
        await cancelled_calls(3, partial(look_ups.addresses, principal=f"token:{number}"))
    await until(silent, LOOK_UPS)
    assert LOOK_UPS == 64
    with pytest.raises(PeerError, match=REFUSED):
        await resolve("a.example", partial(look_ups.addresses, principal="token:new"), 10)


async def test_the_control_abandoned_threads_pile_up_without_the_bound(silent: Silent) -> None:
    """As it was: an abandoned thread no longer counts, so the same twenty calls leave more than the server's bound."""

    async def unbounded(host: str) -> tuple[Address, ...]:
        await anyio.to_thread.run_sync(socket.getaddrinfo, host, None, abandon_on_cancel=True)
        return ()

    await cancelled_calls(20, unbounded)
    assert silent.waiting > LOOK_UPS
    silent.answer.set()
    await until(silent, 0)


async def test_a_burst_waits_for_its_turn(silent: Silent, monkeypatch: pytest.MonkeyPatch) -> None:
    """More look-ups at one time than the share, each answered soon: all have their answers, and none is refused."""
    monkeypatch.setattr(dial, "_PLACE_SECONDS", 10)
    look_ups, found = LookUps(), list[tuple[Address, ...]]()

    async def look_up() -> None:
        found.append(await look_ups.addresses("a.example", "token:alice"))

    async with anyio.create_task_group() as tasks:
        for _ in range(40):
            tasks.start_soon(look_up)
        await until(silent, LOOK_UPS_OF_ONE)
        silent.answer.set()
    assert found == [(ip_address("93.184.1.1"),)] * 40


SCRIPT = """
import socket, time, anyio
from glovebox_server.egress import dial
socket.getaddrinfo = lambda *_, **__: time.sleep(300)
async def main():
    with anyio.move_on_after(0.2):
        await dial.system_resolver("a.example")
anyio.run(main)
"""


def test_a_server_ends_although_a_look_up_hangs() -> None:
    """It used to wait for the C library's timeout."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], timeout=60, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
