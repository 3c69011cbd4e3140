"""What HTTP requests meet before anything else: bytes on a real socket, so that no client library is polite."""

import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import anyio
import pytest
from anyio.abc import SocketStream
from tests.interaction.served import TIMEOUT_SECONDS, Served, first_of_two, served, until

from glovebox_server.transport import auth, http_timeouts, serve

ROUTES = [
    "/mcp",
    "/sse",
    "/messages/",
    "/messages/?session_id=" + "0" * 32,
    "/health",
    "/ready",
    "/",
    "/artifacts",
    "/artifacts/" + "0" * 32,
    "/mcp/../health",
]
METHODS = ["GET", "POST", "DELETE", "PUT", "OPTIONS", "HEAD", "PATCH", "TRACE"]
INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}},
}

LATER = "2099-01-01"
"""Each that is served."""


@pytest.fixture(params=[1, 2], autouse=True)
def processes(request: pytest.FixtureRequest) -> Iterator[int]:
    """A server alone, and as the first of two processes."""
    with first_of_two() if request.param == 2 else contextlib.nullcontext():
        yield request.param


async def _status(server: Served, request: bytes) -> tuple[int, bytes]:
    """Send bytes, return the status and what follows it."""
    host, port = server.url.removeprefix("http://").split(":")
    with anyio.fail_after(TIMEOUT_SECONDS):
        async with await anyio.connect_tcp(host, int(port)) as stream:
            await stream.send(request)
            return await _answer(stream)


async def _answer(stream: SocketStream) -> tuple[int, bytes]:
    received = b""
    while b"\r\n\r\n" not in received:
        received += await stream.receive()
    head, _, rest = received.partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), rest


async def _end(stream: SocketStream) -> None:
    with contextlib.suppress(anyio.EndOfStream):
        while True:
            await stream.receive()


def _request(
    server: Served, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b""
) -> bytes:
    """Return a sound request; ``headers`` replace or, where empty, remove its own."""
    whole = {
        "Host": server.url.removeprefix("http://"),
        "Authorization": f"Bearer {server.tokens['alice']}",
        "Accept": "application/json, text/event-stream",
        "Content-Type": "application/json",
        "Connection": "close",
        **({"Content-Length": str(len(body))} if body else {}),
        **(headers or {}),
    }
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in whole.items() if value)]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


async def _session(server: Served) -> dict[str, str]:
    """Open a session of alice's over streamable HTTP; return the headers of its requests."""
    host, port = server.url.removeprefix("http://").split(":")
    async with await anyio.connect_tcp(host, int(port)) as stream:
        await stream.send(_request(server, "POST", "/mcp", {}, json.dumps(INITIALIZE).encode()))
        received = b""
        while b"\r\n\r\n" not in received:
            received += await stream.receive()
    head = received.partition(b"\r\n\r\n")[0].decode().lower()
    session = next(line.split(": ")[1] for line in head.split("\r\n") if line.startswith("mcp-session-id"))
    return {"Mcp-Session-Id": session, "Mcp-Protocol-Version": "2025-11-25"}


