"""The MCP surface: tools, results, notifications and resources as the protocol has them."""
