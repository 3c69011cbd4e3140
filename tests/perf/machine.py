"""What numbers belong to: the machine, what runs on it, and which revision was measured."""

import os
import platform
import re
import shutil
import subprocess  # noqa: TID251 - asks programs for their versions
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from glovebox_sandboxes.runtime import guest_tree

ROOT = Path(__file__).parents[2]


def facts(drivers: Mapping[str, str]) -> dict[str, str]:
    """Name → what it is, for a person; drivers by name with their version."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())
    load = ", ".join(f"{each:.2f}" for each in os.getloadavg())
    searches = shutil.which("rg")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "revision": revision(),
        "processor": f"{os.cpu_count()} × {model[1] if model else platform.machine()}",
        "memory": f"{int(memory[1]) / 2**20:.1f} GiB" if memory else "unknown",
        "load": f"{load} when the run began",
        "kernel": f"{platform.system()} {platform.release()}",
        "server": f"glovebox {version('glovebox-mcp')}, mcp {version('mcp')}",
        "python": f"{platform.python_version()}, for server and client",
        "process 1": "in C" if guest_tree.process_1()[0] else "in Python",
        "search": _said([searches, "--version"]) if searches else _said(["grep", "--version"]),
        **drivers,
    }


def revision() -> str:
    """Of git, with a word where files differ from it; "unknown" outside a clone."""
    found = _said(["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"])
    changed = _said(["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"])
    return f"{found or 'unknown'}{' and changes' if changed else ''}"


def _said(argv: list[str]) -> str:
    """The first line of what a program prints, empty where it cannot."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""
