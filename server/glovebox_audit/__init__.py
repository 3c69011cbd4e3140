"""The audit log and its proofs: written, read and verified. Imports nothing of ``glovebox_server``.

To verify (``verify``, ``read``, ``chain``, ``events``, ``receipts``, ``bundle``, ``segments.proof``) it needs
cryptography, rfc8785 and pydantic; to write (``log``, ``subscription``, ``anchors``) anyio too. ``query`` searches a
log, ``writers`` lists the servers that have it open, ``printable`` escapes strangers' text. Of ours it needs
``glovebox_sandboxes.contract.errors`` and ``.plural``. Import no other module of it elsewhere.
"""
