"""Proof of policy: the lock of what is in effect, and its signature."""
