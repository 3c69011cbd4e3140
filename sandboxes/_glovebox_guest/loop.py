"""The guest's event loop: one poll(2) over the wire, the child's pipes and the proxy's connections, if granted.

Frames to the host are gathered until the loop is idle, and written blocking: flow control bounds them, and the host
always reads.
"""

from __future__ import annotations

import os
import select
from time import monotonic

from _glovebox_guest import wire
from _glovebox_guest.stdlib import Any, Callable, Mapping, signal

_READ = 256 * 1024
_HELD = 64 * 1024
"""Bytes of frames that wait for others: fewer writes wake the host less often."""


class StreamHandler:
    """Handles the events of one stream. Subclasses override what they need."""

    paced = False
    """True to return credit itself (``Wire.consumed``) once the bytes are passed on, instead of at once."""

    def on_data(self, data: bytes) -> None:
        """Take bytes from the host."""

    def on_accept(self, body: Mapping[str, Any]) -> None:
        """Take the host's answer to an OPEN."""

    def on_end(self) -> None:
        """Take the end of the host's direction."""

    def on_reset(self, body: Mapping[str, Any]) -> None:
        """Take the host's reset of the stream."""

    def on_credit(self) -> None:
        """Continue sending: there is credit."""


class ReceivedFile(StreamHandler):
    """Writes one stream of the host to a new file, read-only once it is whole."""

    def __init__(self, path: str) -> None:
        self.over = False
        self._path = path
        self._file = open(path, "xb")  # noqa: SIM115 - closed when the stream ends

    def on_data(self, data: bytes) -> None:
        self._file.write(data)

    def on_end(self) -> None:
        self._file.close()
        os.chmod(self._path, 0o444)
        self.over = True


class Loop:
    """Watches descriptors and the wire."""

    def __init__(self, wire_in: int, wire_out: int, inputs: str) -> None:
        """Read and write the wire; files that the host sends go into the folder ``inputs``, none where it is empty."""
        self.wire = wire.Wire("guest")
        self.inputs: list[ReceivedFile] = []
        self._in = wire_in
        self._out = wire_out
        self._held = bytearray()
        self._poll = select.poll()
        self._watched: dict[int, dict[int, Callable[[], object]]] = {}
        """Callbacks by descriptor and event."""
        self._streams: dict[int, StreamHandler] = {}
        self._into = inputs
        self.job: Mapping[str, Any] | None = None
        self.stop = ""
        """The host's reason for stopping the program, in the outcome's terms."""
        self.watch(wire_in, self._receive)
        # A byte in this pipe for every SIGCHLD wakes poll(2), see signal.set_wakeup_fd.
        self._woken, waker = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.watch(self._woken, lambda: os.read(self._woken, 4096))
        self.descriptors = frozenset({wire_in, wire_out, self._woken, waker})

    def watch(self, descriptor: int, happened: Callable[[], object] | None, event: int = select.POLLIN) -> None:
        """Call ``happened`` whenever the descriptor has bytes, or for POLLOUT takes some, or is closed by its peer.

        None to stop; no effect if it is not watched.
        """
        callbacks = self._watched.setdefault(descriptor, {})
        before = callbacks.pop(event, None)
        if happened is not None:
            callbacks[event] = happened
        if callbacks:
            self._poll.register(descriptor, sum(callbacks))
        else:
            # Not registered with 0: poll(2) would report a closed peer again and again.
            del self._watched[descriptor]
            if before is not None:
                self._poll.unregister(descriptor)

    def watches(self, descriptor: int) -> bool:
        """Return whether the descriptor is watched for reading."""
        return select.POLLIN in self._watched.get(descriptor, ())

    def send(self, frames: bytes) -> None:
        """Queue frames, written before this loop waits again; raises EOFError if the host closed the wire."""
        self._held += frames
        if len(self._held) >= _HELD:
            self.flush()

    def flush(self) -> None:
        """Write queued frames; raises EOFError if the host closed the wire."""
        held, self._held = self._held, bytearray()
        view = memoryview(held)
        try:
            while view:
                view = view[os.write(self._out, view) :]
        except OSError:
            raise EOFError from None

    def open(self, kind: str, meta: Mapping[str, Any], handler: StreamHandler, *, duplex: bool = False) -> int:
        """Open a stream to the host."""
        stream, frames = self.wire.open(kind, meta, duplex=duplex)
        self._streams[stream] = handler
        self.send(frames)
        return stream

    def step(self, deadline: float | None) -> None:
        """Wait for the next event, or until ``deadline`` (monotonic seconds), and handle it."""
        self.flush()
        timeout = None if deadline is None else max(0.0, deadline - monotonic()) * 1000
        for descriptor, happened in self._poll.poll(timeout):
            # An error or a closed peer goes to either callback: reading and writing both find out.
            for event, other in ((select.POLLIN, select.POLLOUT), (select.POLLOUT, select.POLLIN)):
                callback = self._watched.get(descriptor, {}).get(event) if happened & ~other else None
                if callback is not None:
                    callback()

    def _receive(self) -> None:
        data = os.read(self._in, _READ)
        if not data:
            raise EOFError
        self.take(data)

    def take(self, data: bytes) -> None:
        """Handle bytes of the wire."""
        for what, stream, *said in self.wire.receive(data):
            handler = self._streams.get(stream)
            if what == "message":
                if said[0]["kind"] == "stop":
                    self.stop = said[0]["body"]["reason"]
                else:
                    self.job = said[0]["body"]
            elif what == "open":
                self._streams[stream] = self._accept(said[0])
            elif handler is not None:
                getattr(handler, f"on_{what}")(*said)
                if what == "data" and not handler.paced:
                    self.send(self.wire.consumed(stream, len(said[0])))
                # At its last event, and not before: the codec is ahead of us when several came in one read.
                if what in ("end", "reset") and not self.wire.is_open(stream):
                    self._streams.pop(stream, None)

    def _accept(self, said: Mapping[str, Any]) -> ReceivedFile:
        """Take one stream of the host, which has checked its names; only the host writes to the wire."""
        if said["kind"] != "input" or not self._into:
            raise wire.ProtocolError(f"the host opened a stream of kind {said['kind']!r}")
        path = os.path.join(self._into, said["meta"]["name"])
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self.inputs.append(ReceivedFile(path))
        return self.inputs[-1]


