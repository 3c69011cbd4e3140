"""Proof of policy: the lock of what is in force, and its signature."""
