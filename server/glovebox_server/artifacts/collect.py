"""Receives one call's output files, chunk by chunk, until they are published or removed. No paths are made here.

Every name and byte comes from untrusted code. Must never be imported here: the wire, or anything of MCP.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final, TypeVar

from anyio import CancelScope, CapacityLimiter, to_thread

from glovebox_sandboxes.contract.spec import Limits
from glovebox_server.artifacts.diff_form import MAX_PATCH_BYTES, WorkBudget
from glovebox_server.artifacts.disk import Disk, translated
from glovebox_server.artifacts.media import Sniffer
from glovebox_server.artifacts.names import CallNames, check_name, name_risks
from glovebox_server.artifacts.patches import ENDINGS, patch_risks
from glovebox_server.artifacts.record import Artifact, ArtifactStoreError, new_id, uri_of
from glovebox_server.calls import ToolCall
from glovebox_server.errors import RefusedError

FLUSH_BYTES: Final = 256 * 1024
"""Bytes of one file in memory before a worker thread hashes and writes them: few thread switches."""

T = TypeVar("T")
Looks = Callable[[], Callable[[bytes], None] | None]
"""Makes an inspector for one incoming file; None for no inspection."""

CUT: Final = "its end may be missing: /output was full when it was written"
_KEEPING: Final = "keeping an output file"


class DiskWorker:
    """A runner of blocking disk work in its own threads, which translates failures."""

    __slots__ = ("_limiter",)

    def __init__(self, threads: int) -> None:
        self._limiter = CapacityLimiter(threads)

    async def run(self, attempted: str, work: Callable[[], T]) -> T:
        """Run ``work`` to its end, even if cancelled: two never write one file; raise ``ArtifactStoreError``."""
        with translated(attempted):
            return await to_thread.run_sync(work, limiter=self._limiter)


@dataclass(slots=True, kw_only=True, eq=False)
class FileSink:
    """One incoming file. Not for several tasks at once. Its last call is ``end`` or ``drop``."""

    collection: "Collection"
    name: str
    identifier: str
    descriptor: int
    cut: bool
    look: Callable[[bytes], None] | None
    failed: RefusedError | ArtifactStoreError | None = None
    """Why a write failed; then every later one fails too, and so does the end."""
    artifact: Artifact | None = None
    """The record, once the file has ended without an error."""
    _buffer: bytearray = field(default_factory=bytearray)
    _digest: Any = field(default_factory=hashlib.sha256)
    _sniffer: Sniffer = field(default_factory=Sniffer)
    _size: int = 0

    @property
    def uri(self) -> str:
        """Return the address that the file will have."""
        return uri_of(self.identifier)

    async def write(self, chunk: bytes) -> None:
        """Write the next bytes, at most one frame of the wire; memory is bounded by this and ``FLUSH_BYTES``.

        Raises:
            RefusedError: rule ``artifacts.bytes``; the call's files exceed ``limits.output_bytes``.
            ArtifactStoreError: the disk is full or failed.
        """
        if self.failed:
            raise self.failed
        try:
            self.collection.spend(len(chunk))
            self._size += len(chunk)
            self._buffer += chunk
            if len(self._buffer) >= FLUSH_BYTES:
                await self.collection.worker.run(_KEEPING, self._flush)
        except (RefusedError, ArtifactStoreError) as error:
            self.failed = error
            raise

    async def end(self) -> None:
        """Keep the whole file, or drop it and raise as ``write``."""
        if self.failed:  # the caller swallowed it, but the file has a hole
            await self.drop()
            raise self.failed
        try:
            artifact = await self.collection.worker.run(_KEEPING, self._seal)
        except BaseException:
            await self.drop()
            raise
        os.close(self.descriptor)
        self.artifact = artifact
        self.collection.sealed.append(artifact)

    async def drop(self) -> None:
        """Remove what was written."""
        os.close(self.descriptor)
        await self.collection.remove([self.identifier])

    def _flush(self) -> None:
        data = bytes(self._buffer)
        self._buffer.clear()
        self._digest.update(data)
        self._sniffer.feed(data)
        if self.look is not None:
            self.look(data)
        view = memoryview(data)
        while view:
            view = view[os.write(self.descriptor, view) :]

    def _seal(self) -> Artifact:
        self._flush()
        os.fsync(self.descriptor)
        content, call, created = self._sniffer.finish(self.name), self.collection.call, self.collection.clock()
        artifact = Artifact(
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
            expires=created + self.collection.ttl,
            risks=((CUT,) if self.cut else ()) + name_risks(self.name) + content.risks + self._patch_risks(),
        )
        self.collection.disk.seal(artifact)
        return artifact

    def _patch_risks(self) -> tuple[str, ...]:
        if not self.name.casefold().endswith(ENDINGS):
            return ()
        patch = os.pread(self.descriptor, self._size, 0) if self._size <= MAX_PATCH_BYTES else None
        return patch_risks(patch, self.collection.patches)


@dataclass(slots=True, kw_only=True, eq=False)
class Collection:
    """All output files of one call: bounded in number and bytes, invisible until published, else removed."""

    disk: Disk
    worker: DiskWorker
    call: ToolCall
    limits: Limits
    room: int | None
    clock: Callable[[], datetime]
    ttl: timedelta
    look: Looks
    patches: WorkBudget = field(default_factory=WorkBudget)
    sealed: list[Artifact] = field(default_factory=list)
    """The files that ended without an error and are not published yet, in the order of their ends."""
    _names: CallNames = field(default_factory=CallNames)
    _attempts: int = 0
    _bytes: int = 0
    _published: tuple[Artifact, ...] = ()

    def spend(self, size: int) -> None:
        """Charge bytes to the call's limit; raise ``RefusedError`` (rule ``artifacts.bytes``) if it is exceeded."""
        most = self.limits.output_bytes
        if self._bytes + size > most:
            reason = f"The output files of this call hold more than the {most} bytes its profile allows."
            raise RefusedError("artifacts.bytes", reason, "Write less to /output: fewer, smaller or compressed files.")
        self._bytes += size

    async def begin(self, name: str, *, cut: bool = False) -> FileSink:
        """Begin to receive a file. Several may be open at once.

        ``name`` is unchecked; ``cut`` is True if the end of the file may be missing.

        Raises:
            RefusedError: rule ``artifacts.count`` (too many files, refused ones included), or ``artifacts.name``.
            ArtifactStoreError: the disk is full or failed.
        """
        self._attempts += 1
        most = self.limits.output_files
        if self._attempts > most:
            reason = f"This call wrote more than the {most} output files its profile allows."
            raise RefusedError("artifacts.count", reason, "Write fewer files to /output, for instance one archive.")
        check_name(name)
        self._names.add(name)
        look = self.look()
        if look is not None:
            look(name.encode("utf-8", "replace"))
        identifier = new_id()
        try:
            # Shielded: a cancellation between the thread's end and ours would leak the descriptor.
            with CancelScope(shield=True):
                descriptor = await self.worker.run(_KEEPING, partial(self.disk.create, identifier))
        except BaseException:
            await self.remove([identifier])
            raise
        return FileSink(collection=self, name=name, identifier=identifier, descriptor=descriptor, cut=cut, look=look)

    async def publish(self) -> tuple[Artifact, ...]:
        """Make the received files visible to their owner, all or none, and return them.

        The audit records that announce them are written before this.

        Raises:
            RefusedError: rule ``artifacts.full``; they do not fit beside what has not expired, and are removed.
            ArtifactStoreError: the disk failed; they are removed.
        """
        artifacts = tuple(self.sealed)
        if artifacts:
            publish = partial(self.disk.publish, artifacts, self.clock(), self.room)
            with CancelScope(shield=True):  # else they could be visible and yet counted as not published
                try:
                    await self.worker.run("publishing output files", publish)
                except BaseException:
                    await self.discard()
                    raise
                self.sealed.clear()
                self._published = artifacts
        return artifacts

    async def withdraw(self) -> None:
        """Remove what was published, as no record announces it. Raises ``ArtifactStoreError`` if the disk failed."""
        gone, self._published = self._published, ()
        with CancelScope(shield=True):
            await self.worker.run("taking back output files", partial(self.disk.withdraw, gone))

    async def discard(self) -> None:
        """Remove the received files that were not published."""
        gone = [artifact.id for artifact in self.sealed]
        self.sealed.clear()
        if gone:
            await self.remove(gone)

    async def remove(self, identifiers: list[str]) -> None:
        """Remove received files."""
        with CancelScope(shield=True):
            await self.worker.run("removing an output file", partial(self.disk.drop, identifiers))
