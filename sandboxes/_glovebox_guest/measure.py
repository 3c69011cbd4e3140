"""Measures the isolation from inside, before any untrusted code runs. See ``contract.measure``."""

from __future__ import annotations

import os
import sys

from _glovebox_guest import landlock
from _glovebox_guest.kernel import prctl, read
from _glovebox_guest.stdlib import Any, Mapping

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
    names, words = namespaces(), os.uname()
    texts = {name: read(f"/proc/self/{name}") for name in ("mountinfo", "net/dev")}
    uname, sentry = (words.nodename, words.sysname, words.release, words.version), os.path.exists(_SENTRY)
    return {
        **_told(status(lines("/proc/self/status")), texts, names, uname, sentry),
        "uid": os.getuid() if os.getresuid() == (os.getuid(),) * 3 else -1,
        "gid": os.getgid() if os.getresgid() == (os.getgid(),) * 3 else -1,
        "groups": os.getgroups()[:64],
        "no_new_privs": prctl("PR_GET_NO_NEW_PRIVS") == 1,  # not every kernel has it in /proc
        "dumpable": prctl("PR_GET_DUMPABLE"),
        "descriptors": _descriptors(own),
        "landlock": landlock.abi_version(),
        "pid": os.getpid(),
        "python": sys.version.split()[0],
        "present": [*filter(os.path.lexists, hidden), *filter(_readable, masked)][:_MOST_PRESENT],
    }


def told(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the measurement in a ``ready`` message: as it is, or what process 1 in C has read, and does not parse.

    Raises LookupError, TypeError or ValueError where it is neither.
    """
    if "texts" not in said:
        return dict(said)
    # A character stands for each byte; see report_ready in process_1.c.
    parts = said["texts"].encode("latin-1").decode("utf-8", "surrogateescape").split("\0")
    (reported, mountinfo, devices), parts = parts[:3], parts[3:]
    links, parts = parts[: len(_NAMESPACES)], parts[len(_NAMESPACES) :]
    numbers, *uname, python = parts[:6]
    # Two lists, an empty part after each.
    end = parts.index("", 6)
    descriptors, present = parts[6:end], parts[end + 1 : -1]
    texts = {"mountinfo": mountinfo, "net/dev": devices}
    ids = status(_split(reported))
    pid, no_new_privs, dumpable, landlocked, sentry = map(int, numbers.split())
    spaces = dict(zip(_NAMESPACES, map(namespace_number, links), strict=True))
    return {
        **_told(ids, texts, spaces, tuple(uname), sentry == 1),
        "uid": _only(ids["Uid"]),
        "gid": _only(ids["Gid"]),
        "groups": [int(number) for number in ids["Groups"].split()][:64],
        "no_new_privs": no_new_privs == 1,
        "dumpable": dumpable,
        "descriptors": sorted(map(int, descriptors))[:64],
        "landlock": max(0, landlocked),
        "pid": pid,
        "python": python,
        "present": present[:_MOST_PRESENT],
    }


def _only(numbers: str) -> int:
    """Return the number that real, effective, saved and file system's are; else -1."""
    found = set(map(int, numbers.split()))
    return found.pop() if len(found) == 1 else -1


def _told(
    reported: dict[str, str], texts: Mapping[str, str], spaces: dict[str, int], uname: tuple[str, ...], sentry: bool
) -> dict[str, Any]:
    """Return what is in files of proc(5), and follows from it."""
    node, system, release, version = uname
    return {
        "capabilities": capabilities(reported),
        "seccomp": int(reported.get("Seccomp", "0")),
        "namespaces": spaces,
        "mounts": mounts(_split(texts["mountinfo"])),
        "interfaces": interfaces(_split(texts["net/dev"])),
        "hostname": node,
        "kernel": f"{system} {release} {version}",
        # Whose kernel answers system calls: gVisor's only with both marks, else the host's.
        "system": "gvisor" if sentry and (release, version) == _SENTRY_VERSION else "linux",
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
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


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
    return _split(read(path))


def _split(text: str) -> list[str]:
    return text.split("\n")[:-1]


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
