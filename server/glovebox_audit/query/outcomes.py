"""How a call can have come out. A module of its own: the command line names them before it imports anything else."""

#: Of one that finished, as it ``ended``, and what exited by its result; ``error`` is Glovebox's own failure.
OUTCOMES = (
    "succeeded", "failed", "signalled", "timed_out", "out_of_memory", "limit", "cancelled", "error", "lost",
    "denied", "ask", "running",
)  # fmt: skip

#: Of calls that policy allowed: their callers read an error. Who asks for those that ``failed`` means all of them, and
#: those that a stop cancelled, whose callers read that.
FAILED = "failed"
ERRORS = (FAILED, "signalled", "timed_out", "out_of_memory", "limit", "error")
CANCELLED = "cancelled"

#: Of a call that policy allowed, and that has no end.
RUNNING = "running"
