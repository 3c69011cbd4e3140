"""From what a sandbox put out to artifacts: every file checked and recorded, or recorded as refused."""

from contextlib import AsyncExitStack
from dataclasses import dataclass

from sandboxes.outcome import Outcome, SkippedFile
from sandboxes.result import IMAGE_TYPES
from server.artifacts.collect import Collection
from server.artifacts.collect import Sink as FileSink
from server.artifacts.names import quoted
from server.artifacts.record import ArtifactsUnavailable
from server.audit.events import ArtifactCollected, ArtifactRefused
from server.audit.log import AuditLog
from server.calls import Image, Link, ToolCall
from server.errors import Refused

MAX_INLINE_BYTES = 128 * 1024
"""An image file of this size is also shown; larger ones are links, because messages are capped at 256 KiB."""
MAX_INLINE = 4
"""Image files shown in one result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """What a call's caller gets beside the program's own words."""

    artifacts: tuple[Link, ...]
    figures: tuple[Link, ...]
    """Pictures the job returned, which are artifacts too."""
    shown: tuple[Image, ...]
    skipped: tuple[SkippedFile, ...]


class Collector:
    """Collects the files of one call."""

    def __init__(self, collection: Collection, audit: AuditLog, call: ToolCall) -> None:
        self._collection = collection
        self._audit = audit
        self._call = call
        self._skipped: list[SkippedFile] = []
        self._images: dict[str, bytes] = {}

    async def accept(self, name: str, size: int) -> "_Receiving | None":
        """Take one file the guest announces; None refuses it. Its size is only what the guest says."""
        receiving = _Receiving(self, name, keep=size <= MAX_INLINE_BYTES)
        return receiving if await receiving.begin(self._collection) else None

    async def refuse(self, name: str, refusal: Refused) -> None:
        """Record that a file is not an artifact."""
        self._skipped.append(SkippedFile(name=quoted(name), reason=refusal.reason))
        await self._audit.append(ArtifactRefused(call_id=self._call.id, name=quoted(name), reason=refusal.reason))

    def saw(self, uri: str, content: bytes) -> None:
        """Keep a small picture, to be shown."""
        if len(self._images) < MAX_INLINE and any(content.startswith(magic) for magic in IMAGE_TYPES.values()):
            self._images[uri] = content

    async def deliver(self, outcome: Outcome) -> Delivered:
        """Record what was collected, then make it visible to the caller.

        Raises:
            SandboxUnavailable: the store failed.
            AuditUnavailable: a record could not be written; nothing is visible.
        """
        for skipped in outcome.skipped:
            await self._audit.append(
                ArtifactRefused(call_id=self._call.id, name=quoted(skipped.name), reason=skipped.reason)
            )
        figures = []
        for number, blob in enumerate(outcome.blobs, 1):
            name = f"figure-{number}.{blob.media_type.partition('/')[2]}"
            receiving = _Receiving(self, name, keep=False)
            if await receiving.begin(self._collection):
                await receiving.data(blob.data)
                await receiving.end()
                figures.append(name)
        found = self._collection.artifacts
        for artifact in found:
            await self._audit.append(
                ArtifactCollected(
                    call_id=self._call.id,
                    name=artifact.name,
                    uri=artifact.uri,
                    sha256=artifact.sha256,
                    bytes=artifact.bytes,
                    media_type=artifact.media_type,
                )
            )
        try:
            await self._collection.publish()
        except Refused as refusal:
            for artifact in found:
                await self.refuse(artifact.name, refusal)
            found = ()
        links = {
            artifact.name: Link(
                uri=artifact.uri,
                name=artifact.name,
                media_type=artifact.media_type,
                bytes=artifact.bytes,
                sha256=artifact.sha256,
            )
            for artifact in found
        }
        shown = [Image(data=blob.data, media_type=blob.media_type) for blob in outcome.blobs]
        shown += [
            Image(data=self._images[link.uri], media_type=link.media_type)
            for link in links.values()
            if link.uri in self._images and link.media_type in IMAGE_TYPES
        ]
        return Delivered(
            artifacts=tuple(link for name, link in links.items() if name not in figures),
            figures=tuple(links[name] for name in figures if name in links),
            shown=tuple(shown),
            skipped=tuple(self._skipped),
        )


class _Receiving:
    """One file on its way from the guest to the store. What fails is recorded and the rest of it dropped."""

    def __init__(self, collector: Collector, name: str, *, keep: bool) -> None:
        self._collector = collector
        self._name = name
        self._stack = AsyncExitStack()
        self._sink: FileSink | None = None
        self._kept: bytearray | None = bytearray() if keep else None

    async def begin(self, collection: Collection) -> bool:
        try:
            self._sink = await self._stack.enter_async_context(collection.receive(self._name))
        except Refused as refusal:
            await self._collector.refuse(self._name, refusal)
            return False
        return True

    async def data(self, data: bytes) -> None:
        if self._sink is None:
            return
        try:
            await self._sink.write(data)
        except (Refused, ArtifactsUnavailable) as problem:
            self._sink = None
            await self._give_up(problem)
            return
        if self._kept is not None:
            self._kept += data
            if len(self._kept) > MAX_INLINE_BYTES:
                self._kept = None

    async def end(self) -> None:
        if self._sink is None:
            return
        sink, self._sink = self._sink, None
        try:
            await self._stack.aclose()
        except Refused as refusal:
            await self._collector.refuse(self._name, refusal)
            return
        if self._kept is not None:
            self._collector.saw(sink.uri, bytes(self._kept))

    async def _give_up(self, problem: Refused | ArtifactsUnavailable) -> None:
        """Leave the store's block by the exception, so that it removes what it had."""
        try:
            await self._stack.__aexit__(type(problem), problem, problem.__traceback__)
        except Refused as refusal:
            await self._collector.refuse(self._name, refusal)
