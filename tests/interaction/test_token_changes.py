"""Tokens that are added, removed, replaced and broken while the server runs."""

import gc
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import anyio
import httpx2
import pytest
from mcp.shared.exceptions import MCPError
from tests.fixtures.callers import kept
from tests.interaction.served import PAIRS, Era, Served, Transport, served, until

from glovebox_audit import read
from glovebox_server.transport import serve

HTTP = [pair for pair in PAIRS if pair[0] != "stdio"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often, and give answers little time."""
    monkeypatch.setattr(serve, "TOKEN_SECONDS", 0.02)
    monkeypatch.setattr(serve, "GRACE_SECONDS", 0.2)


async def health(server: Served, token: str) -> tuple[int, dict[str, object]]:
    """Ask for it."""
    async with httpx2.AsyncClient() as http:
        answer = await http.get(f"{server.url}/health", headers={"Authorization": f"Bearer {token}"})
        return answer.status_code, json.loads(answer.text) if answer.status_code == 200 else {}


async def settled(server: Served, token: str, status: int) -> None:
    """Wait until a token gets that answer."""
    with anyio.fail_after(10):
        while (await health(server, token))[0] != status:  # noqa: ASYNC110 - what is awaited is the server's
            await anyio.sleep(0.02)


@contextmanager
def cut(*, surely: bool) -> Iterator[None]:
    """One connection over SSE is cut in this block: take the two streams that the SDK leaves open then, and no other.

    Its ``connect_sse`` closes them only where the response ends by itself, not where it is cancelled. They hold memory
    alone, in a cycle: whichever test ran when it is collected would fail. ``surely`` is False where the client may
    have left before it was cut.
    """
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield
        gc.collect()
    left = sorted(str(each.message).partition(" at ")[0] for each in told)
    theirs = ["Unclosed <MemoryObjectReceiveStream", "Unclosed <MemoryObjectSendStream"]
    assert left == theirs or (not left and not surely)


async def test_a_token_comes_into_force_and_out_of_it_without_a_restart(tmp_path: Path) -> None:
    """Added, replaced, removed; the others are never refused (the control)."""
    async with served(tmp_path, "http") as server:
        place, first, second = tmp_path / "tokens" / "carol", "c" * 40, "d" * 40
        assert (await health(server, first))[0] == 401
        place.touch(mode=0o600)
        place.write_text(kept(first))
        await settled(server, first, 200)
        place.write_text(kept(second))
        await settled(server, second, 200)
        assert (await health(server, first))[0] == 401
        place.unlink()
        await settled(server, second, 401)
        assert (await health(server, server.tokens["alice"]))[0] == 200


async def test_a_broken_file_keeps_what_it_held_and_a_removed_one_goes_all_the_same(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is said in the log and in /health, without a name; a stranger hears nothing of it; repaired, it is over."""
    async with served(tmp_path, "http") as server:
        place, token = tmp_path / "tokens" / "bob", server.tokens["bob"]
        for break_it in (lambda: place.chmod(0o644), lambda: place.write_text("short")):
            break_it()
            (tmp_path / "tokens" / "alice").write_text(kept("e" * 40))
            await settled(server, "e" * 40, 200)
            assert (await health(server, token))[1]["unusable_token_files"] == 1
            assert (await health(server, server.tokens["alice"]))[0] == 401
            async with httpx2.AsyncClient() as http:
                assert (await http.get(f"{server.url}/health")).json() == {"status": "ok"}
            place.chmod(0o600)
            place.write_text(kept(token))
            (tmp_path / "tokens" / "alice").write_text(kept(server.tokens["alice"]))
            await settled(server, server.tokens["alice"], 200)
            with anyio.fail_after(10):
                while (await health(server, token))[1]["unusable_token_files"]:  # noqa: ASYNC110 - the server's
                    await anyio.sleep(0.02)
        said = capfd.readouterr().err
        assert "others have access to it (mode 644)" in said
        assert "it does not hold what" in said
        assert "short" not in said


async def test_where_all_are_removed_nobody_comes_in_and_none_is_made(tmp_path: Path) -> None:
    """A new one is made at a start alone."""
    async with served(tmp_path, "http") as server:
        for name, token in server.tokens.items():
            (tmp_path / "tokens" / name).unlink()
            await settled(server, token, 401)
        assert [each for each in (tmp_path / "tokens").iterdir() if not each.name.startswith(".")] == []
        async with httpx2.AsyncClient() as http:
            assert (await http.get(f"{server.url}/health")).json() == {"status": "ok"}


@pytest.mark.parametrize(("transport", "era"), HTTP)
async def test_calls_and_sessions_of_a_removed_token_end(transport: Transport, era: Era, tmp_path: Path) -> None:
    """The record says why; another caller's call at the same time goes on (the control)."""
    with nullcontext() if transport == "http" else cut(surely=False):
        async with served(tmp_path, transport) as server:
            async with server.client(transport, era, "bob") as other, anyio.create_task_group() as tasks:
                results: list[object] = []

                async def control() -> None:
                    results.append(await other.call_tool("run_python", {"code": "wait"}))

                tasks.start_soon(control)
                await until(lambda: len(server.app.broker.running) == 1)

                async def removed() -> None:
                    with pytest.raises((MCPError, ExceptionGroup, httpx2.HTTPError)):
                        async with server.client(transport, era, "alice") as client:
                            await client.call_tool("run_python", {"code": "wait"})

                tasks.start_soon(removed)
                await until(lambda: len(server.app.broker.running) == 2)
                (tmp_path / "tokens" / "alice").unlink()
                await until(lambda: len(server.app.broker.cancelled) == 1)
                await until(lambda: len(server.app.broker.running) == 1)
                server.app.broker.release.set()
                await until(lambda: bool(results))
            assert (await health(server, server.tokens["alice"]))[0] == 401
    kinds = [line.record.kind for line in read.tail(tmp_path / "audit", 100) if line.record]
    assert kinds.count("call.cancelled") == 1


async def test_open_streams_of_a_replaced_token_are_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever holds the old one hears nothing more; another caller's stays open (the control), and nothing failed."""
    with cut(surely=True):
        async with served(tmp_path, "http") as server, httpx2.AsyncClient(timeout=30) as http:

            async def read(name: str, ended: anyio.Event) -> None:
                headers = {"Authorization": f"Bearer {server.tokens[name]}"}
                async with http.stream("GET", f"{server.url}/sse", headers=headers) as answer:
                    opened.append(name)
                    async for _ in answer.aiter_raw():
                        pass
                ended.set()

            opened: list[str] = []
            theirs, others = anyio.Event(), anyio.Event()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read, "alice", theirs)
                tasks.start_soon(read, "bob", others)
                await until(lambda: len(opened) == 2)
                (tmp_path / "tokens" / "alice").write_text(kept("n" * 40))
                with anyio.fail_after(10):
                    await theirs.wait()
                assert not others.is_set()
                assert (await health(server, "n" * 40))[0] == 200
                tasks.cancel_scope.cancel()
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
