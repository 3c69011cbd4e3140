"""What the commands tell scripts and CI by their exit codes. Must import nothing of ours."""

OK, FAILED, USAGE, REFUSED, UNAVAILABLE = range(5)
"""Exit codes of ``glovebox call``: fine; the program failed; bad arguments or profile; refused by policy; no sandbox,
no audit log or no artifact store."""

UNFORESEEN = 70
"""A mistake of ours, kept in a file to be reported; EX_SOFTWARE of sysexits.h."""
INTERRUPTED, NOBODY_READS, TERMINATED = 130, 141, 143
"""As a shell tells of SIGINT, SIGPIPE and SIGTERM: 128 and the signal's number."""
