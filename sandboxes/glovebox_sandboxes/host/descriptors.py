"""Open descriptors for the length of a block. Must import nothing of ours."""

import os
import socket
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def opened(path: str | Path, flags: int = 0, mode: int = 0o777, *, dir_fd: int | None = None) -> Iterator[int]:
    """Provide a descriptor: for small files, Python's own take three times as long as system calls."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def receive(link: socket.socket, size: int, most: int, flags: int = 0) -> tuple[bytes, list[int]]:
    """Receive bytes and descriptors, which no program that is run inherits: ``socket.recv_fds`` ignores its flags."""
    room = socket.CMSG_SPACE(most * array("i").itemsize)
    data, ancillary, _, _ = link.recvmsg(size, room, socket.MSG_CMSG_CLOEXEC | flags)
    found = array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(content[: len(content) - len(content) % found.itemsize])
    return data, list(found)
