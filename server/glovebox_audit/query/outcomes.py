"""Outcomes of a call, in a module of their own: the command line imports them before anything else."""

#: By ``ended`` of a finished call, or its result if it exited; ``error`` is Glovebox's own failure.
OUTCOMES = (
    "succeeded", "failed", "signalled", "timed_out", "out_of_memory", "limit", "cancelled", "error", "lost",
    "denied", "ask", "running",
)  # fmt: skip

#: Of allowed calls whose callers read an error. A query for ``failed`` means all of them, and those cancelled by a
#: stop, whose callers read that.
FAILED = "failed"
ERRORS = (FAILED, "signalled", "timed_out", "out_of_memory", "limit", "error")
CANCELLED = "cancelled"

#: Of an allowed call without an end.
RUNNING = "running"
