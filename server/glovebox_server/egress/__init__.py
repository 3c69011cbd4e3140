"""The host's side of a sandbox's network: decides, resolves, dials, and hands bytes back.

A sandbox has no network of its own; it asks over the wire. ``gate.EgressGate`` is the one entry: one per call. The
rules themselves are pure and live in ``glovebox_profiles.egress``. Never import a driver or the MCP SDK here.
"""
