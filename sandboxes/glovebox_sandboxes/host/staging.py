"""Make directories reachable for an unprivileged bwrap that has to mount them. For the thread that starts sandboxes.

A server that runs as root starts bwrap as another user, and bwrap opens every directory it mounts by its path: below
/root (0700) it finds nothing. So the starting thread gets a mount namespace of its own and binds such directories at a
place that every user may enter. Only that thread and its children see it. See mount_namespaces(7).
"""

import ctypes
import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from glovebox_sandboxes.host.descriptors import opened

STAGE = Path("/run/glovebox")
"""Covered with a small tmpfs inside the namespace; outside it stays an empty directory."""
MAX_STAGED = 64
"""Two for the runtime, one per workspace; more means directories that are replaced again and again."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS = 0x00020000
_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_SLAVE, _MNT_DETACH = 0x1000, 0x4000, 0x40000, 0x80000, 2
_PLACE = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


class Stage:
    """The calling thread's view. Every method must be called in the thread that made it."""

    def __init__(self) -> None:
        """Move the thread into a mount namespace of its own; if that is not permitted, change nothing."""
        self._staged: dict[Path, tuple[int, int, Path]] = {}
        self._count = 0
        self.active = os.geteuid() == 0 and _prepared()

    def open(self, source: Path) -> int:
        """Return a descriptor of a directory without a right to read it. Raises OSError if missing, or a link."""
        descriptor = _exactly(source)
        if not self.active:
            return descriptor
        try:
            found = os.fstat(descriptor)
            device, inode, place = self._staged.get(source, (0, 0, STAGE))
            if (device, inode) != (found.st_dev, found.st_ino):
                place = self._bind(descriptor, place if inode else None)
                self._staged[source] = (found.st_dev, found.st_ino, place)
        finally:
            os.close(descriptor)
        return os.open(place, _PLACE)

    def _bind(self, descriptor: int, stale: Path | None) -> Path:
        """Bind a directory under a new name; ``stale`` is the place of a replaced one."""
        if stale is not None:
            _unbind(stale)
        elif len(self._staged) >= MAX_STAGED:
            _unbind(self._staged.pop(next(iter(self._staged)))[2])
        self._count += 1
        place = STAGE / str(self._count)
        place.mkdir()
        # By the descriptor that was checked: the name may mean another directory by now.
        _mount(f"/proc/self/fd/{descriptor}", place, "", _MS_BIND | _MS_REC)
        return place


def uncover(directory: Path) -> None:
    """Let any user reach a directory below one that root alone may enter, in this process and its children.

    Such is ``/var/lib/private``, where systemd keeps what belongs to a ``DynamicUser=`` (systemd.exec(5)); a service
    sees its part of it in the same way. If a mount is not permitted nothing changes.
    """
    way = [*reversed(directory.resolve().parents), directory.resolve()]
    closed = [at for at, place in enumerate(way[:-1]) if _is_roots_alone(place) and way[at + 1].exists()]
    if not closed or _LIBC.unshare(_CLONE_NEWNS) != 0:
        return
    with suppress(PermissionError):
        _mount("none", Path("/"), "", _MS_REC | _MS_PRIVATE)
        for at in closed:
            with opened(way[at + 1], _PLACE | os.O_NOFOLLOW) as inside:
                _mount("glovebox", way[at], "tmpfs", 0, "mode=0755,size=64k")
                way[at + 1].mkdir()
                _mount(f"/proc/self/fd/{inside}", way[at + 1], "", _MS_BIND | _MS_REC)


def _is_roots_alone(place: Path) -> bool:
    try:
        found = place.stat()
    except FileNotFoundError:
        return False
    return found.st_uid == 0 and not found.st_mode & stat.S_IXOTH


def _exactly(source: Path) -> int:
    """Return a descriptor of the directory at a resolved path, without following a link.

    A user who may rename a workspace, or a folder above it, could otherwise have any directory mounted in its place,
    even those that only root may enter.
    """
    descriptor = os.open(source, _PLACE)
    if str(Path(f"/proc/self/fd/{descriptor}").readlink()) != str(source):
        os.close(descriptor)
        raise OSError(errno.ELOOP, "its path leads elsewhere by a link", str(source))
    return descriptor


def _prepared() -> bool:
    try:
        STAGE.mkdir(mode=0o755, exist_ok=True)
        if _LIBC.unshare(_CLONE_NEWNS) != 0:
            return False
        # The host's later mounts stay visible; mounts made here stay here.
        _mount("none", Path("/"), "", _MS_REC | _MS_SLAVE)
        _mount("glovebox", STAGE, "tmpfs", 0, "mode=0755,size=64k")
    except OSError:
        return False
    return True


def _mount(source: str, target: Path, kind: str, flags: int, data: str = "") -> None:
    words = (source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), data.encode())
    if _LIBC.mount(*words) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), source)


def _unbind(place: Path) -> None:
    if _LIBC.umount2(os.fsencode(place), _MNT_DETACH) == 0:
        with suppress(OSError):
            place.rmdir()
