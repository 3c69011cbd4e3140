"""Makes an environment's lock: pip's resolver chooses versions, and names every file by hash for each Python.

It reads the metadata of wheels alone. No package is built or imported, so none of its code runs.
"""

import json
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.runtime import packages
from glovebox_sandboxes.runtime.environments import Environment

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_VERSION = re.compile(r"[A-Za-z0-9.!+_-]+")
_HASH = re.compile(r"[0-9a-f]{64}")


async def write(environment: Environment, python: Path, tell: Callable[[str], None]) -> int:
    """Make the lock anew, with the newest versions the file allows; return its number of packages.

    The sandboxes' interpreter, ``python``, decides on versions; ``tell`` gets one sentence a step.

    Raises:
        SandboxError: there is no pip, or the packages have no wheels for one of its Pythons.
        OSError: the lock cannot be written.
    """
    own = json.loads(await packages.output([str(python), "-I", "-c", _SERIES]))
    serieses = environment.python or (own,)
    machines = environment.machines or (platform.machine(),)
    targets = [(series, machine) for series in serieses for machine in machines]
    here = (own, platform.machine())
    targets.sort(key=lambda target: target != here)  # first: its markers are those that are true here
    wanted: Iterable[str] = environment.packages
    versions: dict[str, str] = {}
    files: dict[str, set[str]] = {}
    for series, machine in targets:
        tell(f"Choosing files for Python {series} on {machine}")
        found = _files(await _report(wanted, series, machine, python, dependencies=not versions))
        versions = versions or {name: version for name, (version, _) in found.items()}
        wanted = [f"{name}=={version}" for name, version in versions.items()]
        for name, (_, digest) in found.items():
            files.setdefault(name, set()).add(digest)
    text = _HEAD.format(each=environment, pythons=", ".join(serieses), machines=" and ".join(machines))
    for name in sorted(versions):
        hashes = " \\\n".join(f"    --hash=sha256:{digest}" for digest in sorted(files[name]))
        text += f"{name}=={versions[name]} \\\n{hashes}\n"
    new = environment.lock.with_suffix(".lock.new")
    new.write_text(text)
    new.replace(environment.lock)
    return len(versions)


_SERIES = "import json, sys; print(json.dumps('%d.%d' % sys.version_info[:2]))"
_HEAD = """\
# Every file that may be installed for {each.path.name}, by hash. Written by `glovebox environment update {each.name}`.
# CPython {pythons}; Linux (glibc 2.28 or newer) on {machines}.
# Fits {each.fits}

"""


async def _report(
    wanted: Iterable[str], series: str, machine: str, python: Path, *, dependencies: bool
) -> list[dict[str, Any]]:
    # Dependencies may differ by the Python that asks: ours if it is like the sandboxes'.
    ours = Path(sys.executable)
    pip = await packages.find_pip((ours, python) if _own() in python.name else (python, ours))
    if not pip:
        raise SandboxError("Choosing packages", packages.NO_PIP, packages.GET_PIP)
    with tempfile.TemporaryDirectory(prefix="glovebox-lock-") as scratch:
        command = [
            *pip, "install", "--disable-pip-version-check", "--quiet", "--dry-run", "--ignore-installed",
            "--report", f"{scratch}/report", "--target", f"{scratch}/nowhere", *packages.WHEELS,
            *packages.tags(series, machine), *([] if dependencies else ["--no-deps"]), *wanted,
        ]  # fmt: skip
        await packages.output(command, cwd="/")
        install: list[dict[str, Any]] = json.loads(Path(scratch, "report").read_bytes())["install"]  # noqa: ASYNC240 - once
    return install


def _own() -> str:
    return f"python{sys.version_info.major}.{sys.version_info.minor}"


def _files(install: list[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return the version and hash of each package in pip's report, by normalized name.

    Format: https://pip.pypa.io/en/stable/reference/installation-report/
    """
    found = {}
    for each in install:
        name, version = str(each["metadata"]["name"]), str(each["metadata"]["version"])
        archive = each["download_info"].get("archive_info") or {}
        # Before pip 23.1 there is only the former.
        digest = str(archive.get("hash") or "").removeprefix("sha256=")
        digest = str((archive.get("hashes") or {}).get("sha256") or digest)
        if not (_NAME.fullmatch(name) and _VERSION.fullmatch(version) and _HASH.fullmatch(digest)):
            fix = "Use an index that gives hashes, or report this as a bug."
            raise SandboxError(f"Locking {name!r} {version!r}", "pip names no file with a SHA-256 for it", fix)
        found[re.sub(r"[-_.]+", "-", name).lower()] = version, digest
    return found
