"""Calls under way in all servers of a state directory, known by following its log."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from glovebox_audit import events, subscription, writers
from glovebox_audit.chain import Record
from glovebox_audit.place import AuditError
from glovebox_audit.query import ask, calls
from glovebox_audit.query.index import Filters
from glovebox_audit.query.outcomes import RUNNING

_MOST = 256
"""Calls under way that are listed; of more, the page says how many it leaves out."""
_OVERLAP = 2000
"""Lines that are read again after the index was asked: what came in between is among them."""
_RETRY_SECONDS = 1.0


@dataclass(slots=True, kw_only=True)
class LiveCall:
    """One call under way."""

    call_id: str
    time: str
    tool: str
    principal: str
    run: str
    client: str
    server: str
    isolation: str = "no sandbox yet"
    reached: int = 0
    refused: int = 0


@dataclass(slots=True)
class LiveCalls:
    """The calls that run now, in all servers."""

    directory: Path
    """The audit log's."""
    problem: str = ""
    """Why the log is not followed, if it is not."""
    indexing: tuple[int, int] | None = None
    """While what the log grew by is indexed, which pages would wait for: bytes that are done, and all."""
    _calls: dict[str, LiveCall] = field(default_factory=dict)

    async def follow(self) -> None:
        """Follow the log until cancelled; one that is missing is waited for."""
        while True:
            try:
                await anyio.to_thread.run_sync(self._begin)
                self.problem = ""
                async for line in subscription.follow(self.directory, _OVERLAP):
                    if line.record is not None:
                        self.take(line.record)
            except AuditError as problem:
                self.problem = str(problem)
            await anyio.sleep(_RETRY_SECONDS)

    def take(self, record: Record) -> None:
        """Note what a record says of a call."""
        call_id, data = record.call_id or "", record.data
        came = calls.outcome(record.kind, data)
        if came == RUNNING and record.kind == events.CallDecided.kind:
            texts: dict[str, Any] = {name: str(data.get(name) or "") for name in ("tool", "principal", "run", "client")}
            self._calls[call_id] = LiveCall(call_id=call_id, time=record.time, server=record.server, **texts)
        elif came is not None and came != RUNNING:
            self._calls.pop(call_id, None)
        elif (call := self._calls.get(call_id)) is not None:
            if record.kind == events.SandboxStarted.kind:
                held = "measured as planned" if data.get("verified") is True else "NOT as planned"
                call.isolation = f"{data.get('driver')}, {data.get('level')}: {held}"
            elif record.kind == events.EgressDecided.kind:
                call.reached += data.get("effect") == "allow"
                call.refused += data.get("effect") != "allow"

    def listed(self) -> tuple[list[LiveCall], int]:
        """Return the calls of live servers, the oldest first, and how many more there are."""
        live = set(writers.live(self.directory)) if self._calls else set()
        found = sorted((each for each in self._calls.values() if each.server in live), key=lambda each: each.time)
        return found[:_MOST], max(0, len(found) - _MOST)

    def _begin(self) -> None:
        """Note the calls that began before, by the index."""

        def progress(done: int, most: int) -> None:
            self.indexing = (done, most) if done < most else None

        told = ask.Told(say=lambda _: None, progress=progress)
        self._calls.clear()
        try:
            found = ask.ask(self.directory, Filters(outcomes=(RUNNING,)), _MOST, told).calls
        finally:
            self.indexing = None
        for call in found:
            for record in ask.records(self.directory, call.call_id, told):
                self.take(record)
