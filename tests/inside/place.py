"""A place from which a normal user can run Glovebox, and what is started there: helpers of these tests.

The tests' own directories may be root's alone. A user gets copies of what belongs to them, and sees the program through
mounts that nobody else sees.
"""

import json
import os
import subprocess  # noqa: TID251 - the programs under test are started as people start them
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx2
import mcp_types as types
from mcp import Client, StdioServerParameters
from mcp.client import Transport
from mcp.client.streamable_http import streamable_http_client

from glovebox_sandboxes.runtime import runtime
from glovebox_server.mcp.catalogue import CAPABILITIES_URI

#: Nobody's number on any machine that runs tests.
USER = 61_234
REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = sys.executable
GLOVEBOX = (PYTHON, "-m", "glovebox_server")
#: What a program has to find: itself, its interpreter and its packages.
PROGRAM = tuple(dict.fromkeys(Path(each) for each in (REPOSITORY, sys.prefix, sys.base_prefix)))
#: Far above what any of these needs; it only ends a test that hangs.
SECONDS = 100
CODE = "import os\nopen('/output/kept.txt', 'w').write('kept')\nprint(os.getpid())\n6 * 7"

# In mounts of its own, every directory that others may not enter is covered, and what is needed in it put back.
_REACH = """
stage=$1; shift
mount -t tmpfs -o mode=0755 none "$stage"
while [ "$1" != -- ]; do
    mkdir -p "$stage/$1"
    mount --rbind "$1" "$stage/$1"
    shift
done
shift
while [ "$1" != -- ]; do mount -t tmpfs -o mode=0755 none "$1"; shift; done
shift
while [ "$1" != -- ]; do
    mkdir -p "$1"
    mount --rbind "$stage/$1" "$1"
    shift
done
shift
umount -l "$stage"
exec "$@"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Directories of one user, and the command that becomes that user."""

    root: Path
    data: Path
    become: tuple[str, ...]

    def environment(self) -> dict[str, str]:
        """All that a program is told. Docker is out of reach, so that a call shows what bubblewrap does."""
        return {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(self.root / "home"),
            "GLOVEBOX_WORKSPACE": str(self.root / "workspace"),
            "GLOVEBOX_DATA_DIR": str(self.data),
            "GLOVEBOX_STATE_DIR": str(self.root / "state"),
            "DOCKER_HOST": "unix:///nonexistent/docker.sock",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def run(self, *argv: str, around: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        """Run one program as the user, inside what ``around`` makes."""
        return subprocess.run(
            [*self.become, *around, *argv], env=self.environment(), cwd=REPOSITORY, capture_output=True, text=True,
            check=False, timeout=SECONDS, stdin=subprocess.DEVNULL,
        )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Seen:
    """What Glovebox said and did in one situation."""

    doctor: dict[str, Any] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)
    """What a client can read of the server before it calls."""
    result: dict[str, Any] = field(default_factory=dict)
    words: str = ""
    """What the client was told, as text."""

    @property
    def driver(self) -> dict[str, Any]:
        """What doctor says of bubblewrap."""
        (found,) = (each for each in self.doctor["drivers"] if each["driver"] == "bubblewrap")
        return dict(found)

    @property
    def fatal(self) -> tuple[str, str]:
        """The one reason for which bubblewrap cannot be used, and the fix."""
        (found,) = (each for each in self.driver["missing"] if each["fatal"])
        return found["what"], found["fix"]

    @property
    def tool(self) -> dict[str, Any]:
        """What the manifest says of run_python."""
        (found,) = (each for each in self.manifest["tools"] if each["name"] == "run_python")
        return dict(found)


async def look(place: Place, around: Sequence[str] = (), *, environment: Mapping[str, str] | None = None) -> Seen:
    """Ask doctor, read the manifest and make one real call as a client over stdio, all inside ``around``."""
    seen = Seen()
    command = [*place.become, *around, *GLOVEBOX]
    environment = {**place.environment(), **(environment or {})}

    async def doctor() -> None:
        done = await anyio.run_process([*command, "doctor", "--json"], env=environment, cwd=REPOSITORY, check=False)
        assert done.stdout, done.stderr.decode()
        seen.doctor = json.loads(done.stdout)

    async def call() -> None:
        server = StdioServerParameters(
            command=command[0], args=[*command[1:], "serve"], env=environment, cwd=REPOSITORY
        )
        await ask(seen, server)

    with anyio.fail_after(SECONDS):
        async with anyio.create_task_group() as tasks:
            for each in (doctor, call):
                tasks.start_soon(each)
    return seen


async def ask(seen: Seen, server: StdioServerParameters | Transport) -> None:
    """Read the manifest and make one real call as a client of this server."""
    async with Client(server) as client:
        (manifest,) = (await client.read_resource(CAPABILITIES_URI)).contents
        result = await client.call_tool("run_python", {"code": CODE})
    assert isinstance(manifest, types.TextResourceContents)
    seen.manifest = json.loads(manifest.text)
    seen.result = dict(result.structured_content or {})
    seen.words = "\n".join(getattr(block, "text", "") for block in result.content)


async def ask_over_http(seen: Seen, url: str, token: str) -> None:
    """The same of a server that runs already.

    Args:
        seen: where it is put.
        url: base URL, without a trailing slash.
        token: bearer token.
    """
    async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {token}"}, timeout=SECONDS, verify=False) as http:
        await ask(seen, streamable_http_client(f"{url}/mcp", http_client=http))


def assert_reached(seen: Seen, limits: str) -> None:
    """A whole call was made, its isolation measured, and all three sources say by what its limits hold."""
    assert seen.driver["usable"], seen.driver["missing"]
    assert seen.driver["limits"]["memory_bytes"] == limits
    assert (seen.tool["runs"], seen.tool["driver"], seen.tool["level"]) == (True, "bubblewrap", "namespaces")
    assert seen.tool["limits"]["memory_bytes"]["by"] == limits
    assert seen.result["value"] == "42", seen.words
    assert seen.result["isolation"]["verified"] is True
    assert seen.result["isolation"]["driver"] == "bubblewrap"
    assert [each["name"] for each in seen.result["artifacts"]] == ["kept.txt"]


def assert_refused(seen: Seen, reason: str, fix: str) -> None:
    """Nothing ran, and all three sources say why, and what to do, in the same words."""
    what, told = seen.fatal
    assert reason in what
    assert fix in told
    assert seen.tool["runs"] is False
    assert "value" not in seen.result
    for words in (seen.tool["refused"], seen.words):
        assert reason in words
        assert fix in words


@contextmanager
def made(built: Path, *, user: bool) -> Iterator[Place]:
    """A place of a normal user (a made-up one where the tests are root), or of whoever runs the tests.

    Args:
        built: the tests' own data directory.
        user: a normal user, with a runtime of its own as `glovebox setup` makes it.
    """
    root = Path(tempfile.mkdtemp(prefix="glovebox-inside-"))
    try:
        root.chmod(0o755)
        for name in ("home", "workspace", "state", "data"):
            (root / name).mkdir(mode=0o700 if name == "state" else 0o755)
        (root / "workspace/data.csv").write_text("a,b\n1,2\n")
        if not user:
            yield Place(root=root, data=built, become=())
            return
        _furnish(root, built)
        yield Place(root=root, data=root / "data", become=_become(root) if os.geteuid() == 0 else ())
    finally:
        # Ten thousand files: Python would take several times as long, here and below.
        subprocess.run(["/bin/rm", "-rf", root], check=True)


def _furnish(root: Path, built: Path) -> None:
    found = runtime.find(built)
    assert found is not None
    for name in (each.name for each in found.directories):
        subprocess.run(["/bin/cp", "-a", "--reflink=auto", built / name, root / "data"], check=True)
    if os.geteuid() == 0:
        subprocess.run(["/bin/chown", "-R", f"{USER}:{USER}", root], check=True)


def _become(root: Path) -> tuple[str, ...]:
    closed = dict.fromkeys(
        above for path in PROGRAM for above in reversed(path.parents) if not above.stat().st_mode & 1
    )
    needed = [str(path) for path in PROGRAM if any(above in path.parents for above in closed)]
    # The outermost alone: what is below it is gone with it.
    covers = [str(path) for path in closed if not any(other in path.parents for other in closed)]
    reach = ("/usr/bin/unshare", "--mount", "/bin/sh", "-euc", _REACH, "reach", str(root / "home"))
    lists = (*needed, "--", *covers, "--", *needed, "--")
    return (*reach, *lists, "/usr/bin/setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups")
