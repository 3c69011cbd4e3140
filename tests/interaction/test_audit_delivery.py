"""How audit events reach clients, on each of their ways, and that nobody hears of anybody else's calls."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import mcp_types as types
import pytest
from mcp import MCPError
from mcp.shared.exceptions import MCPDeprecationWarning
from mcp.shared.subscriptions import ResourceUpdated
from tests.fixtures.audit_logs import decided
from tests.interaction.served import PAIRS, Era, Logs, Served, Transport, served, until

from glovebox_audit.chain import Record
from glovebox_audit.subscription import MAX_WAITING_RECORDS, Missed, Subscription
from glovebox_server.mcp import delivery
from glovebox_server.mcp.delivery import AUDIT_LOGGER, BRIEF

pairs = pytest.mark.parametrize(("transport", "era"), PAIRS)
http_pairs = pytest.mark.parametrize(("transport", "era"), [pair for pair in PAIRS if pair[0] != "stdio"])
RUN = ["call.decided", "call.finished"]


@pairs
async def test_clients_get_log_messages_where_the_era_allows(transport: Transport, era: Era, tmp_path: Path) -> None:
    """Handshake eras: by default. Modern era: only for a request that asks, and never a method of ours."""
    silent, asking, strange = Logs(), Logs(), Logs()

    async def unknown(message: Any) -> None:
        strange.seen.append(message)

    async with served(tmp_path, transport) as server:
        async with server.client(transport, era, logging_callback=silent, message_handler=unknown) as client:
            await client.call_tool("run_python", {"code": "1"})
        async with server.client(transport, era, logging_callback=asking, log_level="info") as client:
            await client.call_tool("run_python", {"code": "1"})
            await until(lambda: len(asking.seen) == 2)
    assert [message.data["kind"] for message in asking.seen] == RUN
    assert asking.seen[0].data.keys() == {"seq", "kind", "call_id", "data"}
    assert asking.seen[0].data["data"].keys() <= set(BRIEF)
    assert {message.logger for message in asking.seen} == {AUDIT_LOGGER}
    assert [message.data["kind"] for message in silent.seen] == (RUN if era == "legacy" else [])
    assert all(isinstance(message, types.LoggingMessageNotification) for message in strange.seen)


@pytest.mark.parametrize("transport", ["stdio", "http", "sse"])
async def test_a_log_level_is_honoured(transport: Transport, tmp_path: Path) -> None:
    """Handshake eras: ``logging/setLevel`` keeps the ordinary records away; a denial still comes as a warning."""
    logs = Logs()
    async with (
        served(tmp_path, transport) as server,
        server.client(transport, "legacy", logging_callback=logs) as client,
    ):
        with pytest.warns(MCPDeprecationWarning):
            await client.set_logging_level("warning")
        await client.call_tool("run_python", {"code": "1"})
        await client.call_tool("run_python", {"code": "refuse"})
        await until(lambda: len(logs.seen) == 1)
    assert logs.seen[0].data["data"]["effect"] == "deny"


async def test_nobodys_log_level_is_forgotten_for_anothers(tmp_path: Path) -> None:
    """However many sessions another caller sets one in, or the same one. Control: its own request changes it."""
    logs = Logs()
    async with served(tmp_path, "http") as running, running.client("http", "legacy", logging_callback=logs) as client:

        async def heard() -> int:
            logs.seen.clear()
            await client.call_tool("run_python", {"code": "1"})
            await client.call_tool("run_python", {"code": "refuse"})
            await until(lambda: any(message.data["data"].get("effect") == "deny" for message in logs.seen))
            return len(logs.seen)

        async def set_by_others(name: str) -> None:
            for _ in range(3):
                async with running.client("http", "legacy", name) as other:
                    with pytest.warns(MCPDeprecationWarning):
                        await other.set_logging_level("debug")

        with pytest.warns(MCPDeprecationWarning):
            await client.set_logging_level("warning")
        assert await heard() == 1
        await set_by_others("bob")
        assert await heard() == 1
        await set_by_others("alice")
        assert await heard() == 1
        with pytest.warns(MCPDeprecationWarning):
            await client.set_logging_level("info")
        assert await heard() == 1 + len(RUN)


@pairs
async def test_whoever_asks_for_debug_gets_records_whole(transport: Transport, era: Era, tmp_path: Path) -> None:
    """With digest and hash; the control is the test above."""
    logs = Logs()
    async with (
        served(tmp_path, transport) as server,
        server.client(transport, era, logging_callback=logs, log_level="debug") as client,
    ):
        if era == "legacy":
            with pytest.warns(MCPDeprecationWarning):
                await client.set_logging_level("debug")
        await client.call_tool("run_python", {"code": "1"})
        await until(lambda: len(logs.seen) == 2)
    assert logs.seen[0].data.keys() == {"seq", "kind", "time", "call_id", "data", "hash"}
    assert logs.seen[0].data["data"]["arguments_digest"]


@http_pairs
async def test_nobody_hears_of_calls_of_others(transport: Transport, era: Era, tmp_path: Path) -> None:
    """M3: messages, records and artifacts of alice do not exist for bob; for alice they do (the control)."""
    logs = Logs()
    async with (
        served(tmp_path, transport) as server,
        server.client(transport, era, "alice") as alice,
        server.client(transport, era, "bob", logging_callback=logs, log_level="debug") as bob,
        anyio.create_task_group() as tasks,
    ):
        broker = server.app.broker
        tasks.start_soon(alice.call_tool, "run_python", {"code": "wait", "tag": "alice's"})
        await until(lambda: bool(broker.running))
        (of_alice,) = broker.running
        await bob.call_tool("run_python", {"code": "1", "tag": "bob's"})
        await until(lambda: len(logs.seen) == len(RUN))
        assert not any(word in str(message.data) for message in logs.seen for word in (of_alice, "alice"))
        broker.release.set()
        result = await alice.call_tool("run_python", {"code": "plot", "tag": "alice's"})
        link = result.content[2]
        assert isinstance(link, types.ResourceLink)
        for uri in (link.uri, f"audit://calls/{result.structured_content['call_id']}"):
            assert (await alice.read_resource(uri)).contents
            with pytest.raises(MCPError) as raised:
                await bob.read_resource(uri)
            assert raised.value.error.code == types.INVALID_PARAMS


@pairs
async def test_the_records_of_a_call_are_a_resource(transport: Transport, era: Era, tmp_path: Path) -> None:
    """``audit://calls/{id}`` has them all; what is no call's address is answered like an unknown one."""
    async with served(tmp_path, transport) as server, server.client(transport, era) as client:
        result = await client.call_tool("run_python", {"code": "1"})
        (content,) = (await client.read_resource(f"audit://calls/{result.structured_content['call_id']}")).contents
        assert isinstance(content, types.TextResourceContents)
        assert [record["kind"] for record in json.loads(content.text)["records"]] == RUN
        for uri in (
            "audit://calls/c_" + "0" * 26,
            "audit://calls/c_" + "z" * 26,
            "audit://calls/../x",
            "artifact://" + "0" * 32,
            "file:///etc/passwd",
        ):
            with pytest.raises(MCPError) as raised:
                await client.read_resource(uri)
            assert raised.value.error.code == types.INVALID_PARAMS
            assert raised.value.error.data["uri"] == uri


