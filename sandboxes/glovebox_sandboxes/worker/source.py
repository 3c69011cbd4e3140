"""The thread of one source, which makes sandboxes and ends them, by orders, one after the other.

Each is measured and compared before it is offered. Forks of a zygote are made and ended here, in blocking code; others
are opened by their driver as for a call, in the event loop of a portal. Nothing here waits for a call. What it finds
goes to the worker's answering thread, which decides everything.
"""

import os
import queue
import socket
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import anyio
from anyio.from_thread import BlockingPortal

from _glovebox_guest import wire
from glovebox_sandboxes.contract.base import Driver, OpenSandbox, Plan, SandboxStats, Source
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.contract.measure import raw
from glovebox_sandboxes.host.fork import Fork
from glovebox_sandboxes.host.host_view import HostView
from glovebox_sandboxes.host.process import read_words
from glovebox_sandboxes.session.connection import (
    READY_SECONDS,
    GuestConnection,
    first_message,
    host_namespaces,
    job_failed,
)
from glovebox_sandboxes.worker.tables import Alone, SharedTable

_READ = 65536

Tell = Callable[[Callable[[], None]], None]
"""Has the worker's answering thread call a function."""


class LiveSandbox(Protocol):
    """A sandbox that a source has made."""

    @property
    def id(self) -> str:
        """See ``Sandbox.id``."""

    @property
    def wire(self) -> socket.socket:
        """Return our end of its standard input and output."""

    @property
    def counters(self) -> Mapping[str, str]:
        """Return the files of the kernel's counts that outlive its processes, by what they count."""

    def hand_over(self) -> dict[str, int]:
        """Return descriptors for the call that gets it, by name; they stay ours."""

    def weigh(self, parts: int) -> None:
        """See ``Sandbox.weigh``."""


@dataclass(slots=True, eq=False, kw_only=True)
class PreparedSandbox:
    """A sandbox that was measured, and found to be as planned."""

    made: LiveSandbox
    alone: Alone
    table: str
    """Digest of what it shares with others."""
    fingerprint: object
    """Targets of its mounts when it was ordered."""
    supply: Any = None
    """The queue's supply that it is of."""


class OpenedSandbox:
    """A sandbox that its driver has opened in the event loop of a portal."""

    counters: Mapping[str, str] = {}

    def __init__(self, sandbox: OpenSandbox) -> None:
        """Take what is handed. Raises SandboxError if its guest has said more than it was asked."""
        if not getattr(sandbox.channel, "is_between", True):
            raise job_failed("it spoke without a job")
        self.id, self.sandbox, self.weigh = sandbox.id, sandbox, sandbox.weigh
        self._handed = sandbox.hand_over()
        self.wire = socket.socket(fileno=self._handed["wire"])
        self.wire.setblocking(False)
        self.over = anyio.Event()
        self.looking = anyio.Lock()
        self.ended: Callable[[str], None] = lambda _: None

    def hand_over(self) -> dict[str, int]:
        """See ``LiveSandbox``."""
        return self._handed

    def close(self) -> None:
        """Close its descriptors."""
        self.wire.close()
        for name in self._handed.keys() - {"wire"}:
            os.close(self._handed[name])


