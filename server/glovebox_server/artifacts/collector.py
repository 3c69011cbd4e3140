"""Turns the output of a sandbox into artifacts: every file is checked and recorded, or recorded as refused."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from glovebox_audit.events import ArtifactCollected, ArtifactRefused
from glovebox_sandboxes.contract.outcome import Blob, Outcome, Shown, SkippedFile
from glovebox_sandboxes.contract.pictures import HEAD_BYTES, IMAGE_TYPES, MAX_BYTES, MAX_PICTURES, fits
from glovebox_server.artifacts.collect import Collection, FileSink
from glovebox_server.artifacts.names import quoted
from glovebox_server.artifacts.record import Artifact, ArtifactStoreError
from glovebox_server.calls import Delivered, Image, Link, ToolCall
from glovebox_server.errors import RefusedError
from glovebox_server.receipts.recorder import CallRecorder
from glovebox_server.tools.base import cut_output

MAX_REFUSED = 128
"""Refused files with a record and a note of their own; the rest are counted, which bounds the log."""


class Collector:
    """The collector of one call's files: ``async with Collector(…) as collector``; leaving drops incomplete ones."""

    def __init__(
        self, collection: Collection, recorder: CallRecorder, call: ToolCall, mask: Callable[[str], str] = str
    ) -> None:
        """Collect for this call; a file is refused if ``mask`` finds a secret in its name, i.e. changes it."""
        self._collection = collection
        self._recorder = recorder
        self._call = call
        self._mask = mask
        self._skipped: list[SkippedFile] = []
        self._uncounted = 0
        self._open: set[_Receiving] = set()
        self._images: dict[str, bytes] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for receiving in tuple(self._open):
            await receiving.drop(_INCOMPLETE)

    async def accept(self, name: str, size: int, *, cut: bool = False) -> "_Receiving | None":
        """Accept one file that the guest announces; None refuses it. Size and ``cut`` are the guest's claims."""
        masked = self._mask(name)
        if masked != name:
            await self.refuse(masked, _NAMED)
            return None
        receiving = _Receiving(self, name, keep=size <= MAX_BYTES, cut=cut)
        return receiving if await receiving.begin(self._collection) else None

    def hold(self, receiving: "_Receiving") -> None:
        """Track a file that has begun, until ``release``."""
        self._open.add(receiving)

    def release(self, receiving: "_Receiving") -> None:
        """Stop tracking a file that has ended."""
        self._open.discard(receiving)

    async def refuse(self, name: str, refusal: RefusedError) -> None:
        """Record that a file is not an artifact."""
        if len(self._skipped) == MAX_REFUSED:
            self._uncounted += 1
            return
        await self._refused(quoted(name), refusal.reason)

    async def _refused(self, name: str, reason: str, count: int | None = None) -> None:
        self._skipped.append(SkippedFile(name=name, reason=reason, count=count))
        await self._record(name, reason, count)

    def saw(self, uri: str, content: bytes) -> None:
        """Keep a small picture to show."""
        if len(self._images) < MAX_PICTURES and any(content.startswith(magic) for magic in IMAGE_TYPES.values()):
            self._images[uri] = content

    async def deliver(self, outcome: Outcome, *, keep_pictures: bool) -> Delivered:
        """Record what was collected, then make it visible to the caller.

        With ``keep_pictures``, returned pictures, and output too long for a result, become artifacts too.

        Raises:
            ArtifactStoreError: the store failed.
            AuditError: a record could not be written; nothing is visible.
        """
        for receiving in sorted(self._open, key=lambda each: each.name):
            await receiving.drop(_INCOMPLETE)
            await self.refuse(receiving.name, _INCOMPLETE)
        for skipped in outcome.skipped:
            await self._record(quoted(skipped.name), skipped.reason, skipped.count)
        figures = await self._keep(outcome.blobs) if keep_pictures else {}
        texts = await self._keep_texts(outcome) if keep_pictures else {}
        links = [_link(artifact) for artifact in await self._publish()]
        if self._uncounted:
            await self._refused("…", f"and {self._uncounted} more", self._uncounted)
        looks = _Looks()
        by_uri = {link.uri: link for link in links}
        for number, blob in enumerate(outcome.blobs):
            looks.add(by_uri.get(figures.get(number, "")), blob.data, blob.media_type, blob.shown)
        copies = {each.name: each for each in reversed(outcome.shown)}
        pictures = [link for link in links if link.uri not in figures.values() and link.media_type in IMAGE_TYPES]
        for link in pictures[:MAX_PICTURES]:
            looks.add(link, self._images.get(link.uri, b""), link.media_type, copies.get(link.name))
        for copy in outcome.shown:
            if not copy.name:
                looks.add(None, b"", copy.media_type, copy, not_kept=_TOO_LARGE)
        return Delivered(
            # Only the first files of a call are scanned, so the caller's output comes before others.
            artifacts=tuple(
                sorted(
                    (link for link in links if link.uri not in figures.values()),
                    key=lambda link: link.uri not in texts.values(),
                )
            ),
            figures=tuple(link for link in links if link.uri in figures.values()),
            shown=tuple(looks.shown),
            notes=tuple(looks.notes),
            skipped=tuple(self._skipped),
            whole={name: uri for name, uri in texts.items() if uri in by_uri},
        )

    async def _keep(self, blobs: tuple[Blob, ...]) -> dict[int, str]:
        """Store pictures as files; return their URIs by number. A program's file of that name wins."""
        kept = {}
        for number, blob in enumerate(blobs, 1):
            name = f"figure-{number}.{blob.media_type.partition('/')[2]}"
            if uri := await self._put(name, blob.data):
                kept[number - 1] = uri
        return kept

    async def _keep_texts(self, outcome: Outcome) -> dict[str, str]:
        _, cut = cut_output(outcome)
        # A program cannot learn its call's id, so none of its files has this name.
        names = {name: f"{name}-{self._call.id[-6:]}.txt" for name in cut}
        return {name: uri for name, file in names.items() if (uri := await self._put(file, cut[name].whole))}

    async def _put(self, name: str, data: bytes) -> str | None:
        """Store bytes as a file of the call; return its URI, None if it is refused."""
        receiving = _Receiving(self, name, keep=False)
        if not await receiving.begin(self._collection):
            return None
        await receiving.data(data)
        await receiving.end()
        return receiving.uri

    async def _publish(self) -> tuple[Artifact, ...]:
        found = self._collection.artifacts
        for artifact in found:
            await self._recorder.record(
                ArtifactCollected(
                    call_id=self._call.id,
                    name=artifact.name,
                    uri=artifact.uri,
                    sha256=artifact.sha256,
                    bytes=artifact.bytes,
                    media_type=artifact.media_type,
                    risks=artifact.risks or None,
                )
            )
        try:
            published = await self._collection.publish()
        except RefusedError as refusal:
            for artifact in found:
                await self.refuse(artifact.name, refusal)
            return ()
        # No await in between: a call cancelled there would lose track of what it has published.
        self._recorder.published((artifact.uri for artifact in published), self._collection.withdraw)
        return published

    async def _record(self, name: str, reason: str, count: int | None) -> None:
        await self._recorder.record(ArtifactRefused(call_id=self._call.id, name=name, reason=reason, count=count))


