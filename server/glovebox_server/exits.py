"""What the commands tell scripts and CI by their exit codes. Must import nothing of ours."""

OK, FAILED, USAGE, REFUSED, UNAVAILABLE = range(5)
"""Exit codes of ``glovebox call``: fine; the program failed; bad arguments or profile; refused by policy; no sandbox,
no audit log or no artifact store."""
