"""Artifacts of earlier calls as inputs of this one: opened for their owner, copied as they are read."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from glovebox_audit.events import Input
from glovebox_sandboxes.session import connection
from glovebox_server.artifacts.names import CallNames
from glovebox_server.artifacts.record import ArtifactStoreError
from glovebox_server.artifacts.store import ArtifactReader, ArtifactStore
from glovebox_server.calls import Decision, ToolCall
from glovebox_server.errors import RefusedError

MAX_BYTES = 32 * 1024 * 1024
"""Bytes of all inputs of one call: they are in a tmpfs of the sandbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The open input artifacts of one call."""

    readers: tuple[ArtifactReader, ...] = ()
    unreadable: ArtifactStoreError | None = None

    @property
    def listed(self) -> tuple[Input, ...]:
        """Return their records for the log. A program gets exactly these: see ``ArtifactReader.chunks``."""
        found = (reader.artifact for reader in self.readers)
        return tuple(Input(name=each.name, uri=each.uri, sha256=each.sha256, bytes=each.bytes) for each in found)

    def contents(self) -> list[connection.Input]:
        """Return name and content of each; raise ``ArtifactStoreError`` if the disk failed under one."""
        if self.unreadable is not None:
            raise self.unreadable
        return [(reader.artifact.name, reader.chunks()) for reader in self.readers]


@asynccontextmanager
async def open_inputs(
    store: ArtifactStore, call: ToolCall, decision: Decision
) -> AsyncIterator[tuple[Decision, Inputs]]:
    """Open a call's inputs; deny it if one is unknown to its principal, two share a name, or all are too large."""
    inputs = Inputs()
    async with AsyncExitStack() as opened:
        if decision.effect != "deny":
            try:
                inputs = await _opened(store, call, opened)
            except RefusedError as refusal:
                decision = replace(decision, effect="deny", rule=refusal.rule, reason=refusal.reason, hint=refusal.hint)
            except ArtifactStoreError as problem:
                inputs = Inputs(unreadable=problem)
        yield decision, inputs


async def _opened(store: ArtifactStore, call: ToolCall, opened: AsyncExitStack) -> Inputs:
    names = CallNames()
    readers: list[ArtifactReader] = []
    room = MAX_BYTES
    for uri in call.arguments.get("inputs", ()):
        reader = await opened.enter_async_context(store.open(uri, call.principal))
        room -= reader.artifact.bytes
        if room < 0:
            reason = f"The inputs of one call may hold {MAX_BYTES} bytes together, and these hold more."
            raise RefusedError("files.inputs", reason, "Name fewer or smaller artifacts.")
        names.add(reader.artifact.name)
        readers.append(reader)
    return Inputs(readers=tuple(readers))
