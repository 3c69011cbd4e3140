"""What the commands tell scripts by their exit codes, and which signals end them. Must import nothing of ours."""

import signal

OK, FAILED, USAGE, REFUSED, UNAVAILABLE = range(5)
"""Exit codes of ``glovebox call``: fine; the program failed; bad arguments or profile; refused by policy; no sandbox,
no audit log or no artifact store."""

NO_SERVER = 5
"""``glovebox stop`` is in force, and no server is live that it could have ended anything of."""
UNFORESEEN = 70
"""A mistake of ours, kept in a file to be reported; EX_SOFTWARE of sysexits.h."""
INTERRUPTED, NOBODY_READS, TERMINATED = 130, 141, 143
"""As a shell tells of SIGINT, SIGPIPE and SIGTERM: 128 and the signal's number."""

_OTHERS = "KILL STOP TSTP TTIN TTOU CONT CHLD URG WINCH ILL TRAP ABRT BUS FPE SEGV SYS PIPE XFSZ ALRM"

ENDING = frozenset(map(int, signal.valid_signals())) - {getattr(signal, f"SIG{name}") for name in _OTHERS.split()}
"""Signals that would end a process on the spot, and end ours in good order, on record: all but those that cannot be
caught, end nothing, or tell of a fault of the process itself (signal(7)); SIGPIPE and SIGXFSZ, which Python turns into
errors; and SIGALRM, which belongs to whoever sets the clock."""


def signal_name(number: int) -> str:
    """``SIGHUP``; ``signal 40`` for one of the real-time signals, which have no names."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