def _updates(seen: list[str]) -> Callable[[Any], Any]:
    async def hear(message: Any) -> None:
        if isinstance(message, types.ResourceUpdatedNotification):
            seen.append(str(message.params.uri))

    return hear


@pytest.mark.parametrize("transport", ["stdio", "http", "sse"])
async def test_a_subscriber_is_told_of_updates(transport: Transport, tmp_path: Path) -> None:
    """Handshake eras: ``resources/subscribe`` on a call under way, until ``resources/unsubscribe``."""
    seen: list[str] = []
    async with (
        served(tmp_path, transport) as server,
        server.client(transport, "legacy", message_handler=_updates(seen)) as client,
        anyio.create_task_group() as tasks,
    ):
        broker = server.app.broker
        tasks.start_soon(client.call_tool, "run_python", {"code": "wait"})
        await until(lambda: bool(broker.running))
        uri = f"audit://calls/{next(iter(broker.running))}"
        with pytest.warns(MCPDeprecationWarning), pytest.raises(MCPError, match="only audit"):
            await client.subscribe_resource("artifact://nothing")
        with pytest.warns(MCPDeprecationWarning):
            await client.subscribe_resource(uri)
        broker.release.set()
        await until(lambda: seen == [uri])
        with pytest.warns(MCPDeprecationWarning):
            await client.unsubscribe_resource(uri)


@pytest.mark.parametrize("transport", ["stdio", "http", "sse"])
async def test_a_modern_subscriber_is_told_of_updates(transport: Transport, tmp_path: Path) -> None:
    """Modern era: ``subscriptions/listen`` on a call under way."""
    async with (
        served(tmp_path, transport) as server,
        server.client(transport, "modern") as client,
        anyio.create_task_group() as tasks,
    ):
        broker = server.app.broker
        tasks.start_soon(client.call_tool, "run_python", {"code": "wait"})
        await until(lambda: bool(broker.running))
        uri = f"audit://calls/{next(iter(broker.running))}"
        async with client.listen(resource_subscriptions=[uri]) as events:
            broker.release.set()
            async for event in events:
                assert event == ResourceUpdated(uri=uri)
                break


