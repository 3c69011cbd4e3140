"""Names and counts requests before they become calls: runs, traces, refusals. Independent of MCP."""
