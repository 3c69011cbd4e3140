"""Keeps what the server claims of itself equal to what it does: notifications, and revisions of the protocol."""

from typing import Any, Final

import mcp_types as types
from mcp.server.lowlevel import Server
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS

SERVED: Final = (*HANDSHAKE_PROTOCOL_VERSIONS, *MODERN_PROTOCOL_VERSIONS)
"""Revisions of the protocol, the oldest first."""


class ClaimingServer(Server[Any]):
    """The SDK's server, which claims the notifications that are sent, and the revisions served."""

    lists_change = False
    """Whether the lists of tools and prompts may change; that of resources never does."""

    def get_capabilities(self, *given: Any, **named: Any) -> types.ServerCapabilities:
        """Return what a handshake, or ``server/discover``, is answered with."""
        found = super().get_capabilities(*given, **named)
        for claims, change in (
            (found.tools, self.lists_change), (found.prompts, self.lists_change), (found.resources, False)
        ):  # fmt: skip
            if claims is not None:
                claims.list_changed = change
        return found

    async def _handle_discover(self, *given: Any) -> types.DiscoverResult:
        """Return what ``server/discover`` is answered with: the same revisions as an error about them names."""
        found = await super()._handle_discover(*given)
        return found.model_copy(update={"supported_versions": list(SERVED)})
