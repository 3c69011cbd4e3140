"""What an operator asks of the log: finds calls by what is recorded of them. Reads the log; proves nothing."""
