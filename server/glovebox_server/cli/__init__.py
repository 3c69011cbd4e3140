"""The command line: words, exit codes and the commands."""

#: Set by the script of ``glovebox completion`` to ask for completions, in click's own words.
COMPLETE = "_GLOVEBOX_COMPLETE"
