"""Receives one call's output files, chunk by chunk, until they are published or removed. No paths are made here.

Every name and byte comes from untrusted code. Must never be imported here: the wire, or anything of MCP.
"""

import hashlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime, timedelta
from functools import partial
from typing import Final, TypeVar

from anyio import CancelScope, CapacityLimiter, to_thread

from glovebox_sandboxes.contract.spec import Limits
from glovebox_server.artifacts.diff_form import WorkBudget
from glovebox_server.artifacts.disk import Disk, translated
from glovebox_server.artifacts.media import Sniffer
from glovebox_server.artifacts.names import CallNames, check_name, name_risks
from glovebox_server.artifacts.patches import ENDINGS, PatchPaths
from glovebox_server.artifacts.record import Artifact, ArtifactStoreError, new_id, uri_of
from glovebox_server.calls import ToolCall
from glovebox_server.errors import RefusedError

FLUSH_BYTES: Final = 256 * 1024
"""Bytes of one file in memory before a worker thread hashes and writes them: few thread switches."""

T = TypeVar("T")
Looks = Callable[[], Callable[[bytes], None] | None]
"""Makes an inspector for one incoming file; None for no inspection."""


def nothing() -> None:
    """Return no inspector."""


CUT: Final = "its end may be missing: /output was full when it was written"


class DiskWorker:
    """A runner of blocking disk work in its own threads, which translates failures."""

    __slots__ = ("_limiter",)

    def __init__(self, threads: int) -> None:
        self._limiter = CapacityLimiter(threads)

    async def run(self, attempted: str, work: Callable[[], T]) -> T:
        """Run ``work`` to its end, even if cancelled: two never write one file; raise ``ArtifactStoreError``."""
        with translated(attempted):
            return await to_thread.run_sync(work, limiter=self._limiter)


class FileSink:
    """One incoming file. Not for several tasks at once."""

    __slots__ = (
        "_buffer",
        "_collection",
        "_cut",
        "_descriptor",
        "_digest",
        "_look",
        "_paths",
        "_size",
        "_sniffer",
        "artifact",
        "failed",
        "name",
        "uri",
    )

    def __init__(
        self, collection: "Collection", name: str, uri: str, descriptor: int, *, cut: bool,
        look: Callable[[bytes], None] | None,
    ) -> None:  # fmt: skip
        self._collection = collection
        self._cut = cut
        self._descriptor = descriptor
        self._buffer = bytearray()
        self._digest = hashlib.sha256()
        self._sniffer = Sniffer()
        self._paths = PatchPaths(collection.patches) if name.casefold().endswith(ENDINGS) else None
        self._size = 0
        self._look = look
        if look is not None:
            look(name.encode("utf-8", "replace"))
        self.name = name
        self.uri = uri
        self.failed: RefusedError | ArtifactStoreError | None = None
        """Why a write failed; then every later one fails too, and so does the end."""
        self.artifact: Artifact | None = None
        """The record, once the file has ended without an error."""

    async def write(self, chunk: bytes) -> None:
        """Write the next bytes, at most one frame of the wire; memory is bounded by this and ``FLUSH_BYTES``.

        Raises:
            RefusedError: rule ``artifacts.bytes``; the call's files exceed ``limits.output_bytes``.
            ArtifactStoreError: the disk is full or failed.
        """
        if self.failed:
            raise self.failed
        try:
            self._collection.spend(len(chunk))
            self._size += len(chunk)
            self._buffer += chunk
            if len(self._buffer) >= FLUSH_BYTES:
                await self._collection.worker.run("keeping an output file", self._flush)
        except (RefusedError, ArtifactStoreError) as error:
            self.failed = error
            raise

    def _flush(self) -> None:
        data = bytes(self._buffer)
        self._buffer.clear()
        self._digest.update(data)
        self._sniffer.feed(data)
        if self._look is not None:
            self._look(data)
        if self._paths is not None:
            self._paths.feed(data)
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]

    def finish(self, call: ToolCall, created: datetime, expires: datetime) -> Artifact:
        """Write the rest to the disk and return the record. Blocking."""
        self._flush()
        os.fsync(self._descriptor)
        content = self._sniffer.finish(self.name)
        return Artifact(
            uri=self.uri,
            owner=call.principal.id,
            call_id=call.id,
            client=call.principal.client,
            run=call.run,
            workflow=call.principal.workflow,
            tool=call.tool,
            name=self.name,
            sha256=self._digest.hexdigest(),
            bytes=self._size,
            media_type=content.media_type,
            created=created,
            expires=expires,
            risks=(
                *((CUT,) if self._cut else ()),
                *name_risks(self.name),
                *content.risks,
                *(self._paths.risks() if self._paths else ()),
            ),
        )