_NAMED = RefusedError("artifacts.name", "What looks like a secret is in its name.", "Give it another name.")
_INCOMPLETE = RefusedError("artifacts.incomplete", "It did not arrive whole.", "Run it again.")


def _link(artifact: Artifact) -> Link:
    return Link(
        uri=artifact.uri,
        name=artifact.name,
        media_type=artifact.media_type,
        bytes=artifact.bytes,
        sha256=artifact.sha256,
        risks=artifact.risks,
    )


_TOO_LARGE = "too large to be kept as a figure: save it to /output"
"""Of a figure of which the guest returns only a copy."""


class _Looks:
    """The pictures shown to clients: each itself or, if it is too large for them, a copy."""

    def __init__(self) -> None:
        self.shown: list[Image] = []
        self.notes: list[str] = []

    def add(
        self, link: Link | None, data: bytes, media_type: str, copy: Shown | None, *, not_kept: str = "not kept"
    ) -> None:
        """Show a picture, or its smaller copy, and note the artifact; ``data`` is empty if it is too large."""
        name, kept = (link.name, link.uri) if link else ("A picture", not_kept)
        if copy is not None and copy.data:
            self.shown.append(Image(data=copy.data, media_type=copy.media_type))
            shown, of = (f"{width} × {height}" for width, height in (copy.size, copy.of))
            same = f"{name}: shown in fewer bytes; the original is {kept}"
            self.notes.append(same if shown == of else f"{name}: shown at {shown}; the original, {of}, is {kept}")
        elif copy is not None:
            self.notes.append(f"{name}: not shown, {copy.reason}; it is {kept}")
        elif fits(data[:HEAD_BYTES], media_type, len(data), MAX_BYTES):
            self.shown.append(Image(data=data, media_type=media_type))
        else:
            self.notes.append(f"{name}: not shown, no smaller copy was made of it in time; it is {kept}")


class _Receiving:
    """One file on its way to the store. If refused, that is recorded and the rest of it discarded."""

    def __init__(self, collector: Collector, name: str, *, keep: bool, cut: bool = False) -> None:
        self.name = name
        self.uri = ""
        self._collector = collector
        self._stack = AsyncExitStack()
        self._sink: FileSink | None = None
        self._kept: bytearray | None = bytearray() if keep else None
        self._cut = cut

    async def begin(self, collection: Collection) -> bool:
        try:
            self._sink = await self._stack.enter_async_context(collection.receive(self.name, cut=self._cut))
        except RefusedError as refusal:
            await self._collector.refuse(self.name, refusal)
            return False
        self.uri = self._sink.uri
        self._collector.hold(self)
        return True

    async def data(self, data: bytes) -> None:
        if self._sink is None:
            return
        try:
            await self._sink.write(data)
        except RefusedError as refusal:
            await self.drop(refusal)
            await self._collector.refuse(self.name, refusal)
            return
        except ArtifactStoreError as problem:
            await self.drop(problem)
            raise
        if self._kept is not None:
            self._kept += data
            if len(self._kept) > MAX_BYTES:
                self._kept = None

    async def end(self) -> None:
        if self._sink is None:
            return
        sink, self._sink = self._sink, None
        self._collector.release(self)
        try:
            await self._stack.aclose()
        except RefusedError as refusal:
            await self._collector.refuse(self.name, refusal)
            return
        if self._kept is not None:
            self._collector.saw(sink.uri, bytes(self._kept))

    async def drop(self, problem: Exception) -> None:
        """Leave the store's block by an exception, which removes the file."""
        self._sink = None
        self._collector.release(self)
        await self._stack.__aexit__(type(problem), problem, problem.__traceback__)