class SourceThread(threading.Thread):
    """The thread of a source. Orders are functions; None ends it."""

    def __init__(self, driver: Driver, plan: Plan, portal: BlockingPortal, tell: Tell) -> None:
        super().__init__(name=f"source {plan.digest[:14]}", daemon=True)
        self._driver, self._plan, self._portal, self._tell = driver, plan, portal, tell
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.tables: dict[str, SharedTable] = {}
        self.quick = False
        """A call rather waits for the next sandbox than starts one itself."""
        self._known: SharedTable | None = None
        self._source: Source

    def run(self) -> None:
        """Keep the source until the last order; the other thread learns by ``opened`` and ``closed``."""
        problem: BaseException | None = None
        try:
            with self._portal.wrap_async_context_manager(self._driver.source(self._plan)) as source:
                self._source, self.quick = source, source.make is not None
                self._tell(lambda: self.opened(source.bytes_each))
                while (order := self._orders.get()) is not None:
                    order()
        except BaseException as found:  # noqa: BLE001 - reported by ``closed``; other sources continue
            problem = found
        ended = problem
        self._tell(lambda: self.closed(ended))

    opened: Callable[[int], None]
    closed: Callable[[BaseException | None], None]

    def make(self, fingerprint: object, made: Callable[[PreparedSandbox | SandboxError], None]) -> None:
        """Order a sandbox; ``made`` is called in the other thread."""

        def order() -> None:
            if not self.quick:
                self._portal.start_task_soon(self._hold, fingerprint, made)
                return
            try:
                found: PreparedSandbox | SandboxError = self._make(fingerprint)
            except Exception as problem:  # noqa: BLE001 - what it has made is still to be ended
                found = _known(problem)
            self._tell(lambda: made(found))

        self._orders.put(order)

    def end(self, made: LiveSandbox, ended: Callable[[str], None]) -> None:
        """Order the end of a sandbox; ``ended`` gets what stayed, or nothing."""

        def order() -> None:
            stayed = ""
            if isinstance(made, OpenedSandbox):
                made.ended = ended
                self._portal.start_task_soon(_set, made.over)
                return
            try:
                made.end()  # type: ignore[attr-defined]  # a fork
            except (SandboxError, OSError) as problem:
                stayed = str(problem)
            self._tell(lambda: ended(stayed))

        self._orders.put(order)

    def stop(self) -> None:
        """End it, after everything it made."""
        self._orders.put(None)

    def look(self, made: LiveSandbox, told: Callable[[SandboxStats | None], None], *, kill: bool) -> None:
        """Order the host's observations of a sandbox that its driver opened, killed before if ``kill``."""
        if isinstance(made, OpenedSandbox):
            self._portal.start_task_soon(self._look, made, told, kill)

    async def _look(self, opened: OpenedSandbox, told: Callable[[SandboxStats | None], None], kill: bool) -> None:
        found = None
        try:
            async with opened.looking:
                if kill:
                    await opened.sandbox.kill()
                found = await opened.sandbox.stats()
        except Exception:  # noqa: BLE001 - of one sandbox; the server hears that there is nothing
            traceback.print_exc()
        self._tell(lambda: told(found))

    def _make(self, fingerprint: object) -> PreparedSandbox:
        if self._source.make is None:
            raise AssertionError(self.name)
        fork = self._source.make()
        try:
            return self._prepared(fork, _wait_until_ready(fork), fork.look(), fingerprint)
        except BaseException:
            fork.end()
            raise

    async def _hold(self, fingerprint: object, made: Callable[[PreparedSandbox | SandboxError], None]) -> None:
        """Hold one sandbox from its start to its end."""
        opened: OpenedSandbox | None = None
        stayed: SandboxError | None = None
        try:
            async with self._driver.open(self._plan) as sandbox:
                link = GuestConnection(sandbox.channel)
                body = await first_message(link, sandbox)
                _require_silence(link.wire)
                view = await sandbox.host_view()
                held = OpenedSandbox(sandbox)
                try:
                    prepared = self._prepared(held, body, view, fingerprint)
                    opened = held
                    self._tell(lambda: made(prepared))
                    await held.over.wait()
                    await held.looking.acquire()
                finally:
                    held.close()
        except Exception as problem:  # noqa: BLE001 - of one sandbox; its order gets it
            stayed = _known(problem)
        if opened is not None:
            self._tell(partial(opened.ended, str(stayed or "")))
        elif stayed is not None:
            self._tell(partial(made, stayed))

    def _prepared(
        self, made: LiveSandbox, body: Mapping[str, Any], view: HostView, fingerprint: object
    ) -> PreparedSandbox:
        """Return a sandbox whose measurements are as planned: what it shares is compared once. Raises SandboxError."""
        table, alone = SharedTable.split(body, view)
        own = host_namespaces()
        if table != self._known:
            table.attest(self._plan, alone, own)
            self._known = self.tables[table.digest] = table
            self._digest = table.digest
        table.require_alone(self._plan, alone, own)
        return PreparedSandbox(made=made, alone=alone, table=self._digest, fingerprint=fingerprint)


async def _set(event: anyio.Event) -> None:
    event.set()


def _require_silence(codec: wire.Wire) -> None:
    """Raise SandboxError if a guest has said more than it was asked: who reads on from the socket would lose it."""
    if codec.holds:
        raise job_failed("it spoke without a job")


def _known(problem: Exception) -> SandboxError:
    if isinstance(problem, SandboxError):
        return problem
    traceback.print_exception(problem)
    return SandboxError("Preparing a sandbox", repr(problem), "See the worker's log, and report it.")


def _wait_until_ready(fork: Fork) -> dict[str, Any]:
    """Read a wire up to its first message. Raises SandboxError."""
    codec = wire.Wire("host")
    fork.wire.settimeout(READY_SECONDS)
    try:
        while (event := codec.event()) is None:
            data = fork.wire.recv(_READ)
            if not data:
                raise job_failed(read_words(fork.detail)[-2000:] or "the guest ended before it was ready")
            codec.feed(data)
    except wire.ProtocolError as problem:
        raise job_failed(f"it broke the wire's protocol: {problem}") from None
    except TimeoutError:
        raise job_failed(f"the guest was not ready after {READY_SECONDS:.0f} seconds") from None
    _require_silence(codec)
    fork.wire.setblocking(False)
    return raw(event[2]["body"])
