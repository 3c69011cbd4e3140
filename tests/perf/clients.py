"""Servers of our own and clients of them: over stdio as a person's client has it, over HTTP with as little as possible.

Each server has a directory of its own with profiles, workspace and state. Knows no row.
"""

import json
import re
import subprocess  # noqa: TID251 - a whole server process is what is measured
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from tests.perf.bare import environment
from tests.perf.sides import OURS, Side

START_SECONDS = 120.0
"""For a server to listen, and for a first call: a driver is probed in it, and may have to put a guest in place."""
RESTS = {"docker": 1.5, "gvisor": 3.0}
"""Seconds after a call by which the next sandbox is ready; other drivers keep up without."""
END_SECONDS = 60.0  # for a server to end in good order
_HEAD_BYTES = 64 * 1024
_READ_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One server: where it keeps things, and how it differs from what is shipped."""

    directory: Path
    workspace: Path
    driver: str = "bubblewrap"
    preload: tuple[str, ...] | None = None
    """Modules that ``run_python`` preloads; None for those of the shipped profile."""
    cold: bool = False  # whether its profiles say that every sandbox is started for its call
    spans: Path | None = None
    """Where the server is to write how long the parts of each call took; it is a plain one else."""
    side: Side = OURS  # the revision that is run
    processes: int = 1  # over HTTP; an earlier revision knows no others

    def command(self, *more: str) -> list[str]:
        """The server's command line."""
        places = ["--profiles-dir", str(self.directory / "profiles"), "--workspace", str(self.workspace)]
        places += ["--state-dir", str(self.directory / "state")]
        arguments = ["serve", *places, *more]
        if self.spans is None:
            return self.side.command(*arguments)
        return [self.side.python, "-m", "tests.perf.serving", str(self.spans), *arguments]

    def make_token(self, name: str = "default") -> str:
        """Have the revision make a token, in its own format."""
        made = ("token", "create", name, "--json", "--state-dir", str(self.directory / "state"))
        return str(json.loads(self.side.said(self.side.command(*made)))["token"])

    def write(self) -> None:
        """Make the directory, with the shipped profiles of the revision, changed to this driver and this start."""
        own = self.directory / "profiles"
        own.mkdir(parents=True, mode=0o755, exist_ok=True)
        shipped_profiles = list((self.side.root / self.side.layout.profiles).glob("*.toml"))
        if not shipped_profiles:
            raise FileNotFoundError(f"there are no profiles in {self.side.root / self.side.layout.profiles}")
        for shipped in shipped_profiles:
            (own / shipped.name).write_text(adapted(shipped.read_text(), self))


def adapted(profile: str, setup: Setup) -> str:
    """A shipped profile for one driver alone, and for what else the setup asks."""
    profile = re.sub(r"(?m)^isolation = [^#\n]*", f'isolation = ["{setup.driver}"] ', profile)
    preload = () if setup.cold else setup.preload
    if preload is not None:
        profile = re.sub(r"(?m)^preload = .*$", f"preload = {json.dumps(preload)}", profile)
    if setup.cold:
        profile = re.sub(r'(?m)^start = "warm"', 'start = "cold"', profile)
    return profile


@asynccontextmanager
async def over_stdio(setup: Setup) -> AsyncIterator[Client]:
    """A client as people have it: the SDK's, which starts the server itself."""
    setup.write()
    command = setup.command()
    parameters = StdioServerParameters(
        command=command[0], args=command[1:], env=setup.side.env, cwd=str(setup.side.root)
    )
    # What a server says to its operator is kept beside its state, for whoever wonders.
    with (setup.directory / "log").open("a", encoding="utf-8") as log:
        async with Client(stdio_client(parameters, errlog=log)) as client:
            yield client


async def answered(client: Client, tool: str, arguments: dict[str, Any], driver: str) -> dict[str, Any]:
    """One whole call; its result."""
    result = await client.call_tool(tool, arguments)
    found: dict[str, Any] = result.structured_content or {}
    isolation = found.get("isolation") or {}
    if result.is_error or not isolation.get("verified") or isolation.get("driver") != driver:
        raise RuntimeError(f"{tool} on {driver}: {str(found or result.content)[:400]}")
    return found


async def printed(client: Client, code: str, expected: str, driver: str) -> float:
    """Milliseconds of one whole call of ``run_python``."""
    began = time.perf_counter()
    found = await answered(client, "run_python", {"code": code}, driver)
    spent = (time.perf_counter() - began) * 1000
    if found["stdout"]["text"] != expected:
        raise RuntimeError(f"a program printed {found['stdout']['text'][:100]!r}")
    return spent


@dataclass(slots=True, kw_only=True)
class Listening:
    """A server that serves HTTP."""

    pid: int
    port: int
    token: str
    setup: Setup
    streams: list[anyio.abc.SocketStream] = field(default_factory=list)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator["Caller"]:
        """One connection that is kept."""
        async with await anyio.connect_tcp("127.0.0.1", self.port) as stream:
            yield Caller(stream, self.port, self.token)


