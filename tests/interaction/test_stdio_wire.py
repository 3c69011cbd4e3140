"""The stdio wire of a real process: hostile lines, silence, signals, and a client that does not read."""

import json
import os
import signal
import subprocess  # noqa: TID251 - a whole server process with its pipes is what is tested
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import mcp_types as types
import pytest
from tests.interaction.fakes import FakeApp, as_app, fake_app
from tests.interaction.served import until

from glovebox_server.exits import ENDING, signal_name
from glovebox_server.transport import stdio
from glovebox_server.transport.serve import serve_stdio

ROOT = Path(__file__).parents[2]

#: Not answered before: the SDK takes such a request for a notification.
NO_IDS = (b"true", b"false", b"null", b"1.5", b"1.0", b"{}", b"[]", b"[1]")


class Process:
    """A server process and the client's end of its pipes."""

    def __init__(self, process: "subprocess.Popen[bytes]", directory: Path) -> None:
        self.process = process
        self.directory = directory

    def send(self, *lines: bytes) -> None:
        """Write lines, each with its end."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"".join(line + b"\n" for line in lines))
        self.process.stdin.flush()

    def receive(self) -> Any:
        """Return the next message; every line on stdout must be one."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def initialize(self, revision: str = "2025-11-25") -> None:
        """Open a session of the handshake era."""
        self.send(*_hello(revision))
        assert self.receive()["id"] == 0

    def ended(self) -> str:
        """Wait for the end and return what the server noted then: why, and how many calls were cancelled."""
        assert self.process.wait(timeout=10) == 0
        return (self.directory / "ended").read_text().rstrip("\n")


def _request(number: int, method: str, params: dict[str, Any]) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": params}).encode()


def _call(number: int, code: str) -> bytes:
    return _request(number, "tools/call", {"name": "run_python", "arguments": {"code": code}})


def _hello(revision: str = "2025-11-25") -> list[bytes]:
    info = {"protocolVersion": revision, "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}}
    return [_request(0, "initialize", info), b'{"jsonrpc":"2.0","method":"notifications/initialized"}']


@contextmanager
def _process(directory: Path, stderr: int = subprocess.PIPE) -> Iterator[Process]:
    command = [sys.executable, "-m", "tests.interaction.fake_server", "stdio", str(directory)]
    environment = {**os.environ, "GLOVEBOX_CANARY": "canary-value-in-the-environment"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr
    ) as process:
        try:
            yield Process(process, directory)
        finally:
            process.kill()


def test_hostile_lines_are_answered_and_the_session_lives(tmp_path: Path) -> None:
    """M5: each malformed line gets its JSON-RPC error; the next sound one gets its answer."""
    hostile: list[tuple[bytes, int]] = [
        (b"{", -32700),
        (b"\xff\xff", -32700),
        (b'{"jsonrpc":"2.0","id":1,"method":"ping","method":"x"}', -32700),
        (b'{"jsonrpc":"2.0","id":1e999,"method":"ping"}', -32700),
        (b'{"jsonrpc":"2.0","id":"\\ud800","method":"ping"}', -32700),
        (b"[" * 100_000, -32700),
        (b"x" * (stdio.MAX_LINE_BYTES + 1), -32700),
        (b"x" * (3 * stdio.MAX_LINE_BYTES), -32700),
        (b"[]", -32600),
        (b"null", -32600),
        (b'{"id":3}', -32600),
        *((b'{"jsonrpc":"2.0","id":%s,"method":"ping"}' % identity, -32600) for identity in NO_IDS),
        (b"[" + b"[]," * 300_000 + b"0]", -32700),
    ]
    with _process(tmp_path) as server:
        server.initialize()
        for number, (line, code) in enumerate(hostile, 1):
            server.send(line, b"", _request(number, "ping", {}))
            answer = server.receive()
            assert answer["error"]["code"] == code, line[:40]
            assert answer["id"] == (3 if line == b'{"id":3}' else None)
            assert server.receive() == {"jsonrpc": "2.0", "id": number, "result": {}}


@pytest.mark.parametrize(
    ("revision", "last"),
    [("2024-11-05", "text"), ("2025-03-26", "text"), ("2025-06-18", "resource_link"), ("2025-11-25", "resource_link")],
)
def test_files_are_told_in_blocks_that_the_revision_has(revision: str, last: str, tmp_path: Path) -> None:
    """Clients refuse a whole result for one block of a kind that they do not know."""
    with _process(tmp_path) as server:
        server.initialize(revision)
        server.send(_call(1, "plot"))
        while (answer := server.receive()).get("id") != 1:
            pass
        content = answer["result"]["content"]
        assert [block["type"] for block in content] == ["text", "image", last]
        assert "artifact://" in (content[-1].get("text") or content[-1].get("uri"))


def _cancel(number: int) -> bytes:
    return b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":%d}}' % number


def test_cancelling_out_of_turn_does_no_harm(tmp_path: Path) -> None:
    """M6: before the call, twice during it, after its end, and of nothing at all: one terminal record per call."""
    with _process(tmp_path) as server:
        server.initialize()
        server.send(_cancel(1), _call(1, "1"))
        while server.receive().get("id") != 1:
            pass
        server.send(_cancel(1), _cancel(99), _call(2, "wait"), _cancel(2), _cancel(2), _call(3, "2"))
        while server.receive().get("id") != 3:
            pass
        assert server.process.stdin is not None
        server.process.stdin.close()
        server.ended()
    log = (tmp_path / "audit" / "audit.jsonl").read_bytes()
    # The call that was cancelled may have been so before it was decided; then there is nothing to end.
    assert log.count(b'"kind":"call.finished"') == 2
    assert log.count(b'"kind":"call.cancelled"') == log.count(b'"kind":"call.decided"') - 2


def test_the_end_of_the_client_ends_its_calls_and_the_server(tmp_path: Path) -> None:
    """End of input: calls under way are cancelled, the exit code is 0."""
    with _process(tmp_path) as server:
        server.initialize()
        server.send(_call(1, "wait"), _call(2, "1"))
        while server.receive().get("id") != 2:
            pass
        assert server.process.stdin is not None
        server.process.stdin.close()
        assert server.ended() == "stdin closed cancelled=1"


FIRST, LAST = _call(1, "wait") + b"\n" + _call(2, "wait") + b"\n" + _call(3, "wait"), _call(4, "1")


def _told(lines: Iterable[bytes]) -> None:
    """Of what was sent after the signal: calls 1 and 2 are answered.

    The control is the third, which its client has cancelled: it hears no more, and is not waited for.
    """
    told = {each["id"]: each["error"] for each in map(json.loads, lines) if "id" in each}
    assert told.keys() == {1, 2}
    for error in told.values():
        assert error["code"] == types.CONNECTION_CLOSED
        assert "was ended: server stopping." in error["message"]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGALRM, 40], ids=signal_name)
