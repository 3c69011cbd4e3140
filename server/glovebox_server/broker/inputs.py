"""Artifacts of earlier calls as inputs of this one: looked up for their owner, copied, never shared."""

from glovebox_server.artifacts.names import CallNames
from glovebox_server.artifacts.store import ArtifactStore
from glovebox_server.audit.events import Input
from glovebox_server.broker.calls import ToolCall
from glovebox_server.errors import Refused

MAX_BYTES = 32 * 1024 * 1024
"""All inputs of one call together: they pass through the broker's memory and lie in a tmpfs of the sandbox."""


async def open_inputs(store: ArtifactStore, call: ToolCall) -> list[tuple[Input, bytes]]:
    """Every artifact the call names: its record for the log, and its content.

    Raises:
        Refused: one is unknown to this principal, two have the same name, or they are too large together.
    """
    names = CallNames()
    found: list[tuple[Input, bytes]] = []
    room = MAX_BYTES
    for uri in call.arguments.get("inputs", ()):
        async with store.open(uri, call.principal) as reader:
            artifact = reader.artifact
            if artifact.bytes > room:
                reason = f"The inputs of one call may hold {MAX_BYTES} bytes together, and these hold more."
                raise Refused("files.inputs", reason, "Name fewer or smaller artifacts.")
            names.add(artifact.name)
            given = Input(name=artifact.name, uri=artifact.uri, sha256=artifact.sha256, bytes=artifact.bytes)
            found.append((given, await reader.read(room)))
            room -= artifact.bytes
    return found