async def test_every_route_and_method_needs_a_token(processes: int, tmp_path: Path) -> None:
    """M2: without a token, with a wrong one, half of one, or a doubled header, the answer is 401 everywhere."""
    async with served(tmp_path, "http") as server:
        token = server.tokens["alice"]
        wrong = ["", "Bearer", "Bearer wrong", f"Bearer {token[:-1]}", f"Bearer {token}x", f"Basic {token}", token]
        for path in ROUTES:
            for method in METHODS:
                status, told = await _status(server, _request(server, method, path, {"Authorization": ""}))
                if (method, path) == ("GET", "/health"):
                    assert (status, told) == (200, b'{"status":"ok"}'), "that it serves is all that a stranger hears"
                elif (method, path) == ("GET", "/ready"):
                    assert (status, told) == (503, b'{"status":"not ready"}'), "and that calls cannot be served yet"
                else:
                    assert status == 401, (method, path)
        for value in wrong:
            for path in ("/mcp", "/health", "/ready") if value else ("/mcp",):
                status, _ = await _status(server, _request(server, "GET", path, {"Authorization": value}))
                assert status == 401, (value, path)
        doubled = {"Authorization": f"Bearer {token}\r\nAuthorization: Bearer {token}"}
        assert (await _status(server, _request(server, "GET", "/health", doubled)))[0] == 401
        # The control: the same request with the token.
        status, body = await _status(server, _request(server, "GET", "/health"))
        told = json.loads(body)
        assert (status, told["status"]) == (200, "ok")
        told_of = {
            "longest_stall_ms",
            "unusable_token_files",
            "unusable_policy",
            "unusable_profiles",
            "refused_requests",
        }
        assert told.keys() == {"status", *told_of, *(("process", "processes") if processes == 2 else ())}
        assert (await _status(server, _request(server, "GET", "/health", {"Authorization": f"bearer {token}"})))[
            0
        ] == 200


async def test_foreign_hosts_and_origins_are_refused(tmp_path: Path) -> None:
    """M1: a name that is not ours is refused even with the right token, whatever it looks like."""
    async with served(tmp_path, "http") as server:
        port = server.url.rpartition(":")[2]
        for host in (
            "",
            "evil.example",
            f"evil.example:{port}",
            f"localhost.evil:{port}",
            f"127.0.0.1.evil:{port}",
            "localhost",
            "127.0.0.1:1",
            f"[::2]:{port}",
            f"0.0.0.0:{port}",
            f"localhost:{port}@evil.example",
            f" , localhost:{port}",
            f"localhost:{port}\r\nHost: evil.example",
        ):
            for path in ("/health", "/mcp", "/sse"):
                status, _ = await _status(server, _request(server, "GET", path, {"Host": host}))
                assert status in {400, 421}, (host, path, status)
        for origin in (
            "null",
            "http://evil.example",
            f"http://evil.example:{port}",
            f"http://localhost.evil:{port}",
            f"http://localhost:{port}.evil.example",
            "http://localhost",
            f"ftp://localhost:{port}",
            f"http://localhost:{port}/",
            f"http://localhost:{port}\r\nOrigin: http://evil.example",
        ):
            status, _ = await _status(server, _request(server, "GET", "/health", {"Origin": origin}))
            assert status == 403, origin
        # The control: our own names, and origins of them.
        for ours in (f"localhost:{port}", f"LOCALHOST:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"):
            headers = {"Host": ours, "Origin": f"http://{ours}"}
            assert (await _status(server, _request(server, "GET", "/health", headers)))[0] == 200


def _sound(arguments: bytes = b"{}") -> bytes:
    return (
        b'{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"run_python","arguments":' + arguments + b"}}"
    )


BAD_BODIES = [
    b"",
    b"{",
    b"\xff\xfe",
    b"nothing",
    b'{"jsonrpc":"2.0","id":1,"id":2,"method":"ping"}',
    _sound(b'{"code":"1","code":"2"}'),
    _sound(b'{"timeout_seconds":1e400}'),
    _sound(b'{"timeout_seconds":NaN}'),
    _sound(b'{"timeout_seconds":' + b"9" * 400 + b"}"),
    _sound(b'{"code":"\\ud800"}'),
    _sound(b'{"\\udfff":1}'),
    _sound(b"[" * 200 + b"]" * 200),
    b"[" * 500_000,
    _sound(b"[" + b"[[[[]]]]," * 110_000 + b"0]"),
]


