"""The Glovebox server: broker, policy, audit, egress, artifacts, MCP surface and command line."""
