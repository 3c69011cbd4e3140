"""Several server processes behind one socket: real processes and clients; only sandboxes are missing."""

import contextlib
import json
import re
import signal
import socket
import subprocess  # noqa: TID251 - a whole command is what is tested
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from http.client import parse_headers
from itertools import count, product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import anyio.abc
import httpx2
import psutil
import pytest
from anyio.abc import SocketAttribute
from mcp import Client
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from tests.fixtures.audit_logs import log_lines
from tests.interaction import served as harness
from tests.interaction.node import ROOT, fake_server
from tests.interaction.served import Served, first_of_two, served

from glovebox_audit import writers
from glovebox_server.transport import http_timeouts
from glovebox_server.transport.processes import Seat

NUMBERS = count()
SECONDS = 60.0
"""Longest wait for processes that share their processors with whatever else runs."""
until = partial(harness.until, within=SECONDS)
ENDS = {"call.finished", "call.cancelled", "call.lost"}


@dataclass(slots=True, kw_only=True)
class Several:
    """A running parent of two processes."""

    url: str
    tokens: dict[str, str]
    parent: psutil.Process

    @property
    def headers(self) -> dict[str, str]:
        """What names alice."""
        return {"Authorization": f"Bearer {self.tokens['alice']}"}

    def living(self) -> dict[int, psutil.Process]:
        """Its processes, by their place in time: at first that is their number."""
        return dict(enumerate(sorted(self.parent.children(), key=lambda each: (each.create_time(), each.pid))))


@asynccontextmanager
async def several(directory: Path, lost: int = 0) -> AsyncIterator[Several]:
    """Run two processes; SIGTERM to their parent ends all in good order, and every call has one end, ``lost`` that."""
    command = ["nohup", *fake_server("http*2", directory, "alice", "bob")]
    process = await anyio.open_process(command, cwd=ROOT, stderr=None)
    try:
        assert process.stdout is not None
        found = json.loads(await process.stdout.receive())
        server = Several(url=found["url"], tokens=found["tokens"], parent=psutil.Process(process.pid))
        await until(lambda: (directory / "up").read_text() == "up\n" * 2)
        process.send_signal(signal.SIGHUP)  # which is ignored, as asked
        yield server
        living = server.living().values()
        process.terminate()
        with anyio.fail_after(SECONDS):
            assert await process.wait() == 0
        assert len(living) == 2
        assert not [each for each in living if each.is_running()]
        assert not _writers(directory)
    finally:
        if process.returncode is None:
            process.kill()
        await process.aclose()
    records = [json.loads(line) for line in log_lines(directory / "audit")]
    begun = Counter(each["call_id"] for each in records if each["kind"] == "call.decided")
    assert begun == Counter(each["call_id"] for each in records if each["kind"] in ENDS)
    assert sum(each["kind"] == "call.lost" for each in records) == lost


def _writers(directory: Path) -> list[str]:
    return writers.live(directory / "audit")


