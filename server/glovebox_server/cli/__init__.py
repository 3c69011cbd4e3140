"""The command line: words, exit codes and what each command does."""
