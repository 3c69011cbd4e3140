"""M3: many clients at once on one server; no answer, artifact, event or progress message reaches anybody else."""

from pathlib import Path

import anyio
import mcp_types as types
import pytest
from tests.interaction.served import Era, Logs, Served, Transport, served, until

from glovebox_audit.log import AuditLog

CLIENTS = 32
NAMES = ("alice", "bob", "carol", "dave")
WAYS: list[tuple[Transport, Era]] = [("http", "legacy"), ("http", "modern"), ("sse", "legacy"), ("sse", "modern")]


async def _one(server: Served, number: int, meeting: anyio.Event, seen: list[str]) -> None:
    transport, era = WAYS[number % len(WAYS)]
    name = NAMES[number // len(WAYS) % len(NAMES)]
    logs, heard = Logs(), []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append(message)

    async with server.client(transport, era, name, logging_callback=logs, log_level="debug") as client:
        await meeting.wait()
        for turn in range(4):
            tag = f"{name}-{number}-{turn}"
            code = "plot" if turn % 2 else f"tell {tag}"
            result = await client.call_tool("run_python", {"code": code, "tag": tag}, progress_callback=hear)
            assert result.structured_content["tag"] == tag
            call_id = result.structured_content["call_id"]
            seen.append(call_id)
            if turn % 2:
                link = result.content[2]
                assert isinstance(link, types.ResourceLink)
                (content,) = (await client.read_resource(link.uri)).contents
                assert isinstance(content, types.TextResourceContents)
                assert content.text == f"made for {tag}"
            else:
                assert result.structured_content["stdout"] == f"echo tell {tag}"
            await until(lambda: len(logs.seen) == 2)
            assert {message.data["call_id"] for message in logs.seen} == {call_id}
            logs.seen.clear()
    assert set(heard) <= {"sandbox started"}


async def test_many_clients_never_get_each_others_answers(tmp_path: Path) -> None:
    """Four principals, both HTTP transports, both eras, 128 tagged calls, all clients connected before the first."""
    seen: list[str] = []
    meeting = anyio.Event()
    async with served(tmp_path, "http", *NAMES) as server:
        async with anyio.create_task_group() as tasks:
            for number in range(CLIENTS):
                tasks.start_soon(_one, server, number, meeting, seen)
            meeting.set()
        audit: AuditLog = server.app.audit
        assert audit.head.seq == 2 * len(seen)
    assert len(set(seen)) == 4 * CLIENTS


@pytest.mark.parametrize(("transport", "era"), [("stdio", "legacy"), ("stdio", "modern"), *WAYS])
async def test_many_calls_of_one_client_keep_their_answers(transport: Transport, era: Era, tmp_path: Path) -> None:
    """One connection, 80 calls at once: each gets its own answer, and never more than the promised number run."""
    most = 0
    async with served(tmp_path, transport) as server, server.client(transport, era) as client:
        broker = server.app.broker

        async def one(number: int) -> None:
            nonlocal most
            result = await client.call_tool("run_python", {"code": f"n{number}", "tag": str(number)})
            most = max(most, len(broker.running))
            assert result.structured_content["tag"] == str(number)
            assert result.structured_content["stdout"] == f"echo n{number}"

        async with anyio.create_task_group() as tasks:
            for number in range(80):
                tasks.start_soon(one, number)
    assert len(broker.finished) == 80
    assert most <= 16


async def test_a_caller_that_asks_for_too_much_is_told_so(tmp_path: Path) -> None:
    """M7: beyond the bound a call is refused at once, with a rule and a hint; another caller is answered at once."""
    async with (
        served(tmp_path, "http") as server,
        server.client("http", "modern") as alice,
        server.client("http", "modern", "bob") as bob,
        anyio.create_task_group() as tasks,
    ):
        broker = server.app.broker
        refused: list[str] = []

        async def ask(number: int) -> None:
            result = await alice.call_tool("run_python", {"code": "wait", "tag": str(number)})
            refused.append(result.structured_content["refused"]["rule"])

        for number in range(300):
            tasks.start_soon(ask, number)
        await until(lambda: len(refused) == 44)
        assert set(refused) == {"busy.calls"}
        # The control: she has all she can have, and none of hers ends.
        assert len(broker.running) == 12
        for number in range(5):
            result = await bob.call_tool("run_python", {"code": "1", "tag": f"bob's {number}"})
            assert result.structured_content["tag"] == f"bob's {number}"
        assert len(broker.running) == 12
        tasks.cancel_scope.cancel()
