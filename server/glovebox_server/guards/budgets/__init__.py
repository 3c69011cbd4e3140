"""Budgets: reserved before a call, settled after it, in one file that all server processes share."""