class Collection:
    """All output files of one call: bounded in number and bytes, invisible until published, else removed."""

    def __init__(
        self,
        *,
        disk: Disk,
        worker: DiskWorker,
        call: ToolCall,
        limits: Limits,
        room: int | None,
        clock: Callable[[], datetime],
        ttl: timedelta,
        look: Looks,
    ) -> None:
        self.worker = worker
        self.patches = WorkBudget()
        self._disk = disk
        self._call = call
        self._limits = limits
        self._room = room
        self._clock = clock
        self._ttl = ttl
        self._look = look
        self._names = CallNames()
        self._attempts = 0
        self._bytes_left = limits.output_bytes
        self._sealed: list[Artifact] = []
        self._published: tuple[Artifact, ...] = ()

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        """Return the files that ended without an error and are not published yet, in the order of their ends."""
        return tuple(self._sealed)

    def spend(self, size: int) -> None:
        """Charge bytes to the call's limit; raise ``RefusedError`` (rule ``artifacts.bytes``) if it is exceeded."""
        if size > self._bytes_left:
            most = self._limits.output_bytes
            reason = f"The output files of this call hold more than the {most} bytes its profile allows."
            raise RefusedError("artifacts.bytes", reason, "Write less to /output: fewer, smaller or compressed files.")
        self._bytes_left -= size

    @asynccontextmanager
    async def receive(self, name: str, *, cut: bool = False) -> AsyncIterator[FileSink]:
        """Receive one file: ``async with collection.receive(name) as sink``; leaving normally is its end.

        Leaving by an exception or cancellation removes what was written. Several may be open at once. ``name`` is
        unchecked; ``cut`` is True if the end of the file may be missing.

        Raises:
            RefusedError: rule ``artifacts.count`` (too many files, refused ones included), ``artifacts.name``, or
                ``artifacts.bytes`` from ``FileSink.write``. The call's other files are not affected.
            ArtifactStoreError: the disk is full or failed.
        """
        self._attempts += 1
        if self._attempts > self._limits.output_files:
            most = self._limits.output_files
            reason = f"This call wrote more than the {most} output files its profile allows."
            raise RefusedError("artifacts.count", reason, "Write fewer files to /output, for instance one archive.")
        check_name(name)
        self._names.add(name)
        identifier = new_id()
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self._drop, [identifier], [])
            # Shielded: a cancellation between the thread's end and ours would leak the descriptor.
            with CancelScope(shield=True):
                descriptor = await self.worker.run("keeping an output file", partial(self._disk.create, identifier))
            try:
                sink = FileSink(self, name, uri_of(identifier), descriptor, cut=cut, look=self._look())
                yield sink
                if sink.failed:  # the caller swallowed it, but the file has a hole
                    raise sink.failed
                created = self._clock()
                finish = partial(sink.finish, self._call, created, created + self._ttl)
                artifact = await self.worker.run("keeping an output file", finish)
            finally:
                os.close(descriptor)
            undo.push_async_callback(self._drop, [identifier], [artifact.sha256])
            await self.worker.run("keeping an output file", partial(self._disk.seal, artifact))
            self._sealed.append(artifact)
            sink.artifact = artifact
            undo.pop_all()

    async def publish(self) -> tuple[Artifact, ...]:
        """Make the received files visible to their owner, all or none, and return them.

        The audit records that announce them are written before this.

        Raises:
            RefusedError: rule ``artifacts.full``; they do not fit beside what has not expired, and are removed.
            ArtifactStoreError: the disk failed; they are removed.
        """
        artifacts = self.artifacts
        if artifacts:
            publish = partial(self._disk.publish, artifacts, self._clock(), self._room)
            with CancelScope(shield=True):  # else they could be visible and yet counted as not published
                try:
                    await self.worker.run("publishing output files", publish)
                except BaseException:
                    await self.discard()
                    raise
                self._sealed.clear()
                self._published = artifacts
        return artifacts

    async def withdraw(self) -> None:
        """Remove what was published, as no record announces it. Raises ``ArtifactStoreError`` if the disk failed."""
        gone, self._published = self._published, ()
        with CancelScope(shield=True):
            await self.worker.run("taking back output files", partial(self._disk.withdraw, gone))

    async def discard(self) -> None:
        """Remove the received files that were not published."""
        gone = self.artifacts
        self._sealed.clear()
        if gone:
            await self._drop([artifact.id for artifact in gone], [artifact.sha256 for artifact in gone])

    async def _drop(self, identifiers: list[str], digests: list[str]) -> None:
        with CancelScope(shield=True):
            await self.worker.run("removing an output file", partial(self._disk.drop, identifiers, digests))
