"""Receipts: what one call was, got and did, as an in-toto statement signed with the server's key.

``dsse`` is the envelope, ``statement`` what it says, ``keys`` who signs, ``ledger`` how a call's records become it,
``verify`` the proof for whoever holds one. Nothing here may import the broker, the MCP surface or a transport.
"""
