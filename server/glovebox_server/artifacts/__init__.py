"""Artifacts: files that came out of a sandbox, checked, content-addressed, quarantined, owned and short-lived."""
