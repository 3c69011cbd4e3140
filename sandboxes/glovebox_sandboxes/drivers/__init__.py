"""Kinds of isolation, one folder each, and their registry."""
