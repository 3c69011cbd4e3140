"""From an allowed name to a connection: resolve once, check every answer, dial only what was checked.

The only module of egress that knows sockets. A name reaches it after the rules allowed it, so a denied name is never
looked up: a look-up is itself a message to whoever runs the zone.
"""

import math
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import closing
from ipaddress import IPv6Address, ip_address

import anyio
import anyio.to_thread
from anyio.abc import ByteStream, SocketStream
from anyio.streams.tls import TLSStream

from glovebox_profiles.egress.addresses import Address, first_refused
from glovebox_profiles.egress.errors import InvalidTarget
from glovebox_profiles.egress.hosts import parse_address
from glovebox_server.egress.limits import EgressLimits

Resolver = Callable[[str], Awaitable[tuple[Address, ...]]]
"""Takes a canonical name, returns every address it has; raises OSError when it has none."""

_DISCARD_PORT = 9


class Unreachable(Exception):  # noqa: N818 - a state of the network, not a fault of ours
    """An allowed host could not be resolved or connected; the text is one sentence for the caller."""


def within(seconds: float, deadline: float) -> float:
    """Return what may be waited: ``seconds``, or less if ``deadline`` (on the event loop's clock) comes first."""
    return max(0.0, min(seconds, deadline - anyio.current_time()))


async def system_resolver(host: str) -> tuple[Address, ...]:
    """Ask the operating system for every address of a name.

    The final dot keeps the resolver from trying the host's own search domains, which would turn a public name into an
    internal one. An abandoned look-up ends with the C library's own timeout.

    Raises:
        OSError: The name has no address, or no server answered.
    """

    def look_up() -> tuple[Address, ...]:
        answers = socket.getaddrinfo(f"{host}.", None, type=socket.SOCK_STREAM)
        return tuple(dict.fromkeys(ip_address(answer[4][0]) for answer in answers))

    return await anyio.to_thread.run_sync(look_up, abandon_on_cancel=True)


async def resolve(host: str, resolver: Resolver, seconds: float) -> tuple[Address, ...]:
    """Return the addresses of an allowed host; an address literal is returned without asking anybody.

    Raises:
        Unreachable: No answer, or none in time.
    """
    literal = parse_address(host)
    if literal is not None:
        return (literal,)
    try:
        with anyio.fail_after(seconds):
            addresses = await resolver(host)
    except TimeoutError:
        raise Unreachable(f"The name {host} was not resolved in time.") from None
    except (OSError, UnicodeError, ValueError):
        raise Unreachable(f"The name {host} could not be resolved.") from None
    if not addresses:
        raise Unreachable(f"The name {host} has no address.")
    return addresses


def check(host: str, addresses: tuple[Address, ...]) -> None:
    """Refuse a whole DNS answer when one address in it is not public, or is this machine's own.

    The message names the kind of address and not the address: internal addresses are nobody's business in a sandbox.

    Raises:
        InvalidTarget: Rule ``egress.address``.
    """
    refused = first_refused(addresses)
    what = f"is {refused[1]}" if refused else "belongs to this machine" if any(map(is_own, addresses)) else None
    if what is not None:
        raise InvalidTarget(
            "egress.address", f"{host} resolves to an address that {what}.", "Only public addresses can be reached."
        )


def is_own(address: Address) -> bool:
    """Whether an address belongs to this machine: the kernel would then send from the very address it sends to.

    Connecting a datagram socket chooses a route and sends nothing (``man 7 udp``).
    """
    family = socket.AF_INET6 if isinstance(address, IPv6Address) else socket.AF_INET
    try:
        with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
            probe.connect((str(address), _DISCARD_PORT))
            return bool(ip_address(probe.getsockname()[0]) == address)
    except OSError:
        return False  # no route to it at all, so it is not here


async def dial(
    host: str, addresses: tuple[Address, ...], port: int, limits: EgressLimits, deadline: float = math.inf
) -> SocketStream:
    """Connect to the first of the checked addresses that answers. Takes addresses only, so nothing is resolved again.

    ``deadline`` is on the event loop's clock; each address has ``connect_seconds`` of its own.

    Raises:
        Unreachable: None of them answered.
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
    raise Unreachable(f"{host} could not be connected on port {port}: {reason}.")


async def secure(stream: ByteStream, host: str, tls: ssl.SSLContext, seconds: float) -> TLSStream:
    """Speak TLS to ``host`` over its connection; the certificate has to be valid and in its name.

    The close handshake is required of the peer, so that a cut connection is not taken for a finished body.

    Raises:
        Unreachable: The handshake failed.
    """
    try:
        with anyio.fail_after(seconds):
            return await TLSStream.wrap(stream, hostname=host, ssl_context=tls, standard_compatible=True)
    except ssl.SSLCertVerificationError as error:
        reason = f"its certificate is not trusted: {error.verify_message}"
    except TimeoutError:
        reason = "no TLS handshake in time"
    except (ssl.SSLError, OSError, anyio.EndOfStream, anyio.BrokenResourceError):
        reason = "the TLS handshake failed"
    raise Unreachable(f"{host} could not be reached over TLS: {reason}.")
