"""Find where a worker listens: a socket for each state directory and version, in a directory of its user alone."""

import fcntl
import hashlib
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.runtime import guest_tree

VERSION = f"{version('glovebox-mcp')} {guest_tree.digest()}"
"""Both ends have to be of the same."""


@contextmanager
def directory(state: Path) -> Iterator[int]:
    """Open the directory of a state directory's sockets, made (0700) if it is missing.

    Raises PermissionError if another user could put a socket there.
    """
    path = state / "worker"
    path.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(f"{path} is another user's, or open to others")
        yield descriptor
    finally:
        os.close(descriptor)


def name(data: Path) -> str:
    """Return the name of the socket of this version's worker for a data directory and a Docker Engine."""
    return hashlib.sha256(f"{VERSION} {data} {engine()}".encode()).hexdigest()[:16]


def engine() -> dict[str, str]:
    """Return what of the environment says which Docker Engine is meant: a server gets sandboxes of no other."""
    return {"DOCKER_HOST": os.environ["DOCKER_HOST"]} if os.environ.get("DOCKER_HOST") else {}


def address(place: int, of: str) -> str:
    """Return the path of a socket in an open directory, however long that one's own path is: see unix(7)."""
    return f"/proc/self/fd/{place}/{of}"


@contextmanager
def locked(place: int, path: str) -> Iterator[None]:
    """Hold the lock during the block. Raises SandboxError if a worker listens at ``path``."""
    own = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=place)
    try:
        lock(own)
        with suppress(FileNotFoundError, ConnectionRefusedError), socket.socket(socket.AF_UNIX) as link:
            link.connect(path)
            raise SandboxError("Starting a worker", "one runs for this state directory", "Leave it, or end it first.")
        yield
    finally:
        os.close(own)


def lock(place: int) -> None:
    """Wait for the lock on the directory, which one has who starts or ends a worker; it ends with the descriptor."""
    fcntl.flock(place, fcntl.LOCK_EX)


def unlock(place: int) -> None:
    """Release the lock before."""
    fcntl.flock(place, fcntl.LOCK_UN)


def require_peer(link: socket.socket) -> None:
    """Raise PermissionError unless the process at the other end is of this one's user: unix(7), SO_PEERCRED."""
    _, uid, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if uid != os.geteuid():
        raise PermissionError(f"the other end is of user {uid}")
