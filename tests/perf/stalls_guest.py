"""Hostile guests: what they say on the wire once they have their job, and before."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
from tests.fixtures.channels import OUTCOME, READY, Channel
from tests.fixtures.wire_peers import CREDIT, DATA, MESSAGE, RESET, frame, opening

from _glovebox_guest import wire
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.session.connection import Duplex, GuestConnection
from glovebox_server import event_loop

_LONGEST = wire.MAX_MESSAGE - 100


def _message(kind: str, body: Any) -> bytes:
    return frame(MESSAGE, 0, json.dumps({"kind": kind, "body": body}, separators=(",", ":")).encode())


def _measured() -> Iterator[tuple[str, bytes]]:
    """What is said instead of a measurement."""
    yield (
        "ready: arrays",
        frame(MESSAGE, 0, b'{"kind":"ready","body":{"mounts":[' + b"[]," * (_LONGEST // 3 - 30) + b"0]}}"),
    )
    yield "ready: as many fields as may be", _message("ready", {**READY, **{f"k{n}": n for n in range(16_000)}})
    yield "ready: as many mounts as may be", _message("ready", {**READY, "mounts": [{}] * 16_000})
    yield "ready: wrong namespaces", _message("ready", {**READY, "namespaces": {f"n{n}": "x" for n in range(16_000)}})
    yield "ready: right namespaces", _message("ready", {**READY, "namespaces": {f"n{n}": n for n in range(16_000)}})
    yield "ready: wrong interfaces", _message("ready", {**READY, "interfaces": [0] * 32_000})


def _running() -> Iterator[tuple[str, bytes]]:
    """What is said while a job runs."""
    yield "tiny data", opening(1) + frame(DATA, 1, b"x") * (wire.WINDOW // 4)
    yield "streams opened and dropped", b"".join(opening(n) + frame(RESET, n, {}) for n in range(1, 40_000, 2))
    yield "credit", opening(1, duplex=True) + frame(CREDIT, 1, {"credit": 1}) * 200_000
    yield "resets of a stream that is over", opening(1) + frame(RESET, 1, {}) * 200_000
    arrays = b'{"a":[' + b"[]," * (_LONGEST // 3 - 10) + b"0]}"
    yield "arrays", opening(1) + frame(RESET, 1, arrays)
    bounded = b'{"a":[' + b"[]," * 16_000 + b"0]}"
    yield "as many arrays as may be, again and again", opening(1) + frame(RESET, 1, bounded) * 100
    text = b'{"a":"' + b"\\u00e9" * (_LONGEST // 6) + b'"}'
    yield "long texts again and again", opening(1) + frame(RESET, 1, text) * 30
    yield "outcome: fields", _message("outcome", {**OUTCOME, **{f"k{n}": n for n in range(16_000)}})
    yield "outcome: skipped", _message("outcome", {**OUTCOME, "skipped": [{}] * 16_000})
    skipped = [{"name": "é" * 1024, "reason": "é" * 200}] * 64
    yield "outcome: as much as may be", _message("outcome", {**OUTCOME, "skipped": skipped})


class _Nothing:
    async def data(self, data: bytes) -> None:
        """Throw it away."""

    async def end(self) -> None:
        """Nothing more comes."""


async def _accept(_kind: str, _meta: object) -> _Nothing:
    return _Nothing()


async def _serve(_duplex: Duplex) -> None:
    await anyio.sleep_forever()


async def _listened(first: bytes, said: bytes) -> float:
    channel = Channel()
    await channel.to_host.send(first)
    for at in range(0, len(said), 1 << 20):
        await channel.to_host.send(said[at : at + (1 << 20)])
    channel.to_host.close()
    await anyio.lowlevel.checkpoint()
    event_loop.settled()  # as a server does
    with anyio.move_on_after(60):
        async with anyio.create_task_group() as tasks:

            async def take() -> None:
                async for _ in channel.from_host:
                    pass

            tasks.start_soon(take)
            try:
                link = GuestConnection(channel)
                await link.ready()
                await link.run({"kind": "python"}, (), {}, _accept, _serve)
            except (SandboxError, anyio.EndOfStream):
                pass
            tasks.cancel_scope.cancel()
    await anyio.lowlevel.checkpoint()
    await channel.aclose()
    return event_loop.longest_stall_ms() or 0.0


def inputs() -> Iterator[tuple[str, bytes, bytes]]:
    """Name of each, what is said before the job, and after it."""
    right, last = _message("ready", READY), _message("outcome", OUTCOME)
    for name, said in _measured():
        yield f"guest: {name}", said, b""
    for name, said in _running():
        yield f"guest: {name}", right, said if name.startswith("outcome") else said + last


def stall(before: bytes, after: bytes) -> float:
    """Milliseconds."""
    return event_loop.run(partial(_listened, before, after))


def each(chosen: Callable[[str], bool]) -> Iterator[tuple[str, float]]:
    """Names and stalls."""
    for name, before, after in inputs():
        if chosen(name):
            yield name, stall(before, after)