def message(server: Several | Served, method: str, session: str = "", path: str = "/mcp", name: str = "alice") -> bytes:
    """A request of a caller's; of nobody's without a name."""
    told = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}}
    told |= {"name": "run_python", "arguments": {"code": "big"}}
    body = json.dumps({"jsonrpc": "2.0", "id": next(NUMBERS), "method": method, "params": told}).encode()
    head = {
        "Host": urlsplit(server.url).netloc, "Content-Type": "application/json", "Content-Length": len(body),
        "Accept": "application/json, text/event-stream",
        **({"Authorization": f"Bearer {server.tokens[name]}"} if name else {}),
        **({"Mcp-Session-Id": session} if session else {}),
    }  # fmt: skip
    lines = [f"POST {path} HTTP/1.1", *(f"{key}: {value}" for key, value in head.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Wire:
    """One connection, as bytes."""

    def __init__(self, server: Several) -> None:
        place = urlsplit(server.url)
        self.socket = socket.create_connection((place.hostname, place.port), SECONDS)
        self.file = self.socket.makefile("rb")

    def close(self) -> None:
        """Close it."""
        self.file.close()
        self.socket.close()

    def ask(self, *parts: bytes) -> tuple[int, str]:
        """Send the parts of a message; return the answer's status, and the session it names."""
        for part in parts:
            self.socket.sendall(part)
        status = int(self.file.readline().split()[1])
        headers = parse_headers(self.file)
        if "Content-Length" in headers:
            self.file.read(int(headers["Content-Length"]))
        elif status == 200:
            while size := int(self.file.readline(), 16):
                self.file.read(size + 2)
            self.file.readline()
        return status, headers["Mcp-Session-Id"] or ""


def opened(server: Several) -> list[str]:
    """A session of alice's in each of two processes, by their numbers."""
    found: dict[str, str] = {}
    while len(found) < 2:
        with closing(Wire(server)) as wire:
            status, session = wire.ask(message(server, "initialize"))
            assert status == 200
            found[session[:2]] = session
    return [found["00"], found["01"]]


def _swapped(head: bytes) -> bytes:
    first, *fields = head.split(b"\r\n")[:-2]
    return b"\r\n".join([first, *reversed(fields), b"", b""])


#: What clients and proxies make of a head, and still mean the same.
SPELLED: dict[str, Callable[[bytes], bytes]] = {
    "as it is": lambda head: head,
    "other order": _swapped,
    "lower case": lambda head: head.replace(b"Mcp-Session-Id", b"mcp-session-id"),
    "upper case": lambda head: head.replace(b"Mcp-Session-Id", b"MCP-SESSION-ID"),
    "no blank": lambda head: head.replace(b"Mcp-Session-Id: ", b"Mcp-Session-Id:"),
    "blanks": lambda head: head.replace(b"Mcp-Session-Id: ", b"Mcp-Session-Id: \t "),
    "more behind": lambda head: head[:-4] + b" \t\r\nX-More: 1\r\n\r\n",
    "line feeds": lambda head: head.replace(b"\r\n", b"\n"),
}


@pytest.mark.parametrize("transport", ["http", "sse"])
async def test_requests_reach_the_process_of_their_session(transport: str, tmp_path: Path) -> None:
    """Eight sessions in both processes, over connections they share and over one for each request."""
    ids: list[str] = []

    async def note(response: httpx2.Response) -> None:
        ids.extend([response.headers["mcp-session-id"]] if "mcp-session-id" in response.headers else [])

    async def note_sent(request: httpx2.Request) -> None:
        ids.extend([request.url.params["session_id"]] if "session_id" in request.url.params else [])

    async with several(tmp_path) as server, AsyncExitStack() as stack:

        def http(*, most: int | None = None, **_: Any) -> httpx2.AsyncClient:
            return httpx2.AsyncClient(
                headers=server.headers, event_hooks={"response": [note], "request": [note_sent]}, timeout=SECONDS,
                limits=httpx2.Limits(max_keepalive_connections=most),
            )  # fmt: skip

        def wire(number: int) -> Any:
            if transport == "sse":
                factory: Any = http
                return sse_client(f"{server.url}/sse", timeout=SECONDS, httpx_client_factory=factory)
            return streamable_http_client(f"{server.url}/mcp", http_client=(kept, fresh)[number % 2])

        kept, fresh = [await stack.enter_async_context(http(most=most)) for most in (None, 0)]
        clients = [await stack.enter_async_context(Client(wire(n), mode="legacy")) for n in range(8)]

        async def call(number: int, turn: int) -> None:
            tag = f"{number} {turn}"
            found = await clients[number].call_tool("run_python", {"code": "1", "tag": tag})
            assert found.structured_content["tag"] == tag

        for turn in range(4):
            async with anyio.create_task_group() as tasks:
                for number in range(8):
                    tasks.start_soon(call, number, turn)
    assert {each[:2] for each in ids} == {"00", "01"}


async def test_every_request_of_every_connection_reaches_its_session(tmp_path: Path) -> None:
    """However its head is spelled and cut, over a fresh connection, one that changes sessions, and in a pipeline."""
    async with several(tmp_path) as server:
        sessions = opened(server)
        with closing(Wire(server)) as kept:
            for spelling, session in product(SPELLED.values(), sessions):
                with closing(Wire(server)) as fresh:
                    for wire in (kept, fresh):
                        head, _, body = message(server, "tools/list", session).partition(b"\r\n\r\n")
                        head = spelling(head + b"\r\n\r\n")
                        assert wire.ask(head + body[:9], body[9:])[0] == 200, head
            for session in sessions * 2:
                whole = message(server, "tools/list", session)
                assert kept.ask(*(bytes([byte]) for byte in whole))[0] == 200
            kept.socket.sendall(b"".join(message(server, "tools/list", each) for each in sessions * 2))
            assert [kept.ask()[0] for _ in range(4)] == [200] * 4


async def test_an_id_gets_its_sender_to_a_process_and_no_further(tmp_path: Path) -> None:
    """Forged, of no process, misspelled, another's; without a token the owner refuses it like any."""
    async with several(tmp_path) as server:
        sessions = opened(server)
        forged = [f"{number}{'0' * 30}" for number in ("00", "01", "02", "ff")]
        wrong = [each.upper().replace("0", "A") for each in sessions] + [each[:-1] for each in sessions]
        with closing(Wire(server)) as wire:
            for name, ids, status in (("alice", forged + wrong, 404), ("bob", sessions, 404), ("", sessions, 401)):
                for session in ids * 2:  # the second one is sent by another's owner
                    assert wire.ask(message(server, "tools/list", session, name=name))[0] == status, session
            for session in forged + sessions:
                address = f"/messages/?session_id={session}"
                assert wire.ask(message(server, "tools/list", path=address))[0] == 404
            for session in sessions:  # the control
                assert wire.ask(message(server, "tools/list", session))[0] == 200
        assert [each.is_running() for each in server.living().values()] == [True, True]


@pytest.mark.parametrize("transport", ["http", "sse"])
async def test_a_killed_process_takes_only_its_own_sessions_along(transport: str, tmp_path: Path) -> None:
    """Calls of the other go on, its sessions are nobody's, and it is started again."""
    log = tmp_path / "audit" / "audit.jsonl"

    async def waiting(client: Client) -> None:
        with contextlib.suppress(Exception):  # how a cut connection looks is the client library's affair
            await client.call_tool("run_python", {"code": "wait"})

    async with several(tmp_path, lost=1) as server, AsyncExitStack() as stack:
        ids: list[str] = []

        async def note(response: httpx2.Response) -> None:
            told = response.request.url.params.get("session_id") or response.headers.get("mcp-session-id")
            ids.extend([told] if told and told not in ids else [])

        def http(**_: Any) -> httpx2.AsyncClient:
            return httpx2.AsyncClient(headers=server.headers, event_hooks={"response": [note]}, timeout=SECONDS)

        factory: Any = http
        tasks = await stack.enter_async_context(anyio.create_task_group())
        clients: dict[str, Client] = {}
        while len(clients) < 2:
            wire: Any = sse_client(f"{server.url}/sse", timeout=SECONDS, httpx_client_factory=factory)
            if transport == "http":
                wire = streamable_http_client(f"{server.url}/mcp", http_client=await stack.enter_async_context(http()))
            client = await stack.enter_async_context(Client(wire, mode="legacy"))
            if clients.setdefault(ids[-1][:2], client) is client:
                tasks.start_soon(waiting, client)
        await until(lambda: log.read_bytes().count(b"call.decided") == 2)
        killed, other = server.living()[0], server.living()[1]
        killed.kill()
        for turn in range(20):
            found = await clients["01"].call_tool("run_python", {"code": "1", "tag": str(turn)})
            assert found.structured_content["tag"] == str(turn)
        await until(lambda: (tmp_path / "up").read_text() == "up\n" * 3)
        assert other.is_running()
        lost = next(each for each in ids if each.startswith("00"))
        path, session = ("/mcp", lost) if transport == "http" else (f"/messages/?session_id={lost}", "")
        for _ in range(4):  # whichever process takes it
            with closing(Wire(server)) as wire:
                assert wire.ask(message(server, "tools/list", session, path))[0] == 404
        for number, new in enumerate(opened(server)):
            assert new != lost
            named = {**server.headers, "Mcp-Session-Id": new}
            told = httpx2.get(f"{server.url}/health", headers=named, timeout=SECONDS).json()
            assert (told["process"], told["processes"]) == (number, 2)
        tasks.cancel_scope.cancel()


async def test_processes_end_with_their_parent(tmp_path: Path) -> None:
    """Nobody could end them, nor start a dead one again."""
    process = await anyio.open_process(fake_server("http*2", tmp_path), cwd=ROOT)
    await until(lambda: (tmp_path / "up").exists() and (tmp_path / "up").read_text() == "up\n" * 2)
    living = psutil.Process(process.pid).children()
    process.kill()
    await until(lambda: not any(each.is_running() for each in living))
    await process.aclose()
    assert not list(Path("/sys/fs/cgroup").glob(f"**/*:{process.pid}:*"))
    assert (tmp_path / "ended").read_text() == "SIGTERM cancelled=0\n" * 2


def test_what_keeps_the_first_process_from_starting_is_said_once(tmp_path: Path) -> None:
    """As by one process alone; nothing is tried again."""
    profiles = tmp_path / "profiles"
    profiles.mkdir()
    (profiles / "run_python.toml").write_text("nonsense")
    options = ["--profiles-dir", str(profiles), "--state-dir", str(tmp_path / "state"), "--transport", "http"]
    command = [sys.executable, "-m", "glovebox_server", "serve", *options, "--port", "0", "--processes"]
    one, two = [subprocess.run([*command, each], capture_output=True, check=False) for each in "12"]
    assert b"nonsense" in one.stderr or b"run_python.toml" in one.stderr
    assert (two.returncode, two.stdout, two.stderr) == (one.returncode, one.stdout, one.stderr) == (2, b"", one.stderr)


@pytest.mark.parametrize(("patience", "gone"), [(30.0, False), (30.0, True), (0.2, False)])
async def test_a_request_waits_for_a_process_that_takes_none(
    patience: float, gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No more of it is read meanwhile, until it is taken, socket and bytes, or that process has gone, or it is late."""
    monkeypatch.setattr(http_timeouts, "HEAD_SECONDS", patience)
    sizes: list[int] = []
    hand = Seat.hand

    def noted(self: Seat, owner: int, connection: socket.socket, data: bytes) -> bool:
        sizes.append(len(data))
        return hand(self, owner, connection, data)

    monkeypatch.setattr(Seat, "hand", noted)
    with first_of_two() as made:
        async with served(tmp_path, "http") as server, await _connected(server) as stream:
            made[0].up[1] = True
            inbox, giving = made[0].inboxes[1]
            with contextlib.suppress(BlockingIOError):
                while True:
                    giving.send(b"full")
            await stream.send(whole := message(server, "tools/list", f"01{'0' * 30}"))
            await until(lambda: len(sizes) > 2)
            if patience < 1:
                with anyio.fail_after(SECONDS), pytest.raises(anyio.EndOfStream):
                    await stream.receive()
                return
            if gone:
                made[0].inboxes[0][1].send(b"without a socket, as if too many files were open")
                made[0].up[1] = False
                for _ in range(2):
                    assert (await stream.receive()).startswith(b"HTTP/1.1 404 ")
                    await stream.send(whole)
                await until(lambda: made[0].taken[0] == 1)
                assert "Exception" not in caplog.text
                return
            with anyio.move_on_after(0.2):
                await stream.send(bytes(1 << 26))
            given: list[int] = []
            data = b"full"

            def taken() -> bool:
                nonlocal data, given
                with contextlib.suppress(BlockingIOError):
                    data, given, _, _ = socket.recv_fds(inbox, 1 << 17, 1)
                return bool(given)

            await until(taken)
            with socket.socket(fileno=given[0]) as moved:
                assert moved.getpeername() == stream.extra_attributes[SocketAttribute.local_address]()
            assert data.startswith(whole)
            assert max(sizes) < len(whole) + 2 * http_timeouts._READ_BYTES


async def test_a_request_that_did_not_wait_for_the_last_answer_is_not_moved(tmp_path: Path) -> None:
    """What is left of that answer is sent first, then the connection is closed: its client sends the request again."""
    with first_of_two() as made:
        async with served(tmp_path, "http") as server:
            made[0].listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of what it accepts, too
            async with await _connected(server) as stream:
                await stream.send(message(server, "initialize"))
                session = re.search(rb"mcp-session-id: (\w+)", await stream.receive())
                assert session is not None
                made[0].up[1] = True
                first = message(server, "tools/call", session[1].decode())
                await stream.send(first + message(server, "tools/list", f"01{'0' * 30}"))
                await until(lambda: len(server.app.broker.finished) == 1)
                answer = b""
                with anyio.fail_after(SECONDS), contextlib.suppress(anyio.EndOfStream):
                    while True:
                        answer += await stream.receive()
                assert answer.endswith(b"\r\n0\r\n\r\n")
                assert len(answer) > 1 << 17
                assert list(made[0].handed[0]) == [0, 0]


async def _connected(server: Served) -> anyio.abc.SocketStream:
    place = urlsplit(server.url)
    assert place.port is not None
    return await anyio.connect_tcp("127.0.0.1", place.port)