@pytest.mark.parametrize("transport", ["stdio", "http", "sse"])
async def test_a_listener_is_promised_only_what_it_will_be_sent(transport: Transport, tmp_path: Path) -> None:
    """Modern era: no lists, which only a policy changes; no call that is over, another's or none; no other resource.

    The control is the caller's own call under way, beside all of these.
    """
    async with (
        served(tmp_path, transport) as server,
        server.client(transport, "modern") as client,
        anyio.create_task_group() as tasks,
    ):
        broker = server.app.broker
        done = await client.call_tool("run_python", {"code": "1"})
        over = f"audit://calls/{(done.structured_content or {})['call_id']}"
        tasks.start_soon(client.call_tool, "run_python", {"code": "wait"})
        await until(lambda: bool(broker.running))
        own = f"audit://calls/{next(iter(broker.running))}"
        asked = [over, "audit://calls/c_" + "0" * 26, "artifact://1", "glovebox://capabilities", own, own]
        lists = {"tools_list_changed": True, "prompts_list_changed": True, "resources_list_changed": True}
        async with client.listen(**lists, resource_subscriptions=asked) as events:
            honored = events.honored
            assert honored is not None
            assert honored.model_dump(exclude_none=True) == {"resource_subscriptions": [own]}
            broker.release.set()
            async for event in events:
                assert event == ResourceUpdated(uri=own)
                break
        if transport == "http":
            async with server.client(transport, "modern", "bob") as other:
                broker.release = anyio.Event()
                tasks.start_soon(client.call_tool, "run_python", {"code": "wait"})
                await until(lambda: bool(broker.running))
                uri = f"audit://calls/{next(iter(broker.running))}"
                async with other.listen(resource_subscriptions=[uri]) as events:
                    assert events.honored is not None
                    assert events.honored.resource_subscriptions is None
                broker.release.set()


class StalledReader:
    """A client of HTTP with SSE that stops reading its stream, and goes on; below any socket, so that none buffers."""

    def __init__(self, server: Served) -> None:
        """Take the server whose gate is asked."""
        self._server = server
        self._left = anyio.Event()
        self.reads = anyio.Event()
        """Whether it reads: what is sent meanwhile waits for it, as a full socket would have it wait."""
        self.reads.set()
        self.text = ""

    async def request(self, method: str, path: str, body: bytes = b"") -> None:
        """Make one request; the stream's own ends with ``leave``."""
        place, _, query = path.partition("?")
        headers = {
            "host": self._server.url.removeprefix("http://"),
            "authorization": f"Bearer {self._server.tokens['alice']}",
            "content-type": "application/json",
        }
        scope = {
            "type": "http", "method": method, "path": place, "raw_path": place.encode(), "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()], "root_path": "",
            "scheme": "http", "http_version": "1.1", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
        }  # fmt: skip
        bodies = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if bodies:
                return bodies.pop()
            await self._left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if method == "GET":
                await self.reads.wait()
                self.text += message.get("body", b"").decode()

        await self._server.gate(scope, receive, send)

    async def post(self, **message: Any) -> None:
        """Send one message of the protocol to the session."""
        address = self.text.partition("data: ")[2].split()[0]
        await self.request("POST", address, json.dumps({"jsonrpc": "2.0", **message}).encode())

    def received(self) -> list[dict[str, Any]]:
        """Return the messages of the stream so far."""
        lines = (line.removeprefix("data: ") for line in self.text.splitlines() if line.startswith("data: {"))
        return [json.loads(line) for line in lines]

    def leave(self) -> None:
        """Close the stream."""
        self._left.set()


async def test_a_reader_that_stalls_past_the_end_of_its_call_hears_what_it_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the result, on the same stream; they used to be dropped without a word. Nothing is told twice."""
    gave_up, give_up = anyio.Event(), Subscription.give_up

    def noted(records: Subscription, unread: Record | Missed | None) -> Missed | None:
        gave_up.set()
        return give_up(records, unread)

    monkeypatch.setattr(Subscription, "give_up", noted)
    monkeypatch.setattr(delivery, "FLUSH_SECONDS", 0)
    async with served(tmp_path, "sse") as server, anyio.create_task_group() as tasks:
        reader, broker = StalledReader(server), server.app.broker
        tasks.start_soon(reader.request, "GET", "/sse")
        await until(lambda: "data: " in reader.text)
        info = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}}
        await reader.post(id=1, method="initialize", params=info)
        await reader.post(method="notifications/initialized")
        await until(lambda: len(reader.received()) == 1)
        reader.reads = anyio.Event()
        await reader.post(id=2, method="tools/call", params={"name": "run_python", "arguments": {"code": "wait"}})
        await until(lambda: bool(broker.running))
        (call_id,) = broker.running
        for _ in range(MAX_WAITING_RECORDS + 20):  # more than wait for any reader
            await server.app.audit.append(decided(call_id, "token:alice"))
        broker.release.set()
        with anyio.fail_after(10):
            await gave_up.wait()
        reader.reads.set()
        await until(lambda: any(message.get("id") == 2 for message in reader.received()))
        reader.leave()
    *copies, result = [message for message in reader.received() if message.get("id") != 1]
    assert result["id"] == 2
    told = [message["params"]["data"] for message in copies]
    assert [each["kind"] for each in told[:-1]] == ["call.decided"] * (len(told) - 1)
    seqs = [each["seq"] for each in told[:-1]]
    assert seqs == list(range(1, len(seqs) + 1))
    missed = told[-1]
    assert missed["kind"] == "missed"
    assert missed["data"]["first"] == len(seqs) + 1
    assert missed["seq"] == missed["data"]["first"] + missed["data"]["count"] - 1 == server.app.audit.head.seq
