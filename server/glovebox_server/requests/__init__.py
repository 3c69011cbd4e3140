"""Names and counts requests before they become calls: runs, traces, refusals. Knows no MCP."""
