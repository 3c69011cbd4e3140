"""The artifact store: quarantine for files from sandboxes, readable only by the principal that owns them.

``record`` accesses the disk, ``collect`` receives files. Must never be imported here: MCP, transports, drivers.
"""

import hashlib
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Final, Self, TypeVar

from anyio import CancelScope, CapacityLimiter, to_thread

from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server.artifacts import record
from glovebox_server.artifacts.record import MAX_ARTIFACTS, Artifact, ArtifactStoreError, Disk, expired, translated
from glovebox_server.calls import Principal

CHUNK_BYTES: Final = 256 * 1024
"""Bytes of one read: few thread switches, little memory, several wire frames."""
_THREADS: Final = 4
"""Threads for disk work: enough to keep a disk busy, too few for a stuck one to block the server's others."""


_SETTLED_NS: Final = 100_000_000
"""A file changed less than this ago could change again with the same mtime; kernel ticks are at most 10 ms."""

T = TypeVar("T")
_State = tuple[int, int, int, int]
"""Device, inode, size and mtime: if two are equal, the content was not changed in between."""


@dataclass(frozen=True, slots=True)
class ArtifactReader:
    """An open artifact. Content that was changed since it was stored is never returned."""

    artifact: Artifact
    _descriptor: int
    _store: "ArtifactStore"

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the content in pieces of at most ``CHUNK_BYTES``, hashing it.

        Raises ArtifactStoreError: after the last piece: the content is not what was stored. Or the disk failed.
        """
        digest, at, before = hashlib.sha256(), 0, _state_of(self._descriptor)

        def read() -> bytes:
            chunk = os.pread(self._descriptor, min(CHUNK_BYTES, self.artifact.bytes - at), at)
            digest.update(chunk)
            return chunk

        while chunk := await self._store.run("reading an artifact", read):
            at += len(chunk)
            yield chunk
        _require(digest.hexdigest() == self.artifact.sha256)
        if _state_of(self._descriptor) == before and time.time_ns() - before[-1] > _SETTLED_NS:
            if len(verified := self._store.verified) >= MAX_ARTIFACTS:
                verified.pop(next(iter(verified)))
            verified[self.artifact.id] = before

    async def part(self, offset: int, length: int) -> AsyncGenerator[bytes, None]:
        """Yield up to ``length`` bytes from ``offset``, after ``check``.

        Raises ArtifactStoreError: before the first piece that may not be what was stored. Or the disk failed.
        """
        verified, at, end = await self.check(), offset, min(offset + length, self.artifact.bytes)

        def read() -> bytes:
            chunk = os.pread(self._descriptor, min(CHUNK_BYTES, end - at), at)
            _require(_state_of(self._descriptor) == verified)
            return chunk

        while at < end and (chunk := await self._store.run("reading an artifact", read)):
            at += len(chunk)
            yield chunk

    async def check(self) -> _State:
        """Hash all of the content, unless done since its last change; return the state that was checked.

        Raises ArtifactStoreError: the content is not what was stored, or the disk failed.
        """
        state = _state_of(self._descriptor)
        if self._store.verified.get(self.artifact.id) != state:
            async for _ in self.chunks():
                pass
        return state

    async def read(self, at_most: int) -> bytes:
        """Return the whole content, at most ``at_most`` bytes.

        Raises RefusedError: rule ``artifacts.too_large``; there are more; ArtifactStoreError: the content is not what
        was stored, or the disk failed.
        """
        if self.artifact.bytes > at_most:
            reason = f"The artifact holds {self.artifact.bytes} bytes, and at most {at_most} can be read at once."
            hint = (
                f"Read it in parts, the first at {self.artifact.uri}?offset=0&length={at_most}, or name it in "
                "`inputs` of a run_python call."
            )
            raise RefusedError("artifacts.too_large", reason, hint)
        return b"".join([chunk async for chunk in self.chunks()])


class ArtifactStore:
    """The files of all calls: ``async with ArtifactStore(…).opened() as store``. Processes may share a directory."""

    def __init__(
        self, directory: Path, *, clock: Callable[[], datetime], ttl: timedelta, max_bytes_total: int, parts: int
    ) -> None:
        """Configure the store; nothing is touched before it is opened.

        Args:
            directory: the quarantine, on a local file system; created with mode 0700.
            clock: returns the time, with a time zone.
            ttl: lifetime of an artifact.
            max_bytes_total: of all artifacts.
            parts: divisor of these bytes, and of the number of artifacts, that gives one principal's share.
        """
        self.disk = Disk(directory, max_bytes_total=max_bytes_total, parts=parts)
        self._limiter = CapacityLimiter(_THREADS)
        self.clock = clock
        self.ttl = ttl
        self.verified: dict[str, _State] = {}  # reading in parts hashes an artifact only once

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Self]:
        """Check the directory, remove what crashed processes left, and leave nothing unfinished behind.

        Raises ArtifactStoreError: the directory cannot be made, or others have access to it.
        """
        try:
            with CancelScope(shield=True):
                await self.run("opening the artifact store", partial(self.disk.start, self.clock()))
            yield self
        finally:
            with CancelScope(shield=True):
                await self.run("closing the artifact store", self.disk.stop)

    async def run(self, attempted: str, work: Callable[[], T]) -> T:
        """Run disk work to its end in a thread of the store's own; two never write one file, even if cancelled.

        Raises ArtifactStoreError: it failed.
        """
        with translated(attempted):
            return await to_thread.run_sync(work, limiter=self._limiter)

    @asynccontextmanager
    async def open(self, uri: str, principal: Principal) -> AsyncIterator[ArtifactReader]:
        """Open an artifact for its owner; its content is not read yet, and ``uri`` is unchecked.

        Raises RefusedError: rule ``artifacts.unknown``, worded alike whether it never existed, expired or is another's;
        ArtifactStoreError: the disk failed.
        """
        identifier = record.id_of(uri)
        if identifier is None:
            raise record.unknown()
        artifact = await self.run("reading an artifact", partial(self.disk.load, identifier))
        if artifact is None or artifact.owner != principal.id or expired(artifact, self.clock()):
            raise record.unknown()
        with CancelScope(shield=True):  # as in ``Collector.begin``: the descriptor must not leak
            descriptor = await self.run("reading an artifact", partial(self.disk.open, artifact))
        if descriptor is None:  # removed just now
            raise record.unknown()
        try:
            yield ArtifactReader(artifact, descriptor, self)
        finally:
            os.close(descriptor)

    async def owned(self, principal: Principal) -> list[Artifact]:
        """Return a principal's artifacts, newest first. Raises ``ArtifactStoreError`` if the disk failed."""
        found = await self.run("listing artifacts", partial(self.disk.listed, self.clock()))
        mine = [artifact for artifact in found if artifact.owner == principal.id]
        return sorted(mine, key=lambda artifact: artifact.created, reverse=True)

    async def sweep(self) -> int:
        """Remove expired artifacts and what crashes left, and return the number removed; call it every few minutes.

        Raises ArtifactStoreError: the disk failed.
        """
        return await self.run("removing expired artifacts", partial(self.disk.clean, self.clock()))


def _state_of(descriptor: int) -> _State:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _require(same: bool) -> None:
    if not same:
        reason = "its content no longer matches its sha256 and was not handed out"
        raise ArtifactStoreError("reading an artifact", reason, "Run the call again, and check the disk.")
