"""Connects to an allowed name: resolves it once, checks every answer, dials only checked addresses.

The only module of egress with sockets. Only names that the rules allow reach it, so a denied name is never resolved: a
look-up is itself a message to the zone's name servers.
"""

import asyncio
import errno
import math
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import closing
from ipaddress import IPv6Address, ip_address

import anyio
from anyio.abc import ByteStream, SocketStream
from anyio.streams.tls import TLSStream

from glovebox_profiles.egress.targets import Address, parse_address, refusal
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server.egress.events import EgressLimits, PeerError

Resolver = Callable[[str], Awaitable[tuple[Address, ...]]]
"""Takes a canonical name, returns all its addresses; raises OSError if it has none."""

Dial = Callable[[str, tuple[Address, ...], int, EgressLimits, float], Awaitable[SocketStream]]
"""Connects to one of the checked addresses of a host; see ``dial``."""

LOOK_UPS = 64
"""Concurrent look-ups of all principals, abandoned ones included; each is a thread."""
LOOK_UPS_OF_ONE = 16
"""Of one principal: one for each of its concurrent calls, so that others have room."""

_PLACE_SECONDS = 5.0
"""Longest wait for other look-ups: a burst has passed by then, unresponsive name servers have not."""
_PAUSE_SECONDS = 0.02
_DISCARD_PORT = 9


def within(seconds: float, deadline: float) -> float:
    """Return the time to wait: ``seconds``, or less if ``deadline`` (event-loop clock) comes first."""
    return max(0.0, min(seconds, deadline - anyio.current_time()))


class LookUps:
    """Resolver of the operating system, in threads that are counted until they end.

    The C library cannot be interrupted: an abandoned look-up continues until its own timeout, half a minute with three
    unresponsive name servers. Without a bound, cancelled calls would pile them up.
    """

    def __init__(self, *, most: int = LOOK_UPS, of_one: int = LOOK_UPS_OF_ONE) -> None:
        self._most = most
        self._of_one = of_one
        self._guard = threading.Lock()
        self._under_way: Counter[str] = Counter()

    async def addresses(self, host: str, principal: str = "") -> tuple[Address, ...]:
        """Return every address of a canonical name.

        The final dot keeps the resolver from trying the host's own search domains, which would turn a public name into
        an internal one.

        Raises OSError if the name has no address, or no server answered; PeerError if too many look-ups are still in
        progress, and none was started.
        """
        with anyio.move_on_after(_PLACE_SECONDS) as waited:
            while not self._enter(principal):  # noqa: ASYNC110 - threads return the slots, and have no event loop
                await anyio.sleep(_PAUSE_SECONDS)
        if waited.cancelled_caught:
            raise PeerError(
                f"The name {host} was not looked up: too many look-ups still wait for name servers that do not answer."
            )
        found: Future[tuple[Address, ...]] = Future()
        found.set_running_or_notify_cancel()  # from here on it cannot be cancelled: the thread answers in any case

        def look_up() -> None:
            try:
                try:
                    answers = socket.getaddrinfo(f"{host}.", None, type=socket.SOCK_STREAM)
                finally:
                    self._leave(principal)
                found.set_result(tuple(dict.fromkeys(ip_address(answer[4][0]) for answer in answers)))
            except BaseException as problem:  # noqa: BLE001 - raised where it is awaited
                found.set_exception(problem)

        try:
            # A daemon: the server does not wait for it at its end. Not anyio's threads, which are not counted once
            # abandoned.
            threading.Thread(target=look_up, name="glovebox-look-up", daemon=True).start()
        except RuntimeError as problem:
            self._leave(principal)
            raise OSError(errno.EAGAIN, str(problem)) from problem
        return await asyncio.wrap_future(found)

    def _enter(self, principal: str) -> bool:
        with self._guard:
            if self._under_way.total() >= self._most or self._under_way[principal] >= self._of_one:
                return False
            self._under_way[principal] += 1
            return True

    def _leave(self, principal: str) -> None:
        with self._guard:
            self._under_way -= Counter((principal,))  # which keeps no zero


system_resolver = LookUps().addresses
"""One per process: its bounds hold for all servers and calls together."""


async def resolve(host: str, resolver: Resolver, seconds: float) -> tuple[Address, ...]:
    """Return the addresses of an allowed host, of a literal without look-up. Raises PeerError if none, or too late."""
    literal = parse_address(host)
    if literal is not None:
        return (literal,)
    try:
        with anyio.fail_after(seconds):
            addresses = await resolver(host)
    except TimeoutError:
        raise PeerError(f"The name {host} was not resolved in time.") from None
    except (OSError, UnicodeError, ValueError):
        raise PeerError(f"The name {host} could not be resolved.") from None
    if not addresses:
        raise PeerError(f"The name {host} has no address.")
    return addresses


def require_public(host: str, addresses: tuple[Address, ...]) -> None:
    """Refuse a whole DNS answer if one address in it is not public, or is this machine's own.

    One bad answer condemns the whole set: an honest zone has no reason to mix, and a rebinding one does.
    The message names the kind of address, not the address: a sandbox learns no internal address. Raises RefusedError
    with rule ``egress.address``.
    """
    for address in addresses:
        kind = refusal(address)
        if kind is not None or is_own(address):
            what = "belongs to this machine" if kind is None else f"is {kind}"
            reason = f"{host} resolves to an address that {what}."
            raise RefusedError("egress.address", reason, "Only public addresses can be reached.")


def is_own(address: Address) -> bool:
    """Return whether an address is this machine's: the kernel would then send from the destination address.

    Connecting a datagram socket chooses a route and sends nothing (``man 7 udp``).
    """
    family = socket.AF_INET6 if isinstance(address, IPv6Address) else socket.AF_INET
    try:
        with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
            probe.connect((str(address), _DISCARD_PORT))
            return bool(ip_address(probe.getsockname()[0]) == address)
    except OSError:
        return False  # no route, so it is not this machine's


async def dial(
    host: str, addresses: tuple[Address, ...], port: int, limits: EgressLimits, deadline: float = math.inf
) -> SocketStream:
    """Connect to the first checked address that answers. Takes addresses only, so nothing is resolved again.

    ``deadline`` is on the event loop's clock; each address has ``connect_seconds`` of its own. Raises PeerError if none
    answers.
    """
    reason = "no address was left to try"
    for address in addresses[: limits.dialled_addresses]:
        try:
            with anyio.fail_after(within(limits.connect_seconds, deadline)):
                return await anyio.connect_tcp(str(address), port)
        except TimeoutError:
            reason = "no answer in time"
        except OSError as error:
            cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
            reason = cause.strerror or "the connection failed"
    raise PeerError(f"{host} could not be connected on port {port}: {reason}.")


async def secure(stream: ByteStream, host: str, tls: ssl.SSLContext, seconds: float) -> TLSStream:
    """Start TLS to ``host``; its certificate must be valid and in its name. Raises PeerError if the handshake fails.

    The peer must send the close alert, so that a truncated body is not accepted as complete.
    """
    try:
        with anyio.fail_after(seconds):
            return await TLSStream.wrap(stream, hostname=host, ssl_context=tls, standard_compatible=True)
    except ssl.SSLCertVerificationError as error:
        reason = f"its certificate is not trusted: {error.verify_message}"
    except TimeoutError:
        reason = "no TLS handshake in time"
    except (OSError, anyio.EndOfStream, anyio.BrokenResourceError):  # ssl.SSLError is an OSError
        reason = "the TLS handshake failed"
    raise PeerError(f"{host} could not be reached over TLS: {reason}.")