@pytest.mark.parametrize("path", ["/mcp", "/messages/?session_id=" + "0" * 32])
async def test_a_body_with_two_meanings_goes_no_further(path: str, tmp_path: Path) -> None:
    """M5: what two readers could read differently, or what breaks readers, is a parse error; nothing starts."""
    async with served(tmp_path, "http") as server:
        for body in BAD_BODIES:
            headers = {"Content-Length": str(len(body))}
            status, answer = await _status(server, _request(server, "POST", path, headers, body))
            assert status == 400, body[:80]
            assert json.loads(answer)["error"]["code"] == -32700
        assert not server.app.broker.started.is_set()
        # The control: a sound body gets past the gate.
        sound = json.dumps(INITIALIZE).encode()
        status, _ = await _status(server, _request(server, "POST", path, body=sound))
        assert status == (200 if path == "/mcp" else 404)


@pytest.mark.parametrize("version", ["", "2025-11-25", "2026-07-28"])
async def test_a_request_under_what_is_no_id_gets_an_error_without_one(version: str, tmp_path: Path) -> None:
    """JSON-RPC 2.0, section 5: an answer with id null, as over stdio; a text and a number are ids (control)."""
    async with served(tmp_path, "http") as server:
        for identity in ("true", "1.5", "{}", "[]", "null", '"a"', "7"):
            body = json.dumps({**INITIALIZE, "id": 0}).replace('"id": 0', f'"id": {identity}').encode()
            headers = {"Mcp-Protocol-Version": version}
            status, answer = await _status(server, _request(server, "POST", "/mcp", headers, body))
            if identity in {'"a"', "7"}:
                assert b"an id is" not in answer
            else:
                assert status == 400
                told = json.loads(answer)
                assert (told["id"], told["error"]["code"]) == (None, -32600)
                assert "an id is a string or an integer" in told["error"]["message"]


async def test_a_large_body_is_not_read(tmp_path: Path) -> None:
    """M5: declared or streamed, a body over the cap is answered with 413 before it is complete."""
    async with served(tmp_path, "http") as server:
        size = str(auth.MAX_BODY_BYTES + 1)
        for declared in (size, "9" * 30):
            status, _ = await _status(server, _request(server, "POST", "/mcp", {"Content-Length": declared}))
            assert status in {400, 413}
        chunked = _request(server, "POST", "/mcp", {"Transfer-Encoding": "chunked"})
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        assert (await _status(server, chunked + chunk * 17))[0] == 413


async def test_a_body_with_two_lengths_is_refused(tmp_path: Path) -> None:
    """M5: a proxy in front could see another end of the request, and take the rest of it for the next one."""
    body = json.dumps(INITIALIZE).encode()
    chunks = f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    chunked, length = {"Transfer-Encoding": "chunked"}, {"Content-Length": str(len(chunks))}
    async with served(tmp_path, "http") as server:
        for path in ("/mcp", "/health"):
            status, answer = await _status(server, _request(server, "POST", path, chunked | length) + chunks)
            assert (status, answer) == (400, b"The body has two lengths")
        # The control: the same bytes with one of them.
        assert (await _status(server, _request(server, "POST", "/mcp", chunked) + chunks))[0] == 200
        assert (await _status(server, _request(server, "POST", "/mcp", body=body)))[0] == 200


async def test_a_slow_body_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """M5: a client that sends a byte now and then is answered with 408 and holds nothing."""
    monkeypatch.setattr(auth, "BODY_SECONDS", 0.2)
    async with served(tmp_path, "http") as server:
        slow = _request(server, "POST", "/mcp", {"Content-Length": "100"})
        assert (await _status(server, slow + b"{"))[0] == 408


async def test_a_head_has_so_many_fields_and_so_many_bytes(tmp_path: Path) -> None:
    """Each field becomes objects before anybody knows who sends it; the control has as many as may be."""
    async with served(tmp_path, "http") as server:
        few = len(_request(server, "GET", "/health").splitlines()) - 2
        for more, expected in ((http_timeouts.HEAD_FIELDS - few, 200), (http_timeouts.HEAD_FIELDS - few + 1, 400)):
            fields = {f"A{number}": "1" for number in range(more)}
            assert (await _status(server, _request(server, "GET", "/health", fields)))[0] == expected, more
        # Bytes count while a head is not whole, so what one read brings may come beyond them.
        long = {"A": "1" * (http_timeouts.HEAD_BYTES + http_timeouts._READ_BYTES)}
        assert (await _status(server, _request(server, "GET", "/health", long)))[0] == 400