class Relay(StreamHandler):
    """Sends a descriptor's bytes to the host as one stream, as credit allows, up to ``most`` bytes.

    The stream is opened for the first bytes: most programs write to one of three.
    """

    def __init__(self, loop: Loop, descriptor: int, kind: str, most: int) -> None:
        self._loop = loop
        self._room = most
        self._descriptor = descriptor
        self._kind = kind
        self._stream: int | None = None
        self.done = False
        self.overflowed = False
        loop.watch(descriptor, self._pump)

    def _pump(self) -> None:
        credit = self._credit()
        if credit == 0:
            # Not read on: the pipe fills and the program waits, so memory stays bounded.
            self._loop.watch(self._descriptor, None)
            return
        try:
            data = os.read(self._descriptor, min(credit, _READ))
        except BlockingIOError:
            return  # the program has taken it itself
        self._room -= len(data)
        if self._room < 0:
            # Not closed before the program is killed: it would have time to report a pipe that it did not break.
            self.overflowed = True
            self._loop.watch(self._descriptor, None)
        elif data:
            self._send(data)
        else:
            self.close()

    def _credit(self) -> int:
        return wire.WINDOW if self._stream is None else self._loop.wire.credit(self._stream)

    def _send(self, data: bytes) -> None:
        if self._stream is None:
            self._stream = self._loop.open(self._kind, {}, self)
        self._loop.send(self._loop.wire.data(self._stream, data))

    @property
    def empty(self) -> bool:
        """Return whether all output up to the bound has been read."""
        if self.done or self.overflowed:
            return True
        look = select.poll()
        look.register(self._descriptor, select.POLLIN)
        return not any(happened & select.POLLIN for _, happened in look.poll(0))

    def say(self, data: bytes) -> None:
        """Insert the guest's own text between the descriptor's; dropped where there is no credit for it."""
        if not self.done and self._credit() >= len(data):
            self._send(data)

    def close(self) -> None:
        """End the stream, whether or not the descriptor is exhausted."""
        if self.done:
            return
        self.done = True
        self._loop.watch(self._descriptor, None)
        os.close(self._descriptor)
        if self._stream is not None and self._loop.wire.is_open(self._stream):
            self._loop.send(self._loop.wire.end(self._stream))

    def on_credit(self) -> None:
        if not (self.done or self.overflowed or self._loop.watches(self._descriptor)):
            self._loop.watch(self._descriptor, self._pump)

    def on_reset(self, body: Mapping[str, Any]) -> None:  # noqa: ARG002 - the reason is the host's own
        """Discard the rest, so that the program does not block on a full pipe."""
        self.close()
