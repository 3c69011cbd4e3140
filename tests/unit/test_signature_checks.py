"""Signatures of strangers: a bounded share of the processor, in which client addresses take turns."""

from typing import Any

import anyio
import anyio.lowlevel
import pytest
from tests.fixtures.issuers import an_issuer
from tests.unit.test_oauth_issuer import HERE, opened, refused

from glovebox_server.transport.oauth import authority as checks_of
from glovebox_server.transport.oauth import issuer as verify
from glovebox_server.transport.oauth.authority import Checks, address_of
from glovebox_server.transport.oauth.issuer import TokenError
from glovebox_server.transport.tokens import TokenGrant


class Processor:
    """Simulated time in which checks cost what they are said to: they are counted, and no real clock is read."""

    def __init__(self, cost: float) -> None:
        self.now, self.spent, self.cost, self.checked = 0.0, 0.0, cost, 0
        self.sleepers: list[tuple[float, anyio.Event]] = []

    def checks(self) -> Checks:
        """What is simulated."""
        return Checks(lambda: self.now, lambda: self.spent, self.sleep)

    async def sleep(self, seconds: float) -> None:
        """Wait until that much time has been let pass."""
        over = anyio.Event()
        self.sleepers.append((self.now + seconds, over))
        await over.wait()

    def identify(self, *arguments: Any) -> TokenGrant:
        """Check a signature, and spend what it costs."""
        self.spent += self.cost
        self.checked += 1
        return IDENTITY_OF(*arguments)

    async def pass_time(self, seconds: float) -> None:
        """Let time pass, and others do what they can."""
        self.now += seconds
        for until, over in self.sleepers:
            if until <= self.now:
                over.set()
        for _ in range(20):
            await anyio.lowlevel.checkpoint()


IDENTITY_OF = verify.identity_of


@pytest.mark.parametrize(
    ("cost", "callers", "most"),
    [(0.0002, "198.51.100.7", 182), (0.0002, "2001:db8::/64", 182), (0.02, "2001:db8::/64", 11)],
    ids=["same address", "another address", "another address, beyond the share"],
)
async def test_a_flood_of_forged_tokens_keeps_nobody_new_out(
    cost: float, callers: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """91 requests a second from one address, and 12 callers whose tokens are new: all get in, within 2 s."""
    # Forged ones cost at most 10 % of a processor beside the start; the control is how many of them were checked.
    processor = Processor(cost)
    monkeypatch.setattr(verify, "identity_of", processor.identify)
    told: list[str] = []
    async with an_issuer() as theirs, anyio.create_task_group() as tasks:
        checks = await opened(theirs)
        checks.checks = processor.checks()
        tasks.start_soon(checks.checks.follow)
        token = theirs.token(HERE)
        forged = token.rpartition(".")[0] + "." + theirs.token(HERE, sub="bob").rpartition(".")[2]

        async def come(number: int) -> None:
            told.append(await refused(checks, theirs.token(HERE, sub=f"s{number}"), callers))

        for number in range(182):
            tasks.start_soon(refused, checks, forged, "198.51.100.7")
            if number % 12 == 0 and number < 144:
                tasks.start_soon(come, number)
            await processor.pass_time(2 / 182)
        assert told == [""] * 12
        assert processor.checked - 12 <= most
        tasks.cancel_scope.cancel()


async def test_checks_that_wait_are_bounded_and_a_flood_gives_up_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound the address that has most waiting is refused, whoever comes; one that leaves is not checked."""
    monkeypatch.setattr(checks_of, "MAX_WAITING", 4)
    monkeypatch.setattr(checks_of, "MAX_ADDRESSES", 2)
    processor = Processor(0)
    order: list[str] = []
    made = processor.checks()

    async def check(address: str) -> None:
        def wrong() -> None:
            order.append(address)
            processor.spent += 1.0
            raise TokenError("signature")

        try:
            await made.run(address, wrong)
        except TokenError as error:
            if error.reason == "busy":
                order.append(f"{address} busy")

    async with anyio.create_task_group() as tasks:
        await check("a")  # at once
        tasks.start_soon(made.follow)
        left = anyio.CancelScope()

        async def leave() -> None:
            with left:
                await check("c")

        for address in "aaaa":
            tasks.start_soon(check, address)
        tasks.start_soon(leave)
        tasks.start_soon(check, "b")
        tasks.start_soon(check, "a")
        await anyio.wait_all_tasks_blocked()
        assert order == ["a", "a busy", "a busy", "a busy"]
        left.cancel()
        for _ in range(40):
            await processor.pass_time(1)
        assert order[4:] == ["b", "a", "a"]
        assert not made._waiting
        for address in "xyz":
            tasks.start_soon(check, address)
        for _ in range(40):
            await processor.pass_time(1)
        assert set(made._accounts) == {"y", "z"}
        tasks.cancel_scope.cancel()


async def test_a_site_with_many_networks_of_ipv6_keeps_no_other_address_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its networks has one waiting; the control is one network more of its own."""
    monkeypatch.setattr(checks_of, "MAX_WAITING", 4)
    processor = Processor(0)
    ended: dict[str, str] = {}
    made = processor.checks()

    async def check(address: str) -> None:
        def wrong() -> None:
            processor.spent += 1.0
            raise TokenError("signature")

        try:
            await made.run(address, wrong)
        except TokenError as error:
            ended[address] = error.reason

    async with anyio.create_task_group() as tasks:
        await check("192.0.2.1")  # at once
        tasks.start_soon(made.follow)
        for number in range(1, 5):
            tasks.start_soon(check, f"2001:db8:0:{number}::/64")
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(check, "2001:db8:0:9::/64")
        tasks.start_soon(check, "198.51.100.7")
        await anyio.wait_all_tasks_blocked()
        assert [name for name, error in ended.items() if error == "busy"] == ["2001:db8:0:9::/64", "2001:db8:0:4::/64"]
        for _ in range(40):
            await processor.pass_time(1)
        assert ended["198.51.100.7"] == "signature"
        assert not made._waiting
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("client", "address"),
    [
        ("192.0.2.1", "192.0.2.1"), ("::ffff:192.0.2.1", "192.0.2.1"), ("2001:db8:0:1:2:3:4:5", "2001:db8:0:1::/64"),
        ("2001:db8:0:1::", "2001:db8:0:1::/64"), ("fe80::1%eth0", "fe80::/64"), ("unknown", ""), ("", ""),
    ],
)  # fmt: skip
def test_an_address_is_one_of_ipv4_or_a_network_of_ipv6(client: str, address: str) -> None:
    """Who has a network of IPv6 has 2^64 addresses, and one turn."""
    assert address_of(client) == address
