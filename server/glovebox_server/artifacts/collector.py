"""Turns the output of a sandbox into artifacts: every file is checked and recorded, or recorded as refused."""

from collections.abc import Callable
from dataclasses import dataclass, field
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


@dataclass(slots=True, eq=False)
class Collector:
    """The collector of one call's files: ``async with Collector(…) as collector``; leaving drops incomplete ones."""

    collection: Collection
    recorder: CallRecorder
    call: ToolCall
    mask: Callable[[str], str] = str
    """A file is refused if this finds a secret in its name, i.e. changes it."""
    _skipped: list[SkippedFile] = field(default_factory=list)
    _uncounted: int = 0
    _open: "list[_Receiving]" = field(default_factory=list)
    _images: dict[str, bytes] = field(default_factory=dict)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for receiving in tuple(self._open):
            await receiving.drop()

    async def accept(self, name: str, size: int, *, cut: bool = False) -> "_Receiving | None":
        """Accept one file that the guest announces; None refuses it. Size and ``cut`` are the guest's claims."""
        masked = self.mask(name)
        if masked != name:
            await self.refuse(masked, _NAMED)
            return None
        return await self._begin(name, keep=size <= MAX_BYTES, cut=cut)

    async def _begin(self, name: str, *, keep: bool = False, cut: bool = False) -> "_Receiving | None":
        try:
            sink = await self.collection.begin(name, cut=cut)
        except RefusedError as refusal:
            await self.refuse(name, refusal)
            return None
        receiving = _Receiving(self, sink, bytearray() if keep else None)
        self._open.append(receiving)
        return receiving

    def release(self, receiving: "_Receiving") -> None:
        """Stop tracking a file that has ended."""
        self._open.remove(receiving)

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
        for receiving in sorted(self._open, key=lambda each: each.sink.name):
            await receiving.drop()
            await self.refuse(receiving.sink.name, _INCOMPLETE)
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
        names = {name: f"{name}-{self.call.id[-6:]}.txt" for name in cut}
        return {name: uri for name, file in names.items() if (uri := await self._put(file, cut[name].whole))}

    async def _put(self, name: str, data: bytes) -> str | None:
        """Store bytes as a file of the call; return its URI, None if it is refused."""
        receiving = await self._begin(name)
        if receiving is None:
            return None
        await receiving.data(data)
        await receiving.end()
        return receiving.sink.uri

    async def _publish(self) -> tuple[Artifact, ...]:
        found = tuple(self.collection.sealed)
        for artifact in found:
            await self.recorder.record(
                ArtifactCollected(
                    call_id=self.call.id,
                    name=artifact.name,
                    uri=artifact.uri,
                    sha256=artifact.sha256,
                    bytes=artifact.bytes,
                    media_type=artifact.media_type,
                    risks=artifact.risks or None,
                )
            )
        try:
            published = await self.collection.publish()
        except RefusedError as refusal:
            for artifact in found:
                await self.refuse(artifact.name, refusal)
            return ()
        # No await in between: a call cancelled there would lose track of what it has published.
        self.recorder.published((artifact.uri for artifact in published), self.collection.withdraw)
        return published

    async def _record(self, name: str, reason: str, count: int | None) -> None:
        await self.recorder.record(ArtifactRefused(call_id=self.call.id, name=name, reason=reason, count=count))


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


@dataclass(slots=True, eq=False)
class _Receiving:
    """One file on its way to the store. If refused, that is recorded and the rest of it discarded."""

    _collector: Collector
    sink: FileSink
    _kept: bytearray | None
    """Its content, if it may be a picture to show."""
    _over: bool = False

    async def data(self, data: bytes) -> None:
        if self._over:
            return
        try:
            await self.sink.write(data)
        except (RefusedError, ArtifactStoreError) as problem:
            await self.drop()
            if isinstance(problem, ArtifactStoreError):
                raise
            await self._collector.refuse(self.sink.name, problem)
            return
        if self._kept is not None:
            self._kept += data
            if len(self._kept) > MAX_BYTES:
                self._kept = None

    async def end(self) -> None:
        if self._over:
            return
        self._release()
        await self.sink.end()
        if self._kept is not None:
            self._collector.saw(self.sink.uri, bytes(self._kept))

    async def drop(self) -> None:
        self._release()
        await self.sink.drop()

    def _release(self) -> None:
        self._over = True
        self._collector.release(self)
