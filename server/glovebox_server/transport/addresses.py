"""The server's listening address, its names for clients, and the proxies that may name clients."""

import ipaddress
import re
import socket
from collections.abc import Collection

from glovebox_sandboxes.contract.errors import DiagnosedError

#: A Host header: a name or an address, and a port (RFC 9112, 3.2).
_HOST = re.compile(r"(?:[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")

#: Connections that wait to be accepted; the kernel's own default bound.
BACKLOG = 4096


def open_listener(host: str, port: int) -> socket.socket:
    """Open a listening socket; raise DiagnosedError if the address is taken or not ours."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio turns Nagle's algorithm off only if the protocol is named; with it, each answer waits 40 ms.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except UnicodeError:  # an empty label, or one of more than 63 characters
        raise DiagnosedError(
            f"Cannot listen on {host} port {port}", "it is no name of a host", "Name another."
        ) from None
    except OSError as error:
        raise _cannot(host, port, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _cannot(host, port, error) from error
    return listener


def _cannot(host: str, port: int, error: OSError) -> DiagnosedError:
    return DiagnosedError(
        f"Cannot listen on {host} port {port}", error.strerror or str(error), "Choose another with --port or --host."
    )


def host_names(address: str, port: int, allowed: Collection[str]) -> set[str]:
    """Return the values of Host that are ours.

    Raises:
        DiagnosedError: the address is open to others and has no configured name, or that name is invalid.
    """
    for name in allowed:
        if not _HOST.fullmatch(name):
            fix = "Give the name clients will use, and its port where there is one: glovebox.example:8321"
            raise DiagnosedError(f"Cannot accept {name!r} as --allowed-host", "it is no name of a host", fix)
    if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        if not allowed:
            fix = "Name the hosts clients will use with --allowed-host, or listen on 127.0.0.1."
            raise DiagnosedError(f"Cannot listen on {address}", "it can be reached by others", fix)
        return set(allowed)
    return {f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")} | set(allowed)


def proxy_networks(proxies: Collection[str]) -> list[str]:
    """Return networks in uvicorn's form; IPv4 ones also in the form of IPv6 sockets (RFC 4291, 2.5.5.2).

    Raises:
        DiagnosedError: one is not an address or network.
    """
    networks = []
    for name in proxies:
        try:
            network = ipaddress.ip_network(name)
        except ValueError as problem:
            fix = "Give the proxy's address, or its network: 10.0.0.0/24"
            raise DiagnosedError(f"Cannot trust {name!r} as --trusted-proxy", str(problem), fix) from None
        networks.append(str(network))
        if network.version == 4:  # noqa: PLR2004 - of the protocol
            networks.append(f"::ffff:{network.network_address}/{96 + network.prefixlen}")
    return networks


def bracket_address(address: str) -> str:
    """Return an address in the form of URLs."""
    return f"[{address}]" if ":" in address else address
