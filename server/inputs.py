"""Artifacts of earlier calls as inputs of this one: looked up for their owner, copied, never shared."""

from server.artifacts.names import CallNames
from server.artifacts.store import ArtifactStore
from server.calls import ToolCall
from server.errors import Refused

MAX_BYTES = 32 * 1024 * 1024
"""All inputs of one call together: they pass through the broker's memory and lie in a tmpfs of the sandbox."""


async def open_inputs(store: ArtifactStore, call: ToolCall) -> list[tuple[str, bytes]]:
    """Name below ``/input`` and content of every artifact the call names.

    Raises:
        Refused: one is unknown to this principal, two have the same name, or they are too large together.
    """
    names = CallNames()
    found: list[tuple[str, bytes]] = []
    room = MAX_BYTES
    for uri in call.arguments.get("inputs", ()):
        async with store.open(uri, call.principal) as reader:
            if reader.artifact.bytes > room:
                reason = f"The inputs of one call may hold {MAX_BYTES} bytes together, and these hold more."
                raise Refused("files.inputs", reason, "Name fewer or smaller artifacts.")
            names.add(reader.artifact.name)
            found.append((reader.artifact.name, await reader.read(room)))
            room -= reader.artifact.bytes
    return found