def test_a_signal_ends_the_process_and_every_call_hears_of_it(number: int, tmp_path: Path) -> None:
    """Calls are ended and answered, the exit code is 0; these, and one without a name, stand for all (see below)."""
    with _process(tmp_path) as server:
        server.initialize()
        server.send(FIRST, LAST)
        while server.receive().get("id") != 4:
            pass
        server.send(_cancel(3), _request(5, "ping", {}))
        while server.receive().get("id") != 5:
            pass
        server.process.send_signal(number)
        assert server.ended() == f"{signal_name(number)} cancelled=3"
        assert server.process.stdout is not None
        _told(server.process.stdout)


async def test_every_signal_that_would_kill_ends_the_server_in_order(tmp_path: Path) -> None:
    """Whatever would kill a process on the spot: as above, at a server in this one, for each signal in turn."""
    for number in sorted(ENDING):
        to_server, to_client = os.pipe(), os.pipe()
        wire = stdio.StdioFds(read=to_server[0], write=to_client[1])
        (directory := tmp_path / str(number)).mkdir(mode=0o700)
        ended: list[str] = []
        async with fake_app(directory) as app, anyio.create_task_group() as tasks:

            async def serve(app: FakeApp = app, wire: stdio.StdioFds = wire, ended: list[str] = ended) -> None:
                ended.append(await serve_stdio(as_app(app), wire))

            tasks.start_soon(serve)
            os.write(to_server[1], b"\n".join([*_hello(), FIRST, LAST, b""]))
            await until(lambda broker=app.broker: len(broker.finished) == 1 and len(broker.running) == 3)  # type: ignore[misc]
            os.write(to_server[1], _cancel(3) + b"\n")
            await until(lambda broker=app.broker: len(broker.cancelled) == 1)  # type: ignore[misc]
            signal.raise_signal(number)
        assert (ended, len(app.broker.cancelled)) == ([signal_name(number)], 3)
        os.close(to_client[1])
        with os.fdopen(to_client[0], "rb") as answers:
            _told(line for line in answers if json.loads(line).get("id") not in {0, 4})
        for fd in (to_server[0], to_server[1]):
            os.close(fd)


def test_a_reader_that_went_away_ends_the_server(tmp_path: Path) -> None:
    """A client whose end of stdout is closed, but not stdin, is gone as well."""
    with _process(tmp_path) as server:
        server.initialize()
        server.send(_call(1, "wait"))
        assert server.process.stdout is not None
        server.process.stdout.close()
        for number in range(20):
            server.send(_request(number + 2, "tools/list", {}))
        assert server.ended() == "stdin closed cancelled=1"


def test_nothing_but_messages_is_on_stdout_and_no_secret_anywhere(tmp_path: Path) -> None:
    """M12: a bug's traceback goes to the log; the environment's canary is in no answer, record or log line."""
    with _process(tmp_path) as server:
        server.initialize()
        for number, code in enumerate(("bug", "refuse", "no sandbox", "no audit", "plot"), 1):
            server.send(_call(number, code))
            answer: dict[str, Any] = {}
            while answer.get("id") != number:
                answer = server.receive()
                assert "canary" not in json.dumps(answer)
        assert server.process.stdin is not None
        server.process.stdin.close()
        server.ended()
        assert server.process.stderr is not None
        log = server.process.stderr.read().decode()
    assert "a call failed with an unexpected error" in log
    assert "canary-value" not in log
    assert b"canary-value" not in (tmp_path / "audit" / "audit.jsonl").read_bytes()


async def test_a_client_that_does_not_read_does_not_slow_its_call(tmp_path: Path) -> None:
    """The pipe is full and stays full: the call ends all the same, and so does the server."""
    to_server, to_client = os.pipe(), os.pipe()
    wire = stdio.StdioFds(read=to_server[0], write=to_client[1])
    meta = {"progressToken": 1}
    params = {"name": "run_python", "arguments": {"code": "print"}, "_meta": meta}
    async with fake_app(tmp_path) as app, anyio.create_task_group() as tasks:
        tasks.start_soon(serve_stdio, as_app(app), wire)
        os.write(to_server[1], _hello()[0] + b"\n")
        # Answers that nobody reads fill the pipe (64 KiB) and everything before it.
        for number in range(1, 200):
            os.write(to_server[1], _request(number, "tools/list", {}) + b"\n")
        os.write(to_server[1], _request(1000, "tools/call", params) + b"\n")
        await until(lambda: bool(app.broker.running))
        app.broker.release.set()
        await until(lambda: len(app.broker.finished) == 1)
        os.close(to_server[1])
    for fd in (to_server[0], *to_client):
        os.close(fd)