@asynccontextmanager
async def over_http(setup: Setup) -> AsyncIterator[Listening]:
    """A server for any number of callers; ends it by SIGTERM."""
    setup.write()
    token = setup.make_token()
    log = setup.directory / "log"
    several = ("--processes", str(setup.processes)) if setup.side is OURS else ()
    with log.open("wb") as sink:
        process = subprocess.Popen(  # noqa: ASYNC220 - it starts at once
            setup.command("--transport", "http", "--port", "0", *several), cwd=setup.side.root,
            stdin=subprocess.DEVNULL, stderr=sink,
            env={**environment(("PATH", "HOME", "USER", "LANG")), **setup.side.env},
        )  # fmt: skip
    try:
        port = await _said(process, log, r"url=http://127\.0\.0\.1:(\d+)")
        yield Listening(pid=process.pid, port=int(port), token=token, setup=setup)
        process.terminate()
        with anyio.fail_after(END_SECONDS):
            await anyio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
    finally:
        process.kill()
        process.wait()


async def _said(process: "subprocess.Popen[bytes]", log: Path, pattern: str) -> str:
    with anyio.fail_after(START_SECONDS):
        while process.poll() is None:
            found = re.search(pattern, log.read_text(errors="replace"))
            if found:
                return found[1]
            await anyio.sleep(0.02)
    raise RuntimeError(f"a server ended at once: {log.read_text(errors='replace')[-500:]}")


class Caller:
    """One caller over streamable HTTP: bytes that were put together once, and the least that finds the answer's end.

    It shares its processors with what it measures, so it may cost next to nothing; an SDK's client would cost more than
    the server.
    """

    def __init__(self, stream: anyio.abc.ByteStream, port: int, token: str) -> None:
        """Take an open connection."""
        self._stream = stream
        self._port = port
        self._token = token
        self._pending = b""
        self.head = b""
        """Of the last answer, in lower case."""

    def request(self, code: str) -> bytes:
        """One call of ``run_python``, as bytes."""
        return self._asked(
            "tools/call", {"name": "run_python", "arguments": {"code": code}}, "Mcp-Name: run_python\r\n"
        )

    def listing(self) -> bytes:
        """A request for the list of tools, as bytes."""
        return self._asked("tools/list", {}, "")

    def _asked(self, method: str, params: dict[str, Any], headers: str) -> bytes:
        meta = {"io.modelcontextprotocol/protocolVersion": _PROTOCOL, "io.modelcontextprotocol/clientCapabilities": {}}
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params | {"_meta": meta}}
        body = json.dumps(message).encode()
        head = (
            f"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nAuthorization: Bearer {self._token}\r\n"
            f"Accept: application/json, text/event-stream\r\nContent-Type: application/json\r\n"
            f"Mcp-Protocol-Version: {_PROTOCOL}\r\nMcp-Method: {method}\r\n{headers}"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def call(self, request: bytes) -> bytes:
        """Send a request and return the body of its answer."""
        await self._stream.send(request)
        head = (await self._until(lambda data: data.find(b"\r\n\r\n") + 4 if b"\r\n\r\n" in data else 0)).lower()
        self.head = head
        if not head.startswith(b"http/1.1 200"):
            raise RuntimeError(f"the server answered {head[:200]!r}")
        length = re.search(rb"content-length: (\d+)", head)
        if length:
            return await self._until(lambda data: int(length[1]) if len(data) >= int(length[1]) else 0)
        if b"transfer-encoding: chunked" in head:
            return await self._until(_chunks)
        raise RuntimeError("an answer has no length")

    async def _until(self, end: Callable[[bytes], int]) -> bytes:
        while not (found := end(self._pending)):
            self._pending += await self._stream.receive(_READ_BYTES)
        taken, self._pending = self._pending[:found], self._pending[found:]
        return taken


_PROTOCOL = "2026-07-28"


def _chunks(data: bytes) -> int:
    """Where the last chunk ends, 0 where it is not there yet (RFC 9112, section 7.1; without trailers)."""
    at = 0
    while (line := data.find(b"\r\n", at)) >= 0:
        size = int(data[at:line], 16)
        at = line + 2 + size + 2
        if at > len(data):
            return 0
        if size == 0:
            return at
    return 0


def succeeded(answer: bytes, expected: str) -> bool:
    """Whether an answer is a result of a program that printed this, in a sandbox that was verified."""
    return json.dumps(expected).encode() in answer and b'"verified":true' in answer.replace(b" ", b"")


def family(pid: int) -> Sequence[int]:
    """A process's descendants, now, see proc_pid_task_children(5)."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = children(waiting.pop())
        found += below
        waiting += below
    return found


def children(pid: int) -> list[int]:
    """A process's children; none where it has ended."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []
