"""Queries of the log: find calls by their records. Reads the log; proves nothing."""
