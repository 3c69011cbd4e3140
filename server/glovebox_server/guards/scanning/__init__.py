"""Scans the files that come out of a sandbox."""
