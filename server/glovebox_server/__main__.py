"""``python -I -m glovebox_server``: the command line, whatever lies in the current directory or on PYTHONPATH."""

from glovebox_server.cli.entry import run

run()
