"""Artifacts of earlier calls as inputs of this one: looked up for their owner, copied, never shared."""

from dataclasses import dataclass, replace

from glovebox_server.artifacts.names import CallNames
from glovebox_server.artifacts.record import ArtifactsUnavailable
from glovebox_server.artifacts.store import ArtifactStore
from glovebox_server.audit.events import Input
from glovebox_server.calls import Decision, ToolCall
from glovebox_server.errors import Refused

MAX_BYTES = 32 * 1024 * 1024
"""All inputs of one call together: they pass through the broker's memory and lie in a tmpfs of the sandbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The artifacts one call is given."""

    listed: tuple[Input, ...] = ()
    """Their records for the log."""
    read: tuple[bytes, ...] = ()
    """Their contents, in the same order."""
    unreadable: ArtifactsUnavailable | None = None

    def contents(self) -> list[tuple[str, bytes]]:
        """Name and content of each.

        Raises:
            ArtifactsUnavailable: the disk failed under one; the call was decided without them.
        """
        if self.unreadable is not None:
            raise self.unreadable
        return [(each.name, content) for each, content in zip(self.listed, self.read, strict=True)]


async def open_inputs(store: ArtifactStore, call: ToolCall, decision: Decision) -> tuple[Decision, Inputs]:
    """Read every artifact that an allowed call names; it is denied where its caller may not have one of them.

    One that is unknown to this principal, two of the same name, or too many bytes together deny it.
    """
    if decision.effect != "allow":
        return decision, Inputs()
    try:
        return decision, await _read(store, call)
    except Refused as refusal:
        denied = replace(decision, effect="deny", rule=refusal.rule, reason=refusal.reason, hint=refusal.hint)
        return denied, Inputs()
    except ArtifactsUnavailable as problem:
        return decision, Inputs(unreadable=problem)


async def _read(store: ArtifactStore, call: ToolCall) -> Inputs:
    names = CallNames()
    listed: list[Input] = []
    contents: list[bytes] = []
    room = MAX_BYTES
    for uri in call.arguments.get("inputs", ()):
        async with store.open(uri, call.principal) as reader:
            artifact = reader.artifact
            if artifact.bytes > room:
                reason = f"The inputs of one call may hold {MAX_BYTES} bytes together, and these hold more."
                raise Refused("files.inputs", reason, "Name fewer or smaller artifacts.")
            names.add(artifact.name)
            listed.append(Input(name=artifact.name, uri=artifact.uri, sha256=artifact.sha256, bytes=artifact.bytes))
            contents.append(await reader.read(room))
            room -= artifact.bytes
    return Inputs(listed=tuple(listed), read=tuple(contents))
