"""A guest that never gets a job: it imports what programs need once, and forks a sandbox for each call.

It is process 1 of an outer sandbox and takes orders from the host alone. No byte that a caller's program produced ever
reaches it: a fork moves into namespaces of its own before it is a guest, and from there talks to the host over a wire
of its own. Untrusted code never imports it.

Steps of a fork, in this order: user; new namespaces, with the fork itself; control groups; mounts; no capabilities;
fresh randomness; then it is a guest like any other. See user_namespaces(7), pid_namespaces(7), mount_namespaces(7).
"""

from __future__ import annotations

import fcntl
import gc
import os
import sys
from array import array

from _glovebox_guest import jsontext, kernel, measure, process_1, work
from _glovebox_guest.jobs import python
from _glovebox_guest.loop import Loop
from _glovebox_guest.main import require_first, serve, take_wire
from _glovebox_guest.program import child as children
from _glovebox_guest.stdlib import Any, NoReturn, signal, socket
from _glovebox_guest.wire import Wire

_FAILED = 70
"""EX_SOFTWARE: no status that process 1 expects of a helper."""
_ORDER_BYTES = 4096
_ORDER_DESCRIPTORS = 8
"""Wire, standard error, and a file for each of at most four control groups."""
_INT_BYTES = 4
_HUGE = 2 * 1024 * 1024
_ARENA_OBJECTS = 1900
"""Objects of 512 bytes, the largest small ones, that fit into an arena of 1 MiB, rounded down."""
_BYTES_HEAD = sys.getsizeof(b"")
_ARENAS = 40
"""Arenas for pandas and matplotlib, and spare ones; unused ones are given back."""
_REHEARSALS = 10
"""Enough for CPython to specialize what a job calls once: a tenth of a second in all."""
_REHEARSAL = {
    "kind": "python", "payload": {"code": "print(0)"}, "environment": {}, "inputs": 0,
    "limits": {"wall_seconds": 60, "cpu_seconds": 60, "printed_bytes": 64},
}  # fmt: skip
_NEW_NAMESPACES = (
    0x1000_0000  # CLONE_NEWUSER: the others belong to it, and no outside user has an id in it
    | 0x0002_0000  # CLONE_NEWNS
    | 0x2000_0000  # CLONE_NEWPID
    | 0x4000_0000  # CLONE_NEWNET
    | 0x0800_0000  # CLONE_NEWIPC
    | 0x0400_0000  # CLONE_NEWUTS
)
_CLONE_NEWCGROUP = 0x0200_0000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x8, 0x4000, 0x4_0000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1


def main() -> None:
    """Import, report ``ready``, and fork once for every order until the host closes the socket."""
    require_first()
    # It was for this process alone, not for what programs start.
    os.environ.pop("LD_BIND_NOW", None)
    config = jsontext.loads(sys.argv[-1])
    sys.path.extend(config["path"])
    # bwrap leaves open descriptors that it waited on.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    kernel.prctl("PR_SET_DUMPABLE", 0)
    own = os.getuid()
    # Away from the output of modules that print when they are imported.
    orders = socket.socket(fileno=take_wire()[0])
    # Forks are not waited for: the host sees their end by a pidfd.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    work.warm_up()
    if config["output"]:
        # Who collects files would import it in each fork.
        __import__("_glovebox_guest.pictures.header")
    _import_ahead(orders, config["preload"])
    for _ in range(_REHEARSALS):
        _rehearse({**config, "output": "", "overlay": [], "proxy": False})
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.collect()
    forks = None
    if config["zygote"]["process_1"]:
        forks = process_1.keep(config)
        # Its program's process finds all as it has to be.
        children.settle()
    _kept = _filled()
    _collapse()
    orders.sendall(jsontext.dumps({"namespaces": measure.namespaces()}))
    if forks is None:
        _fork_for_each(orders, own, config)
    elif (told := forks(orders.fileno())) is not None:
        orders.detach()
        _resume(told, config)


