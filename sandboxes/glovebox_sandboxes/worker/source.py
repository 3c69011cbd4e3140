"""The thread of one source: it starts a zygote, makes sandboxes of it and ends them, by orders, one after the other.

Blocking: nothing here waits for a call. What it finds goes to the worker's one other thread, which decides everything.
"""

import queue
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anyio.from_thread import BlockingPortal

from _glovebox_guest import wire
from glovebox_sandboxes.contract.base import Driver, Plan, Source
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.contract.measure import raw
from glovebox_sandboxes.host.fork import Fork
from glovebox_sandboxes.host.process import read_words
from glovebox_sandboxes.session.connection import READY_SECONDS, host_namespaces, job_failed
from glovebox_sandboxes.worker.tables import Alone, SharedTable

_READ = 65536

Tell = Callable[[Callable[[], None]], None]
"""Has the worker's other thread call a function."""


@dataclass(slots=True, eq=False, kw_only=True)
class PreparedFork:
    """A sandbox that was measured, and found to be as planned."""

    fork: Fork
    alone: Alone
    table: str
    """Digest of what it shares with others."""
    fingerprint: object
    """Targets of its mounts when it was ordered."""
    supply: Any = None
    """The queue's supply that it is of."""


class SourceThread(threading.Thread):
    """The thread of a zygote. Orders are functions; None ends it, after everything it made."""

    def __init__(self, driver: Driver, plan: Plan, portal: BlockingPortal, tell: Tell) -> None:
        super().__init__(name=f"source {plan.digest[:14]}", daemon=True)
        self._driver, self._plan, self._portal, self._tell = driver, plan, portal, tell
        self.orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.tables: dict[str, SharedTable] = {}
        self._known: SharedTable | None = None
        self._source: Source | None = None

    def run(self) -> None:
        """Keep the zygote until the last order; the other thread learns by ``opened`` and ``closed``."""
        problem: BaseException | None = None
        try:
            with self._portal.wrap_async_context_manager(self._driver.source(self._plan)) as source:
                self._source = source
                self._tell(lambda: self.opened(source.bytes_each))
                while (order := self.orders.get()) is not None:
                    order()
        except BaseException as found:  # noqa: BLE001 - reported by ``closed``; other sources continue
            problem = found
        ended = problem
        self._tell(lambda: self.closed(ended))

    opened: Callable[[int], None]
    closed: Callable[[BaseException | None], None]

    def make(self, fingerprint: object, made: Callable[[PreparedFork | SandboxError], None]) -> None:
        """Order a sandbox; ``made`` is called in the other thread."""

        def order() -> None:
            try:
                found: PreparedFork | SandboxError = self._make(fingerprint)
            except SandboxError as problem:
                found = problem
            except Exception as problem:  # noqa: BLE001 - what it has made is still to be ended
                traceback.print_exc()
                found = SandboxError("Preparing a sandbox", repr(problem), "See the worker's log, and report it.")
            self._tell(lambda: made(found))

        self.orders.put(order)

    def end(self, fork: Fork, ended: Callable[[str], None]) -> None:
        """Order the end of a sandbox; ``ended`` gets what stayed, or nothing."""

        def order() -> None:
            stayed = ""
            try:
                fork.end()
            except (SandboxError, OSError) as problem:
                stayed = str(problem)
            self._tell(lambda: ended(stayed))

        self.orders.put(order)

    def _make(self, fingerprint: object) -> PreparedFork:
        if self._source is None or self._source.make is None:
            raise AssertionError(self.name)
        fork = self._source.make()
        try:
            body = _wait_until_ready(fork)
            table, alone = SharedTable.split(body, fork.look())
            own = host_namespaces()
            if table != self._known:
                table.attest(self._plan, alone, own)
                self._known = self.tables[table.digest] = table
                self._digest = table.digest
            table.require_alone(self._plan, alone, own)
        except BaseException:
            fork.end()
            raise
        return PreparedFork(fork=fork, alone=alone, table=self._digest, fingerprint=fingerprint)


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
    return raw(event[2]["body"])
