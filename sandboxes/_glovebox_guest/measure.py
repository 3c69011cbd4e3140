"""Measures the isolation from inside, before any untrusted code runs. See ``contract.measure``."""

from __future__ import annotations

import os
import sys

from _glovebox_guest import landlock
from _glovebox_guest.kernel import prctl, read
from _glovebox_guest.stdlib import Any

CAPABILITIES = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
_SENTRY = "/proc/sentry-meminfo"
"""A file that gVisor's kernel adds to proc(5), and that cannot be added to Linux's."""
_SENTRY_VERSION = ("4.4.0", "#1 SMP Sun Jan 10 15:06:54 PST 2016")
"""gVisor's answer to uname(2), in every version of it: no Linux of that build exists."""
_MOST_PRESENT = 64
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")


def measure(own: frozenset[int], hidden: list[str], masked: list[str]) -> dict[str, Any]:
    """Measure this process; see ``glovebox_sandboxes.contract.measure.Measured`` for the fields.

    ``own`` are descriptors of the guest beside 0, 1 and 2. Paths in ``hidden`` are reported if present, those in
    ``masked`` if readable.
    """
    reported = status(lines("/proc/self/status"))
    spaces, name = namespaces(), os.uname()
    return {
        "uid": os.getuid() if os.getresuid() == (os.getuid(),) * 3 else -1,
        "gid": os.getgid() if os.getresgid() == (os.getgid(),) * 3 else -1,
        "groups": os.getgroups()[:64],
        "capabilities": capabilities(reported),
        "no_new_privs": prctl("PR_GET_NO_NEW_PRIVS") == 1,  # not every kernel has it in /proc
        "seccomp": int(reported.get("Seccomp", "0")),
        "dumpable": prctl("PR_GET_DUMPABLE"),
        "namespaces": spaces,
        "mounts": mounts(lines("/proc/self/mountinfo")),
        "interfaces": interfaces(lines("/proc/self/net/dev")),
        "descriptors": _descriptors(own),
        "landlock": landlock.abi_version(),
        "pid": os.getpid(),
        "hostname": name.nodename,
        "kernel": f"{name.sysname} {name.release} {name.version}",
        "python": sys.version.split()[0],
        "present": [*filter(os.path.lexists, hidden), *filter(_readable, masked)][:_MOST_PRESENT],
        # Whose kernel answers system calls: gVisor's only with both marks, else the host's.
        "system": "gvisor" if os.path.exists(_SENTRY) and (name.release, name.version) == _SENTRY_VERSION else "linux",
        # Values this kernel does not report are listed, and the plan must have expected exactly those.
        "unmeasured": [name for name in CAPABILITIES if name not in reported]
        + [f"namespace {name}" for name in _NAMESPACES if name not in spaces],
    }


def _readable(path: str) -> bool:
    """Return whether a file has readable content, or a folder entries."""
    try:
        if path.endswith("/"):
            return bool(os.listdir(path))
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb", 0) as file:
            return bool(file.read(1))
    except OSError:
        return False


def status(lines: list[str]) -> dict[str, str]:
    """Return the fields of a process's status, see proc_pid_status(5)."""
    pairs = (line.partition(":") for line in lines)
    return {key: value.strip() for key, _, value in pairs}


def capabilities(status: dict[str, str]) -> int:
    """Return the union of the five sets, as far as the kernel reports them."""
    union = 0
    for name in CAPABILITIES:
        union |= int(status.get(name, "0"), 16)
    return union


def namespace_number(link: str) -> int:
    """Return the inode number in a link of /proc/<pid>/ns: "net:[4026531840]", see namespaces(7)."""
    return int(link[link.index("[") + 1 : -1])


def namespaces() -> dict[str, int]:
    """Return the inode numbers of this process's namespaces, as far as the kernel reports them."""
    found = {}
    for name in _NAMESPACES:
        try:
            found[name] = namespace_number(os.readlink(f"/proc/self/ns/{name}"))
        except OSError:
            continue
    return found


def mounts(lines: list[str]) -> list[dict[str, Any]]:
    """Return target, type and writability of each mount."""
    found = []
    for line in lines:
        # proc_pid_mountinfo(5): 36 35 98:0 /root /target options [optional…] - type source super-options
        own, _, kind = line.partition(" - ")
        fields = own.split(" ")
        rest = kind.split(" ")
        read_only = "ro" in fields[5].split(",") or "ro" in rest[-1].strip().split(",")
        found.append({"target": fields[4], "type": rest[0], "writable": not read_only})
    return found


def interfaces(lines: list[str]) -> list[str]:
    """Return the names of the network interfaces in a net/dev, see proc_pid_net(5)."""
    return [line.partition(":")[0].strip() for line in lines if ":" in line]


def lines(path: str) -> list[str]:
    """Return the lines of a file of proc(5): a carriage return, of a program's name for instance, begins none."""
    return read(path).split("\n")[:-1]


def _descriptors(own: frozenset[int]) -> list[int]:
    found = []
    for number in sorted(map(int, os.listdir("/proc/self/fd"))):
        try:
            os.fstat(number)
        except OSError:
            continue  # the directory listing's own descriptor, closed by now
        if number > 2 and number not in own:
            found.append(number)
    return found[:64]
