"""``python -I -m glovebox_server``: the command line, whatever lies in the current directory or on PYTHONPATH."""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else a shell wants it to be ignored
    # There is nothing to take down yet, and an interrupt in the middle of an import would end in a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from glovebox_server.cli.entry import run

run()
