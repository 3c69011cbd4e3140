"""The host's side of a sandbox's network: decides, resolves, dials, and passes bytes back.

A sandbox has no network of its own; it asks over the wire. ``EgressGate`` is the one way out, one per call; its pure
rules are in ``glovebox_profiles.egress``. Never import a guard, a driver or the MCP SDK here.
"""
