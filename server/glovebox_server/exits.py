"""Exit codes of the commands, and the signals that end them. Must import nothing of ours."""

import signal

OK, FAILED, USAGE, REFUSED, UNAVAILABLE = range(5)
"""Exit codes of ``glovebox call``: success; the program failed; bad arguments or profile; refused by policy; no
sandbox, audit log or artifact store."""
NO_SERVER = 5
"""``glovebox stop`` is in effect, but no server is live whose calls it could have ended."""
UNFORESEEN = 70
"""An internal error, kept in a file to be reported; EX_SOFTWARE of sysexits.h."""
INTERRUPTED, NOBODY_READS, TERMINATED = 130, 141, 143
"""As a shell reports SIGINT, SIGPIPE and SIGTERM: 128 and the signal's number."""
_OTHERS = "KILL STOP TSTP TTIN TTOU CONT CHLD URG WINCH ILL TRAP ABRT BUS FPE SEGV SYS PIPE XFSZ ALRM"
ENDING = frozenset(map(int, signal.valid_signals())) - {getattr(signal, f"SIG{name}") for name in _OTHERS.split()}
"""Signals that would kill a process, and end ours in good order, on record. Not those that cannot be caught, end
nothing, or report a fault of the process itself (signal(7)); nor SIGPIPE and SIGXFSZ, which Python turns into errors;
nor SIGALRM, which belongs to the code that sets the clock."""


def signal_name(number: int) -> str:
    """Return ``SIGHUP``; ``signal 40`` for a real-time signal, which has no name."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
