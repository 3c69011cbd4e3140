"""Run the command line with ``python -I -m glovebox_server``, isolated from the current directory and PYTHONPATH."""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell may want it to be ignored
    # Nothing needs to be taken down yet, and an interrupt during an import would print a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from glovebox_server.cli.entry import run

run()
