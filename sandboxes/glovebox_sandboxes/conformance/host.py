"""Plants things on the host, while cases run, that a sandbox must not change, read, reach or see."""

import hashlib
import os
import secrets
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import anyio

CANARY = "GLOVEBOX_CONFORMANCE_CANARY"
"""Environment variable of this process that no sandbox may see, and the mark of every planted thing."""
EARLIER = ("earlier.txt", b"from an earlier call\n")

_FILES: Mapping[str, bytes] = {
    "data.csv": b"name,value\na,1\n",
    "run.sh": b"#!/bin/sh\necho told\n",
    "folder/inner.txt": b"inner\n",
    ".git/config": b"[core]\n",
    ".env": b"KEY=planted\n",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """A host with planted secrets."""

    root: Path
    workspace: Path
    names: Mapping[str, Any]
    """``HOST`` of the programs: where to find what is planted."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Name → why it could not be planted on this host, so a case about it can show nothing here."""

    def fingerprint(self) -> str:
        """Return a digest over all planted files: names, kinds, modes, times and contents."""
        found = hashlib.sha256()
        for path in sorted(self.root.rglob("*")):
            status = path.lstat()
            found.update(f"{path} {status.st_mode} {status.st_uid} {status.st_nlink} {status.st_mtime_ns}\n".encode())
            if stat.S_ISREG(status.st_mode):
                found.update(path.read_bytes())
        return found.hexdigest()


def fill(workspace: Path, secret: Path) -> None:
    """Make a workspace: a few files, and a link to a file outside of it."""
    for name, content in _FILES.items():
        path = workspace / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        # Writable by all: only the mount keeps a sandbox from it.
        path.chmod(0o777)
        path.parent.chmod(0o777)
    (workspace / "outside").symlink_to(secret)


@asynccontextmanager
async def planted() -> AsyncIterator[Planted]:
    """Plant, for the length of the block: files, listeners on every kind of socket, a process, a variable."""
    canary = secrets.token_hex(16)
    with ExitStack() as stack:
        root, names, absent = _plant(stack, canary)
        sleeper = [sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read()", f"{CANARY}={canary}"]
        async with await anyio.open_process(sleeper, stdout=None, stderr=None) as neighbour:
            names["neighbour"] = neighbour.pid
            yield Planted(root=root, workspace=root / "workspace", names=names, absent=absent)


def _plant(stack: ExitStack, canary: str) -> tuple[Path, dict[str, Any], dict[str, str]]:
    root = Path(tempfile.mkdtemp(prefix="glovebox-conformance-"))
    stack.callback(shutil.rmtree, root)
    # Sandboxes are another user outside: neither the modes of these files nor our umask must keep them out.
    root.chmod(0o755)
    secret = root / "secret.txt"
    secret.write_text(canary)
    secret.chmod(0o644)
    fill(root / "workspace", secret)
    names: dict[str, Any] = {
        "root": str(root),
        "secret": str(secret),
        "shared": f"/dev/shm/glovebox-{canary}",  # noqa: S108 - the host's own, on purpose
        "canary_name": CANARY,
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
        "abstract": f"\0glovebox-{canary[:8]}",
        "unix": str(root / "listener.sock"),
        "tcp": 0,
    }

    def share() -> None:
        shared = Path(names["shared"])
        shared.write_text(canary)
        stack.callback(shared.unlink)
        shared.chmod(0o644)

    def listen() -> None:
        _listen(stack, socket.AF_UNIX, names["unix"])
        Path(names["unix"]).chmod(0o777)

    absent = {}
    planting: Mapping[str, Callable[[], object]] = {
        "shared": share,
        "unix": listen,
        "abstract": lambda: _listen(stack, socket.AF_UNIX, names["abstract"]),
        "tcp": lambda: names.update(tcp=_listen(stack, socket.AF_INET, ("127.0.0.1", 0))[1]),
    }
    for name, plant in planting.items():
        try:
            plant()
        except OSError as problem:
            # No /dev/shm, a TMPDIR too long for a socket's name, an outer sandbox: the other cases lose nothing by it.
            absent[name] = f"{name} could not be planted on this host: {problem.strerror or problem}"
    stack.enter_context(mock.patch.dict(os.environ, {CANARY: canary}))
    return root, names, absent


def _listen(stack: ExitStack, family: int, address: Any) -> Any:
    listener = stack.enter_context(socket.socket(family))
    listener.bind(address)
    # Without accept(2): a connection that gets into the queue has got through.
    listener.listen(8)
    return listener.getsockname()
