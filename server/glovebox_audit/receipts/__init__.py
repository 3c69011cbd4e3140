"""Receipts: their statements, their envelope, and their verification."""
