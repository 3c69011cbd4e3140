"""Plain words for a profile's keys and values, shared by ``explain`` and ``diff``. Pure text."""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from glovebox_profiles.egress import EgressRule
from glovebox_profiles.egress.targets import DEFAULT_PORTS
from glovebox_profiles.model import Credential, Revealed

LABELS = {
    "tool": "Tool",
    "description": "Description",
    "risk": "Stated risk",
    "isolation": "Accepted isolation, preferred first",
    "approval": "Approval by a person",
    "files.workspace": "Workspace",
    "files.output": "Giving files back",
    "files.scan": "Looking into files given back",
    "files.inputs": "Taking files of earlier calls as input",
    "files.reveal": "Files shown though named as secrets are",
    "network.mode": "Network",
    "network.allow": "Hosts it may reach",
    "network.tls": "Programs' own TLS",
    "network.max_bytes": "Size of one response",
    "network.max_redirects": "Redirects followed",
    "network.max_connections": "Connections in all",
    "network.credential": "Keys lent to its requests",
    "limits.wall_seconds": "Seconds of real time",
    "limits.cpu_seconds": "Seconds of processor time",
    "limits.memory": "Memory",
    "limits.pids": "Processes and threads at a time",
    "limits.processors": "Processors at a time",
    "limits.scratch": "Scratch space in /tmp",
    "limits.workspace.bytes": "Size of the workspace's copy",
    "limits.workspace.files": "Files in the workspace's copy",
    "limits.output.bytes": "Size of all files given back",
    "limits.output.files": "Number of files given back",
    "limits.stream": "Kept of stdout and of stderr, each",
    "limits.enforce": "Required enforcement of limits",
    "python.environment": "Python packages",
    "python.start": "Sandboxes",
    "python.preload": "Modules imported ahead of the call",
    "audit.keep": "Recorded in full in the audit log",
    "result.redact": "Secrets in output",
    "example": "Examples",
}
"""Names of the keys for a reviewer."""

_SIZES = {"network.max_bytes", "limits.memory", "limits.scratch", "limits.workspace.bytes", "limits.output.bytes",
          "limits.stream"}  # fmt: skip
_CHOICES: dict[str, dict[Any, str]] = {
    "approval": {"ask": "asked for before every call", "none": "not asked for"},
    "files.workspace": {"none": "not visible", "read": "readable", "overlay": "readable, with writes kept apart"},
    "python.start": {"cold": "started when a call comes", "warm": "ready before a call comes"},
    "files.output": {False: "no", True: "yes"},
    "files.scan": {False: "no", True: "yes"},
    "files.inputs": {False: "no", True: "yes"},
    "network.mode": {"none": "none at all", "egress": "the listed hosts only"},
    "network.tls": {"tunnel": "passed unread, by CONNECT rules only", "inspect": "ended inside, each request decided"},
    "result.redact": {"refuse": "withhold the result", "mask": "are replaced by their kind", "none": "are given back"},
    "limits.enforce": {
        "cgroup": "for the sandbox as a whole (cgroup)",
        "any": "per process where the host has no cgroup",
    },
}


@lru_cache(256)
def size(count: int) -> str:
    """Write a number of bytes in the largest unit that keeps it whole: ``512 MiB``."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= factor and count % factor == 0:
            return f"{count // factor} {unit}"
    return f"{count} bytes"


@lru_cache(256)
def number(value: float) -> str:
    """Write a number without a fraction that is zero."""
    return f"{value:g}" if value == int(value) and value < 1e6 else str(value)  # noqa: PLR2004 - where :g turns to 1e+06


def rule(each: EgressRule) -> str:
    """Write one egress rule: ``https://pypi.org (GET, HEAD; only /simple/*)``."""
    usual = {DEFAULT_PORTS[scheme] for scheme in each.schemes}
    ports = "" if each.ports == usual else ":" + "|".join(str(port) for port in sorted(each.ports))
    paths = "" if each.paths == {"/*"} else f"; only {', '.join(sorted(each.paths))}"
    methods = ", ".join("CONNECT (any TLS traffic)" if name == "CONNECT" else name for name in sorted(each.methods))
    return f"{'|'.join(sorted(each.schemes))}://{each.host}{ports} ({methods}{paths})"


def credential(each: Credential) -> str:
    """Write a credential's requests: ``github for https://api.github.com (GET; only /repos/*)``, with its headers."""
    return f"{each.name} for {rule(each.rule())}{''.join(f'; {text}' for text in headers(each))}"


def headers(each: Credential) -> tuple[str, ...]:
    """Write the further headers of requests with a credential."""
    fixed = [f"{name}: {text}" for name, text in sorted(each.set_headers.items())]
    return (
        *((f"the program's {listed(each.headers)}",) if each.headers else ()),
        *((f"always {listed(fixed)}",) if fixed else ()),
    )


def revealed(each: Revealed) -> str:
    """Write one file that is shown, with the reason: ``config/.env (the tests read it)``."""
    return f"{each.path} ({each.reason.rstrip('.')})"


def listed(items: Iterable[str], *, none: str = "nothing") -> str:
    """Join items with commas; name the empty list."""
    return ", ".join(items) or none


_LISTS: dict[str, tuple[Callable[[Any], str], str]] = {
    "network.allow": (rule, "no host"),
    "network.credential": (credential, "none"),
    "files.reveal": (revealed, "none"),
}


def value(key: str, given: Any) -> str:
    """Write the value of one key in words."""
    if key in _CHOICES:
        return _CHOICES[key][given]
    if key in _SIZES:
        return size(given)
    if key in _LISTS:
        write, none = _LISTS[key]
        return listed(map(write, given), none=none)
    if key == "example":
        return f"{len(given)}"
    if isinstance(given, tuple):
        return listed(given)
    return str(given) if isinstance(given, str) else number(given)
