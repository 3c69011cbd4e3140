"""The host's side of a sandbox's network: decides, resolves, dials, and passes bytes back.

A sandbox has no network of its own; it asks over the wire. ``EgressGate`` is the one way out, one per call; its pure
rules are in ``glovebox_profiles.egress``. Other packages import from here, except ``issuer``, which is slow to import.
Never import a guard, a driver or the MCP SDK here.
"""

from glovebox_server.egress.authority import Authority
from glovebox_server.egress.events import EgressAnswer, EgressAttempt, EgressLimits, PeerError
from glovebox_server.egress.gate import EgressGate, Traffic
from glovebox_server.egress.request import request_headers
from glovebox_server.egress.serve import serve_stream

__all__ = [
    "Authority",
    "EgressAnswer",
    "EgressAttempt",
    "EgressGate",
    "EgressLimits",
    "PeerError",
    "Traffic",
    "request_headers",
    "serve_stream",
]
