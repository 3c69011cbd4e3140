"""A channel in memory, and a guest on its other end that does what a test says. No process, no sandbox."""

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio
import anyio.abc

from _glovebox_guest import wire

READY: dict[str, Any] = {
    "uid": 65532, "gid": 65532, "groups": [], "capabilities": 0, "no_new_privs": True, "seccomp": 2, "dumpable": 0,
    "namespaces": {}, "mounts": [], "interfaces": ["lo"], "descriptors": [], "landlock": 4, "pid": 1,
    "hostname": "sandbox", "kernel": "Linux", "python": "3.11.2", "present": [],
}  # fmt: skip
OUTCOME: dict[str, Any] = {
    "stopped": "", "status": 0, "wall_ms": 1.0, "cpu_ms": 1.0, "memory_peak_bytes": 1, "skipped": [],
}  # fmt: skip


class Channel(anyio.abc.ByteStream):
    """The host's end."""

    def __init__(self) -> None:
        self.to_host, self._from_guest = anyio.create_memory_object_stream[bytes](math.inf)
        self._to_guest, self.from_host = anyio.create_memory_object_stream[bytes](0)
        self._rest = b""

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Bytes from the guest."""
        data = self._rest or await self._from_guest.receive()
        self._rest = data[max_bytes:]
        return data[:max_bytes]

    async def send(self, item: bytes) -> None:
        """Wait until the guest takes the bytes."""
        await self._to_guest.send(item)

    async def send_eof(self) -> None:
        """Nothing more comes for the guest."""
        self._to_guest.close()

    async def aclose(self) -> None:
        """Close both ways."""
        for end in (self.to_host, self._from_guest, self._to_guest, self.from_host):
            end.close()


class Guest:
    """A guest that may follow the rules (``wire``) or not (``say`` anything)."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.wire = wire.Wire("guest")
        self._early: list[wire.Event] = []

    async def say(self, data: bytes) -> None:
        """Send bytes."""
        await self.channel.to_host.send(data)

    async def hear(self) -> list[wire.Event]:
        """Events in the next bytes from the host."""
        early, self._early = self._early, []
        return early or self.wire.receive(await self.channel.from_host.receive())

    async def start(self) -> None:
        """Say ready and take the job."""
        await self.say(self.wire.message("ready", READY))
        while self.wire.state != "running":
            self._early = (await self.hear())[1:]

    async def done(self, outcome: Mapping[str, Any] = OUTCOME) -> None:
        """Say the outcome."""
        await self.say(self.wire.message("outcome", outcome))

    async def file(self, name: str, content: bytes) -> None:
        """Send one file and wait for credit where it takes some."""
        stream, frames = self.wire.open("file", {"name": name, "bytes": len(content)})
        await self.say(frames)
        view = memoryview(content)
        while view and self.wire.is_open(stream):
            credit = self.wire.credit(stream)
            if not credit:
                await self.hear()
                continue
            await self.say(self.wire.data(stream, view[:credit]))
            view = view[credit:]
        if self.wire.is_open(stream):
            await self.say(self.wire.end(stream))


Script = Callable[[Guest], Awaitable[None]]
