"""Isolation: what a sandbox is, the drivers that make one, and the guest that runs inside it.

Nothing in this package may import ``server`` or ``profiles`` (enforced by tests/repo).
"""
