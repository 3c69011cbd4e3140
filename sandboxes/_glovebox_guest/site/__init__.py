"""The code every Python in a sandbox imports at its start: child interpreters have this folder on their path."""
