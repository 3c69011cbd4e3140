"""The command line: words, exit codes and what each command does."""

#: Set by the script of ``glovebox completion``: asks what may follow on a command line, in click's own words.
COMPLETE = "_GLOVEBOX_COMPLETE"
