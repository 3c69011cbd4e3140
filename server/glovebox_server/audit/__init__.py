"""The audit log: typed events, a hash chain of canonical JSON lines, one durable file, and an offline verifier.

Pure parts (``events``, ``chain``) never touch the disk; ``file`` is the only writer and ``read`` the only reader.
Nothing here may import the broker, the tools, the MCP surface or a transport: they import this.
"""