def _import_ahead(orders: socket.socket, names: list[str]) -> None:
    """Import what programs need, or say why it cannot be, and exit."""
    side_by_side: list[bytes] = []
    if names:
        # Both run in every fork: their objects lie best among those that forks use.
        import logging
        import random

        del logging, random
        side_by_side = _arenas()
    try:
        for name in names:
            __import__(name)
    except BaseException as problem:  # noqa: BLE001 - a module's own code; the host says what it was
        _say(orders.fileno(), problem, f"{name}: ")
        sys.exit(1)
    side_by_side.clear()
    # Existing objects are in every fork; the collector would write to each of their pages.
    gc.collect()
    gc.freeze()
    # The attribute cache is full of the modules' names: a fork would write to each whose place another takes.
    getattr(sys, "_clear_internal_caches", sys._clear_type_cache)()  # noqa: SLF001 - called the former since Python 3.13


def _fork_for_each(orders: socket.socket, own: int, config: dict[str, Any]) -> None:
    """Fork a guest in Python for every order, until the host closes the socket. process_1.c does the same in C."""
    while True:
        order, descriptors = _next(orders)
        if not order:
            return
        outside = jsontext.loads(order.decode())["uid"] or own
        try:
            become_user(outside)
            if kernel.fork_into(_NEW_NAMESPACES) == 0:
                orders.detach()
                _leave(descriptors, own, outside, config)
            # For no longer than the fork: no other process has this user.
            become_user(own)
        except OSError as problem:
            # No more processes or namespaces, for instance. The host gets the error, and may ask again.
            _say(descriptors[1], problem)
        for descriptor in descriptors:
            os.close(descriptor)


def _resume(told: dict[str, int], config: dict[str, Any]) -> NoReturn:
    """Be a process of a sandbox whose process 1 runs C only. Never returns."""
    try:
        reseed()
        process_1.resume(told, config)
    except BaseException as problem:  # noqa: BLE001 - it must never return into the zygote's loop
        _say(2, problem)
    finally:
        os._exit(_FAILED)


def _rehearse(config: dict[str, Any]) -> None:
    """Do a whole job, of a program of our own: forks then find code and caches as they would make them.

    Else each would write to shared pages, and copy them: CPython specializes a function when it is called often,
    and remembers where it has found attributes.
    """
    (reading, writing), null = os.pipe(), os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    loop, host = Loop(reading, null, ""), Wire("host")
    child = work.ready_child(config)
    ready = loop.wire.message("ready", measure.measure(loop.descriptors, config["hidden"], config["masked"]))
    host.receive(ready)
    os.write(writing, host.message("job", _REHEARSAL))
    while loop.job is None:
        loop.step(None)
    loop.send(loop.wire.message("outcome", work.work(loop, child, config)))
    loop.flush()
    work.reap_everything()
    for descriptor in loop.descriptors | {writing}:
        os.close(descriptor)
    python.warm_up()


def become_user(uid: int) -> None:
    """Become the host's user of the next sandbox, where this zygote has several."""
    if uid != os.getuid():
        # It was never root in this namespace, so it keeps its rights, and can change user again.
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        # It still has to end with its parent; becoming another takes that back.
        kernel.prctl("PR_SET_PDEATHSIG", signal.SIGKILL)


def _arenas() -> list[bytes]:
    """Place small objects side by side from now on, for ``_collapse``, while the result is kept.

    CPython takes memory for them in arenas of 1 MiB (Objects/obmalloc.c), which would lie between the libraries that
    imports map. All are taken at once here, and one object in each keeps it.
    """
    # Made before, and not appended to: a growing list moves, and leaves gaps.
    held = [b""] * (_ARENAS * _ARENA_OBJECTS)
    for index in range(len(held)):
        held[index] = bytes(512 - _BYTES_HEAD)
    return held[::_ARENA_OBJECTS]


def _filled() -> list[bytes]:
    """Take the free memory between objects, so that forks take theirs together from new memory.

    Each page of the zygote that a fork writes to is copied, and splits its huge page. The result is to be kept.
    """
    known = _writable()
    held: list[bytes] = []
    # Downwards: smaller ones fill the rest of a large gap. Below 512 bytes each step is a size of its own.
    for size in (*(2**power for power in range(16, 9, -1)), *range(512, 32, -16)):
        while True:
            held.append(bytes(size - _BYTES_HEAD))
            if not any(first <= id(held[-1]) < last for first, last in known):
                break
    return held


def _writable() -> list[tuple[int, int]]:
    with open("/proc/self/maps", encoding="ascii", errors="replace") as lines:
        maps = [line.split() for line in lines]
    pairs = [where.split("-") for where, rights, *_ in maps if rights.startswith("rw")]
    return [(int(first, 16), int(last, 16)) for first, last in pairs]


