"""Injects keys into a call's requests. No sandbox ever holds one."""
