"""Bounds how many calls are under way."""