def _collapse() -> None:
    """Put memory into huge pages: a fork then copies one entry instead of 512.

    See madvise(2), MADV_COLLAPSE; a kernel without it changes nothing.
    """
    for begin, end in _writable():
        first, last = -(-begin // _HUGE) * _HUGE, end // _HUGE * _HUGE
        if first < last:
            kernel.collapse(first, last - first)


def _next(orders: socket.socket) -> tuple[bytes, list[int]]:
    """Return the next order and its descriptors; empty when the host has closed the socket."""
    order, ancillary, _, _ = orders.recvmsg(_ORDER_BYTES, socket.CMSG_SPACE(_ORDER_DESCRIPTORS * _INT_BYTES))
    descriptors = array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % _INT_BYTES])
    return order, list(descriptors)


def _leave(descriptors: list[int], inside: int, outside: int, config: dict[str, Any]) -> NoReturn:
    """Leave what the forked process shares with the zygote, then be a guest. Never returns."""
    try:
        wire, detail, *groups = descriptors
        os.dup2(wire, 0)
        os.dup2(wire, 1)
        os.dup2(detail, 2)
        for group in groups:
            # 0 is the writer: a process that moves itself blocks no other, see cgroups(7).
            os.write(group, b"0")
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        # Now, and not with the others: its root is the group the process is in.
        kernel.unshare(_CLONE_NEWCGROUP)
        # The host inspects this process by it, kills it and sees its end, whatever its number.
        pidfd = array("i", [os.pidfd_open(os.getpid())])
        host = socket.socket(fileno=1)
        host.sendmsg([b"0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, pidfd)])
        host.detach()
        os.close(pidfd[0])
        # The files below /proc/self belong to root for a process that is not dumpable; a guest is not, later.
        kernel.prctl("PR_SET_DUMPABLE", 1)
        kernel.write("/proc/self/setgroups", "deny")
        kernel.write("/proc/self/uid_map", f"{inside} {outside} 1")
        kernel.write("/proc/self/gid_map", f"{inside} {outside} 1")
        _isolate(config["zygote"])
        reseed()
        serve(config)
    except BaseException as problem:  # noqa: BLE001 - it must never return into the zygote's loop
        _say(2, problem)
    finally:
        os._exit(1)


def _say(descriptor: int, problem: BaseException, before: str = "") -> None:
    os.write(descriptor, f"{before}{type(problem).__name__}: {problem}"[:_ORDER_BYTES].encode("utf-8", "replace"))


def _isolate(own: dict[str, Any]) -> None:
    """Set up file systems, network and rights of this sandbox alone."""
    os.setsid()
    kernel.mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    kernel.mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    kernel.mount("devpts", "/dev/pts", "devpts", _MS_NOSUID | _MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    for target, size in own["tmpfs"]:
        kernel.mount("tmpfs", target, "tmpfs", _MS_NOSUID | _MS_NODEV, f"mode=0700,size={size}")
    network = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    # struct ifreq, see netdevice(7): a name of 16 bytes, and here 16 bits of flags.
    request = fcntl.ioctl(network.fileno(), _SIOCGIFFLAGS, b"lo".ljust(40, b"\0"))
    flags = int.from_bytes(request[16:18], sys.byteorder) | _IFF_UP
    fcntl.ioctl(network.fileno(), _SIOCSIFFLAGS, request[:16] + flags.to_bytes(2, sys.byteorder) + request[18:])
    network.close()
    # No namespaces below this one, whatever the seccomp filter allows.
    kernel.write("/proc/sys/user/max_user_namespaces", "0")
    kernel.drop_capabilities()


def reseed() -> None:
    """Renew the randomness that all forks of one process would share.

    Python's ``random`` does so by itself after a fork. The hash seed and the addresses stay the same.
    """
    modules = {"_ssl", "numpy.random", "multiprocessing.process"} & sys.modules.keys()
    if not modules:
        return
    seed = os.urandom(32)
    if "_ssl" in modules:
        # OpenSSL detects a fork by another process number, and here both are 1.
        sys.modules["_ssl"].RAND_add(seed, float(len(seed)))
    if "numpy.random" in modules:
        sys.modules["numpy.random"].seed()
    if "multiprocessing.process" in modules:
        sys.modules["multiprocessing.process"].current_process().authkey = seed
