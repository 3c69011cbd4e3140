"""Receives one call's output files, chunk by chunk; each becomes an artifact, or is refused, on the record.

Every name and byte comes from untrusted code. No paths are made here. Must never be imported here: the wire, or
anything of MCP.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Final

from anyio import CancelScope

from glovebox_audit.events import ArtifactCollected, ArtifactRefused
from glovebox_sandboxes.contract.base import Limits
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_sandboxes.contract.outcome import Outcome, Shown, SkippedFile
from glovebox_sandboxes.contract.pictures import HEAD_BYTES, IMAGE_TYPES, MAX_BYTES, MAX_PICTURES, fits
from glovebox_server.artifacts.diff_form import MAX_PATCH_BYTES, WorkBudget
from glovebox_server.artifacts.media import Sniffer
from glovebox_server.artifacts.names import ENDINGS, CallNames, check_name, name_risks, patch_risks, quoted
from glovebox_server.artifacts.record import Artifact, ArtifactStoreError, new_id, uri_of
from glovebox_server.artifacts.store import ArtifactStore
from glovebox_server.calls import Delivered, Image, Link, ToolCall
from glovebox_server.receipts.recorder import CallRecorder
from glovebox_server.tools.base import cut_output

MAX_REFUSED: Final = 128
"""Refused files with a record and a note of their own; the rest are counted, which bounds the log."""
FLUSH_BYTES: Final = 256 * 1024
"""Bytes of one file in memory before a worker thread hashes and writes them: few thread switches."""

Looks = Callable[[], Callable[[bytes], None] | None]
"""Makes an inspector for one incoming file; None for no inspection."""

CUT: Final = "its end may be missing: /output was full when it was written"
_KEEPING: Final = "keeping an output file"
_NAMED = RefusedError("artifacts.name", "What looks like a secret is in its name.", "Give it another name.")
_INCOMPLETE = RefusedError("artifacts.incomplete", "It did not arrive whole.", "Run it again.")
_TOO_LARGE: Final = "too large to be kept as a figure: save it to /output"


@dataclass(slots=True, kw_only=True, eq=False)
class FileSink:
    """One incoming file. Not for several tasks at once. Its last call is ``end`` or ``drop``."""

    collector: "Collector"
    name: str
    identifier: str
    descriptor: int
    cut: bool
    look: Callable[[bytes], None] | None
    kept: bytearray | None
    """Its content, if it may be a picture to show."""
    artifact: Artifact | None = None
    _buffer: bytearray = field(default_factory=bytearray)
    _digest: Any = field(default_factory=hashlib.sha256)
    _sniffer: Sniffer = field(default_factory=Sniffer)
    _size: int = 0
    _over: bool = False

    async def data(self, data: bytes) -> None:
        """Take the next bytes, at most one frame of the wire; memory is bounded by this and ``FLUSH_BYTES``.

        The file is refused if the call's files exceed ``limits.output_bytes``. Raises ArtifactStoreError: the disk is
        full or failed.
        """
        if self._over:
            return
        try:
            self.collector.spend(len(data))
            self._size += len(data)
            self._buffer += data
            if len(self._buffer) >= FLUSH_BYTES:
                await self.collector.store.run(_KEEPING, self._flush)
        except ArtifactStoreError:
            await self.drop()
            raise
        except RefusedError as refusal:
            await self.drop()
            await self.collector.refuse(self.name, refusal)
            return
        if self.kept is not None:
            self.kept += data
            if len(self.kept) > MAX_BYTES:
                self.kept = None

    async def end(self) -> None:
        """Keep the whole file, or drop it and raise as ``data``; nothing of one that was refused."""
        if self._over:
            return
        try:
            artifact = await self.collector.store.run(_KEEPING, self._seal)
        except BaseException:
            await self.drop()
            raise
        self._close()
        self.artifact = artifact
        self.collector.sealed.append(artifact)
        pictures = self.collector.pictures
        if self.kept is not None and artifact.media_type in IMAGE_TYPES and len(pictures) < MAX_PICTURES:
            pictures[artifact.uri] = bytes(self.kept)

    async def drop(self) -> None:
        """Remove what was written, unless that was done or it has ended."""
        if not self._over:
            self._close()
            await self.collector.remove([self.identifier])

    def _close(self) -> None:
        self._over = True
        os.close(self.descriptor)
        self.collector.receiving.remove(self)

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
        content, call, store = self._sniffer.finish(self.name), self.collector.call, self.collector.store
        created = store.clock()
        patch: tuple[str, ...] = ()
        if self.name.casefold().endswith(ENDINGS):
            whole = os.pread(self.descriptor, self._size, 0) if self._size <= MAX_PATCH_BYTES else None
            patch = patch_risks(whole, self.collector.patches)
        artifact = Artifact(
            uri=uri_of(self.identifier), owner=call.principal.id, call_id=call.id, client=call.principal.client,
            run=call.run, workflow=call.principal.workflow, tool=call.tool, name=self.name,
            sha256=self._digest.hexdigest(), bytes=self._size, media_type=content.media_type, created=created,
            expires=created + store.ttl,
            risks=(*(CUT,) * self.cut, *name_risks(self.name), *content.risks, *patch),
        )  # fmt: skip
        store.disk.seal(artifact)
        return artifact


@dataclass(slots=True, kw_only=True, eq=False)
class Collector:
    """The output files of one call: bounded in number and bytes, checked, recorded, and invisible until published.

    The one that makes it calls ``discard`` in the end.
    """

    store: ArtifactStore
    call: ToolCall
    """Its principal owns the artifacts."""
    limits: Limits
    """``output_bytes`` and ``output_files`` bound them."""
    recorder: CallRecorder
    room: int | None = None
    """Bytes of all the principal's artifacts, if its role has less than the store's share."""
    look: Looks = lambda: None
    """Is called for each file; the result is called with the file's name and pieces, in another thread."""
    mask: Callable[[str], str] = str
    """A file is refused if this finds a secret in its name, i.e. changes it."""
    patches: WorkBudget = field(default_factory=WorkBudget)
    pictures: dict[str, bytes] = field(default_factory=dict)
    receiving: list[FileSink] = field(default_factory=list)
    sealed: list[Artifact] = field(default_factory=list)
    """The files that ended without an error and are not published yet, in the order of their ends."""
    _names: CallNames = field(default_factory=CallNames)
    _attempts: int = 0
    _bytes: int = 0
    _skipped: list[SkippedFile] = field(default_factory=list)
    _uncounted: int = 0

    def spend(self, size: int) -> None:
        """Charge bytes to the call's limit; raise ``RefusedError`` (rule ``artifacts.bytes``) if it is exceeded."""
        most = self.limits.output_bytes
        if self._bytes + size > most:
            reason = f"The output files of this call hold more than the {most} bytes its profile allows."
            raise RefusedError("artifacts.bytes", reason, "Write less to /output: fewer, smaller or compressed files.")
        self._bytes += size

    async def accept(self, name: str, size: int, *, cut: bool = False) -> FileSink | None:
        """Accept one file that the guest announces; None refuses it. Size and ``cut`` are the guest's claims."""
        masked = self.mask(name)
        if masked != name:
            await self.refuse(masked, _NAMED)
            return None
        return await self.begin(name, keep=size <= MAX_BYTES, cut=cut)

    def _admit(self, name: str) -> None:
        self._attempts += 1
        most = self.limits.output_files
        if self._attempts > most:
            reason = f"This call wrote more than the {most} output files its profile allows."
            raise RefusedError("artifacts.count", reason, "Write fewer files to /output, for instance one archive.")
        check_name(name)
        self._names.add(name)

    async def begin(self, name: str, *, cut: bool = False, keep: bool = False) -> FileSink | None:
        """Begin to receive a file; None refuses it: too many, refused ones included, or its name. Several may be open.

        ``name`` is unchecked; ``cut`` is True if its end may be missing; ``keep`` keeps a picture in memory.

        Raises ArtifactStoreError: the disk is full or failed.
        """
        try:
            self._admit(name)
        except RefusedError as refusal:
            await self.refuse(name, refusal)
            return None
        look = self.look()
        if look is not None:
            look(name.encode("utf-8", "replace"))
        identifier = new_id()
        try:
            # Shielded: a cancellation between the thread's end and ours would leak the descriptor.
            with CancelScope(shield=True):
                descriptor = await self.store.run(_KEEPING, partial(self.store.disk.create, identifier))
        except BaseException:
            await self.remove([identifier])
            raise
        kept = bytearray() if keep else None
        sink = FileSink(
            collector=self, name=name, identifier=identifier, descriptor=descriptor, cut=cut, look=look, kept=kept
        )
        self.receiving.append(sink)
        return sink

    async def publish(self) -> tuple[Artifact, ...]:
        """Record the received files, make them visible to their owner, all or none, and return them.

        They are removed and refused if they do not fit beside what has not expired. Raises ArtifactStoreError: the disk
        failed; they are removed. AuditError: a record could not be written.
        """
        found = tuple(self.sealed)
        if not found:
            return ()
        for each in found:
            event = ArtifactCollected(
                call_id=each.call_id, name=each.name, uri=each.uri, sha256=each.sha256, bytes=each.bytes,
                media_type=each.media_type, risks=each.risks or None,
            )  # fmt: skip
            await self.recorder.record(event)
        publish = partial(self.store.disk.publish, found, self.store.clock(), self.room)
        try:
            with CancelScope(shield=True):  # else they could be visible and yet counted as not published
                try:
                    await self.store.run("publishing output files", publish)
                except BaseException:
                    await self.discard()
                    raise
                self.sealed.clear()
        except RefusedError as refusal:
            for each in found:
                await self.refuse(each.name, refusal)
            return ()
        # No await in between: a call cancelled there would lose track of what it has published.
        self.recorder.published((each.uri for each in found), partial(self._withdraw, found))
        return found

    async def _withdraw(self, artifacts: tuple[Artifact, ...]) -> None:
        """Remove what was published, as no record announces it. Raises ``ArtifactStoreError`` if the disk failed."""
        with CancelScope(shield=True):
            await self.store.run("taking back output files", partial(self.store.disk.withdraw, artifacts))

    async def discard(self) -> None:
        """Remove the files that were not published."""
        for sink in tuple(self.receiving):
            await sink.drop()
        gone = [artifact.id for artifact in self.sealed]
        self.sealed.clear()
        if gone:
            await self.remove(gone)

    async def remove(self, identifiers: list[str]) -> None:
        """Remove received files."""
        with CancelScope(shield=True):
            await self.store.run("removing an output file", partial(self.store.disk.drop, identifiers))

    async def refuse(self, name: str, refusal: RefusedError) -> None:
        """Record that a file is not an artifact."""
        if len(self._skipped) == MAX_REFUSED:
            self._uncounted += 1
        else:
            self._skipped.append(SkippedFile(name=quoted(name), reason=refusal.reason))
            await self._record(self._skipped[-1])

    async def _record(self, file: SkippedFile) -> None:
        event = ArtifactRefused(call_id=self.call.id, name=file.name, reason=file.reason, count=file.count)
        await self.recorder.record(event)

    async def deliver(self, outcome: Outcome, *, keep_pictures: bool) -> Delivered:
        """Record what was collected, then make it visible to the caller.

        With ``keep_pictures``, returned pictures, and output too long for a result, become artifacts too.

        Raises ArtifactStoreError: the store failed; AuditError: a record could not be written; nothing is visible.
        """
        for sink in sorted(self.receiving, key=lambda each: each.name):
            await sink.drop()
            await self.refuse(sink.name, _INCOMPLETE)
        for skipped in outcome.skipped:
            await self._record(replace(skipped, name=quoted(skipped.name)))
        figures: list[str | None] = [None] * len(outcome.blobs)
        texts = {}
        if keep_pictures:  # a program's file of the same name wins
            names = [f"figure-{n}.{blob.media_type.partition('/')[2]}" for n, blob in enumerate(outcome.blobs, 1)]
            figures = [await self._put(name, blob.data) for name, blob in zip(names, outcome.blobs, strict=True)]
            # A program cannot learn its call's id, so none of its files has this name.
            ending = f"{self.call.id[-6:]}.txt"
            texts = {
                name: await self._put(f"{name}-{ending}", each.whole) for name, each in cut_output(outcome)[1].items()
            }
        links = {artifact.uri: _link(artifact) for artifact in await self.publish()}
        if self._uncounted:
            self._skipped.append(SkippedFile(name="…", reason=f"and {self._uncounted} more", count=self._uncounted))
            await self._record(self._skipped[-1])
        files = [link for link in links.values() if link.uri not in figures]
        looks = self._looks(outcome, figures, links, files)
        return Delivered(
            # Only the first files of a call are scanned, so the caller's output comes before others.
            artifacts=tuple(sorted(files, key=lambda link: link.uri not in texts.values())),
            figures=tuple(link for link in links.values() if link.uri in figures),
            shown=tuple(image for image, _ in looks if image),
            notes=tuple(note for _, note in looks if note),
            skipped=tuple(self._skipped),
            whole={name: uri for name, uri in texts.items() if uri in links},
        )

    def _looks(
        self, outcome: Outcome, figures: Sequence[str | None], links: Mapping[str, Link], files: Iterable[Link]
    ) -> list[tuple[Image | None, str]]:
        """Return figures and pictures as they are shown, and the notes of them."""
        copies = {each.name: each for each in reversed(outcome.shown)}
        looks = []
        for uri, blob in zip(figures, outcome.blobs, strict=True):
            looks.append(_look(links.get(uri or ""), blob.data, blob.media_type, blob.shown))
        for link in [each for each in files if each.media_type in IMAGE_TYPES][:MAX_PICTURES]:
            data = self.pictures.get(link.uri, b"")
            looks.append(_look(link, data, link.media_type, copies.get(link.name)))
        return looks + [_look(None, b"", each.media_type, each, _TOO_LARGE) for each in outcome.shown if not each.name]

    async def _put(self, name: str, data: bytes) -> str | None:
        """Store bytes as a file of the call; return its URI, None if it is refused."""
        sink = await self.begin(name)
        if sink is None:
            return None
        await sink.data(data)
        await sink.end()
        return uri_of(sink.identifier)


def _link(artifact: Artifact) -> Link:
    return Link(**{each.name: getattr(artifact, each.name) for each in fields(Link)})


def _look(
    link: Link | None, data: bytes, media_type: str, copy: Shown | None, not_kept: str = "not kept"
) -> tuple[Image | None, str]:
    """Return a picture as shown to clients, itself or a smaller copy, and a note of what that is not.

    ``data`` is empty if it is too large.
    """
    name, kept = (link.name, link.uri) if link else ("A picture", not_kept)
    if copy is not None and copy.data:
        shown, of = (f"{width} × {height}" for width, height in (copy.size, copy.of))
        same = f"{name}: shown in fewer bytes; the original is {kept}"
        note = same if shown == of else f"{name}: shown at {shown}; the original, {of}, is {kept}"
        return Image(data=copy.data, media_type=copy.media_type), note
    if copy is not None:
        return None, f"{name}: not shown, {copy.reason}; it is {kept}"
    if fits(data[:HEAD_BYTES], media_type, len(data), MAX_BYTES):
        return Image(data=data, media_type=media_type), ""
    return None, f"{name}: not shown, no smaller copy was made of it in time; it is {kept}"
