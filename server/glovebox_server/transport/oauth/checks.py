"""The order of signature checks: invalid ones have a share of one processor, in which client addresses take turns.

Rule 1  Checks of invalid signatures take at most ``SHARE`` of one processor, beside a start of ``AHEAD_SECONDS``. Valid
        ones are free: such a token comes from the issuer.
Rule 2  If checks have to wait, the address with the least time of invalid ones is next, as in start-time fair queueing
        (https://doi.org/10.1145/248156.248171): a flood from one address delays another's token by one check.
Rule 3  At most ``MAX_WAITING`` wait. Beyond, the address with most of them gives up its newest. A site may have 65,536
        networks of IPv6 (RFC 6177), so the site with most of them comes before the address.
"""

import ipaddress
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from time import monotonic, thread_time
from typing import Any, Final, TypeVar

import anyio
import anyio.lowlevel

from glovebox_server.transport.oauth.verify import TokenError

#: Share of one processor for invalid signatures. One takes 0.05 to 1 ms, by the issuer's key.
SHARE: Final = 0.1

#: Seconds of the processor that they may be ahead of their share.
AHEAD_SECONDS: Final = 0.01

#: Checks that wait, each with the request that brought its token; a second's worth with usual keys.
MAX_WAITING: Final = 256

#: Addresses with remembered invalid signatures, about 200 bytes each; the oldest is evicted first.
MAX_ADDRESSES: Final = 4096

#: Bits of an IPv6 address that name a network; the others are its owner's to choose (RFC 4291, 2.5.4).
_NETWORK_BITS: Final = 64

#: Bits that the networks of one owner share (RFC 6177, 2).
_SITE_BITS: Final = 48

_Checked = TypeVar("_Checked")


@dataclass(slots=True, eq=False)
class _PendingCheck:
    check: Callable[[], Any]
    done: anyio.Event = field(default_factory=anyio.Event)
    result: Any = None
    error: Exception | None = None


class Checks:
    """Makes the checks of all clients. One per server."""

    def __init__(
        self,
        clock: Callable[[], float] = monotonic,
        spent: Callable[[], float] = thread_time,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self._clock, self._spent, self._sleep = clock, spent, sleep
        self._paid = 0.0
        """Time at which the spending so far equals the share."""
        self._turn = 0.0
        """Spending of the address that had the last turn."""
        self._accounts: OrderedDict[str, float] = OrderedDict()
        """Spending by address, if it is more."""
        self._waiting: dict[str, deque[_PendingCheck]] = {}
        self._sites: dict[str, str] = {}
        """The site of each address with waiting checks."""
        self._wanted = anyio.Event()
        self._followed = False

    async def run(self, address: str, check: Callable[[], _Checked]) -> _Checked:
        """Run a check in turn; return or raise as it does.

        Args:
            address: of the client, as ``address_of`` returns it.
            check: takes processor time, and raises an exception for an invalid signature.

        Raises:
            TokenError: busy: too many wait, or ``follow`` does not run.
        """
        if not self._waiting and self._debt() <= 0:
            return self._charged(address, check)
        if not self._followed:
            raise TokenError("busy")
        site = _site_of(address)
        self._make_room(address, site)
        waiting = _PendingCheck(check)
        self._sites[address] = site
        self._waiting.setdefault(address, deque()).append(waiting)
        self._wanted.set()
        try:
            await waiting.done.wait()
        finally:
            if not waiting.done.is_set():
                self._remove(address, waiting)
        if waiting.error is not None:
            raise waiting.error
        return waiting.result  # type: ignore[no-any-return]  # of the check

    async def follow(self) -> None:
        """Make the waiting checks in turn; until cancelled."""
        self._followed = True
        try:
            while True:
                await self._wanted.wait()
                self._wanted = anyio.Event()
                while self._waiting:
                    await anyio.lowlevel.checkpoint()
                    debt = self._debt()
                    if debt > 0:
                        await self._sleep(debt)
                    elif self._waiting:
                        self._check_next()
        finally:
            self._followed = False

    def _check_next(self) -> None:
        address = min(self._waiting, key=self._start)
        waiting = self._waiting[address][0]
        self._remove(address, waiting)
        try:
            waiting.result = self._charged(address, waiting.check)
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            waiting.error = error
        waiting.done.set()

    def _charged(self, address: str, check: Callable[[], _Checked]) -> _Checked:
        began, self._turn = self._spent(), self._start(address)
        try:
            return check()
        except Exception:
            cost = self._spent() - began
            self._paid = max(self._paid, self._clock()) + cost / SHARE
            self._accounts[address] = self._turn + cost
            self._accounts.move_to_end(address)
            if len(self._accounts) > MAX_ADDRESSES:
                self._accounts.popitem(last=False)
            raise

    def _start(self, address: str) -> float:
        return max(self._turn, self._accounts.get(address, 0.0))

    def _debt(self) -> float:
        return self._paid - self._clock() - AHEAD_SECONDS / SHARE

    def _make_room(self, address: str, site: str) -> None:
        if sum(map(len, self._waiting.values())) < MAX_WAITING:
            return
        of_sites = Counter[str]()
        for name, queue in self._waiting.items():
            of_sites[self._sites[name]] += len(queue)
        most = max(self._waiting, key=lambda name: (of_sites[self._sites[name]], len(self._waiting[name])))
        if self._sites[most] == site:
            longest, own = len(self._waiting[most]), len(self._waiting.get(address, ()))
        else:
            longest, own = of_sites[self._sites[most]], of_sites[site]
        if longest <= own + 1:
            raise TokenError("busy")
        last = self._waiting[most][-1]
        self._remove(most, last)
        last.error = TokenError("busy")
        last.done.set()

    def _remove(self, address: str, waiting: _PendingCheck) -> None:
        self._waiting[address].remove(waiting)
        if not self._waiting[address]:
            del self._waiting[address], self._sites[address]


def _site_of(address: str) -> str:
    """Return the site of an address of ``address_of``; of IPv4, the address itself."""
    if not address.endswith(f"/{_NETWORK_BITS}"):
        return address
    return str(ipaddress.IPv6Network(address).supernet(new_prefix=_SITE_BITS))


def address_of(client: str) -> str:
    """Return a client's IPv4 address, or its IPv6 network of 64 bits; empty for anything else."""
    try:
        address = ipaddress.ip_address(client.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return str(ipaddress.IPv6Network((int(address), _NETWORK_BITS), strict=False))
        address = address.ipv4_mapped
    return str(address)
