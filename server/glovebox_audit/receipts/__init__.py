"""Receipts: what they say, their envelope, and their proof for whoever holds one."""