@pytest.mark.parametrize("parts", [None, 1_000_000], ids=["shipped", "control"])
async def test_a_body_of_tiny_chunks_leaves_the_others_their_turns(
    parts: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any few of them others are served; the control reads all that came in one turn."""
    if parts:
        monkeypatch.setattr(http_timeouts, "_PARTS", parts)
    read: list[int] = []
    handle = http_timeouts.TimeoutProtocol.handle_events

    def noted(self: http_timeouts.TimeoutProtocol) -> None:
        handle(self)
        read.append(http_timeouts._PARTS - self._parts.parts_left)

    monkeypatch.setattr(http_timeouts.TimeoutProtocol, "handle_events", noted)
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "ping"}).encode().ljust(2000)
    chunks = b"".join(b"1\r\n%c\r\n" % each for each in body) + b"0\r\n\r\n"
    async with served(tmp_path, "http") as server:
        head = _request(server, "POST", "/mcp", {"Transfer-Encoding": "chunked"})
        status, _ = await _status(server, head + chunks)
    assert status != 408
    assert sum(read) > len(body)
    assert (max(read) <= 4) is (parts is None)


async def test_a_slow_head_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """M5: a connection without a request, one whose head never ends, and one whose second head does, are closed.

    The control: a request that waits for its answer longer than that is not.
    """
    monkeypatch.setattr(http_timeouts, "HEAD_SECONDS", 0.2)
    async with served(tmp_path, "http") as server:
        host, port = server.url.removeprefix("http://").split(":")
        whole = _request(server, "GET", "/health", {"Connection": ""})
        for sent in ([], [whole[:20]], [whole, whole[:20]]):
            with anyio.fail_after(30):
                async with await anyio.connect_tcp(host, int(port)) as stream:
                    for part in sent:
                        await stream.send(part)
                        if part == whole:
                            assert (await _answer(stream))[0] == 200
                    await _end(stream)
        async with server.client("http", "modern") as client, anyio.create_task_group() as tasks:
            tasks.start_soon(client.call_tool, "run_python", {"code": "wait"})
            await until(lambda: bool(server.app.broker.running))
            await anyio.sleep(0.4)
            server.app.broker.release.set()
        assert not server.app.broker.cancelled


@contextlib.asynccontextmanager
async def _held(server: Served, sent: bytes, number: int) -> AsyncIterator[list[SocketStream]]:
    """So many connections that each have sent this and stay open."""
    host, port = server.url.removeprefix("http://").split(":")
    async with contextlib.AsyncExitStack() as stack:
        held = [await stack.enter_async_context(await anyio.connect_tcp(host, int(port))) for _ in range(number)]
        for stream in held:
            await stream.send(sent)
        yield held


@pytest.fixture
def twenty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with places for twenty connections and as many sessions."""
    monkeypatch.setattr(auth, "MAX_CONNECTIONS", 20)
    monkeypatch.setattr(serve, "MAX_CONNECTIONS", 20)
    monkeypatch.setattr(serve, "MAX_SESSIONS", 20)


@pytest.mark.usefixtures("twenty")
@pytest.mark.parametrize("path", ["", "/health"])
async def test_connections_without_a_token_keep_nobody_out(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M7: however many strangers are connected, silent or answered with 401, callers are served and none is cut off.

    The control: without making room the next caller is told that there is no place. (Where strangers ask something,
    they are told so themselves, and that ends their connections.)
    """
    async with served(tmp_path, "http") as server:
        whole = _request(server, "GET", "/health")
        stranger = _request(server, "GET", path, {"Authorization": "", "Connection": ""}) if path else whole[:20]
        async with server.client("http", "modern") as client, anyio.create_task_group() as tasks:
            tasks.start_soon(client.call_tool, "run_python", {"code": "wait"})
            await until(lambda: bool(server.app.broker.running))
            async with _held(server, stranger, 50):
                for _ in range(3):
                    assert (await _status(server, whole))[0] == 200
                server.app.broker.release.set()
        assert not server.app.broker.cancelled
        if not path:
            monkeypatch.setattr(http_timeouts.TimeoutProtocol, "_make_room", lambda _: None)
            async with _held(server, stranger, 50):
                assert (await _status(server, whole))[0] == 503


@pytest.mark.usefixtures("twenty")
async def test_a_caller_leaves_the_others_their_connections(tmp_path: Path) -> None:
    """M7: who holds his share of streams gets no more, until one of them ends; another caller does not notice.

    The control: where nobody else has a token, the share is all.
    """
    async with served(tmp_path / "two", "http", "alice", "bob") as server:
        ask, stream = _request(server, "GET", "/health"), _request(server, "GET", "/sse")
        async with _held(server, stream, 10) as held:
            for each in held:
                assert (await _answer(each))[0] == 200
            status, answer = await _status(server, ask)
            assert (status, answer) == (429, b"Too many requests of this caller are open")
            other = _request(server, "GET", "/health", {"Authorization": f"Bearer {server.tokens['bob']}"})
            assert (await _status(server, other))[0] == 200
            await held[0].aclose()
            with anyio.fail_after(TIMEOUT_SECONDS):
                while (await _status(server, ask))[0] != 200:  # noqa: ASYNC110 - until the server has noticed
                    await anyio.sleep(0.005)
    async with served(tmp_path / "one", "http", "alice") as server, _held(server, _request(server, "GET", "/sse"), 10):
        assert (await _status(server, _request(server, "GET", "/health")))[0] == 200


@pytest.mark.usefixtures("twenty")
async def test_a_caller_leaves_the_others_their_sessions(tmp_path: Path) -> None:
    """M7: who opens session after session gets his share of them; another caller can still open one.

    The control: where nobody else has a token, the share is all.
    """
    body = json.dumps(INITIALIZE).encode()
    async with served(tmp_path / "two", "http", "alice", "bob") as server:
        opening = _request(server, "POST", "/mcp", {}, body)
        assert [(await _status(server, opening))[0] for _ in range(11)] == [200] * 10 + [503]
        assert server.app.refusals.totals == {"busy.sessions": 1}
        other = _request(server, "POST", "/mcp", {"Authorization": f"Bearer {server.tokens['bob']}"}, body)
        assert (await _status(server, other))[0] == 200
    async with served(tmp_path / "one", "http", "alice") as server:
        opening = _request(server, "POST", "/mcp", {}, body)
        assert [(await _status(server, opening))[0] for _ in range(11)] == [200] * 11


async def test_an_sse_session_belongs_to_the_token_that_opened_it(tmp_path: Path) -> None:
    """M2: as below, for messages to a stream that somebody else has open."""
    async with served(tmp_path, "http") as server:
        host, port = server.url.removeprefix("http://").split(":")
        async with await anyio.connect_tcp(host, int(port)) as stream:
            await stream.send(_request(server, "GET", "/sse"))
            received = b""
            while b"session_id=" not in received or not received.endswith(b"\r\n\r\n"):
                received += await stream.receive()
            path = "/messages/?session_id=" + received.partition(b"session_id=")[2][:32].decode()
            body = b'{"jsonrpc":"2.0","id":1,"method":"ping"}'
            foreign = {"Authorization": f"Bearer {server.tokens['bob']}"}
            assert (await _status(server, _request(server, "POST", path, foreign, body)))[0] == 404
            assert (await _status(server, _request(server, "POST", path, {}, body)))[0] == 202


async def test_a_session_belongs_to_the_token_that_opened_it(tmp_path: Path) -> None:
    """M2: bob cannot use alice's session, and is not told that it exists; alice can (the control)."""
    async with served(tmp_path, "http") as server:
        headers = await _session(server)
        body = b'{"jsonrpc":"2.0","method":"notifications/initialized"}'
        foreign = {**headers, "Authorization": f"Bearer {server.tokens['bob']}"}
        assert (await _status(server, _request(server, "POST", "/mcp", foreign, body)))[0] == 404
        assert (await _status(server, _request(server, "POST", "/mcp", headers, body)))[0] == 202


@pytest.mark.parametrize("second", [7, "7"])
async def test_a_request_does_not_get_the_answer_to_another(second: int | str, tmp_path: Path) -> None:
    """Found by an attack: of two under one id in a session, one got the other's answer and one none.

    The second is refused; under another id, in another session, or once the first is answered, it is not (controls).
    """

    def call(identity: int | str, code: str) -> bytes:
        params = {"name": "run_python", "arguments": {"code": code}}
        return json.dumps({"jsonrpc": "2.0", "id": identity, "method": "tools/call", "params": params}).encode()

    async with served(tmp_path, "http") as server:
        headers, others = await _session(server), await _session(server)
        host, port = server.url.removeprefix("http://").split(":")
        async with await anyio.connect_tcp(host, int(port)) as first:
            await first.send(_request(server, "POST", "/mcp", headers, call(7, "wait")))
            await until(lambda: bool(server.app.broker.running))
            status, body = await _status(server, _request(server, "POST", "/mcp", headers, call(second, "other")))
            assert status == 400
            assert json.loads(body)["id"] == second
            assert "this id, as text, and is not answered yet" in json.loads(body)["error"]["message"]
            assert (await _status(server, _request(server, "POST", "/mcp", headers, call(8, "other"))))[0] == 200
            assert (await _status(server, _request(server, "POST", "/mcp", others, call(second, "other"))))[0] == 200
            server.app.broker.release.set()
            received = b""
            with contextlib.suppress(anyio.EndOfStream):
                while True:
                    received += await first.receive()
            assert b"echo wait" in received
            assert b"echo other" not in received
        assert (await _status(server, _request(server, "POST", "/mcp", headers, call(second, "other"))))[0] == 200


async def test_a_revision_that_is_not_served_is_answered_with_those_of_the_envelope(tmp_path: Path) -> None:
    """As the SDK says it, with one that both can speak."""
    meta = {"io.modelcontextprotocol/protocolVersion": LATER, "io.modelcontextprotocol/clientCapabilities": {}}
    bodies = ({"id": 1, "method": "server/discover", "params": {"_meta": meta}},)
    async with served(tmp_path, "http") as server:
        for each in bodies:
            headers = {"Mcp-Protocol-Version": LATER, "Mcp-Method": str(each["method"])}
            body = json.dumps({"jsonrpc": "2.0", **each}).encode()
            status, rest = await _status(server, _request(server, "POST", "/mcp", headers, body))
            answer = json.loads(rest)
            assert (status, answer["id"], answer["error"]["code"]) == (400, each.get("id"), -32022)
            assert answer["error"]["data"] == {"supported": ["2026-07-28"], "requested": LATER}


async def test_header_and_body_must_agree(tmp_path: Path) -> None:
    """M5: a modern request whose headers name another method, tool or version than its body is refused."""
    meta = {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}}
    params = {"name": "run_python", "arguments": {"code": "1"}, "_meta": meta}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}).encode()
    sound = {"Mcp-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/call", "Mcp-Name": "run_python"}
    async with served(tmp_path, "http") as server:
        for other in ({"Mcp-Method": "tools/list"}, {"Mcp-Name": "fetch_url"}, {"Mcp-Protocol-Version": "2099-01-01"}):
            status, _ = await _status(server, _request(server, "POST", "/mcp", {**sound, **other}, body))
            assert status == 400
        assert not server.app.broker.started.is_set()
        assert (await _status(server, _request(server, "POST", "/mcp", sound, body)))[0] == 200
