"""The audit log, and every proof made of it: written, read and verified. Imports nothing of ``glovebox_server``.

Needs cryptography, rfc8785, pydantic and anyio; of ours only ``glovebox_sandboxes.contract.errors`` and ``.plural``.
"""
