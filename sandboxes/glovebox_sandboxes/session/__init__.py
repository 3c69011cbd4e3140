"""One job in one sandbox: the connection to its guest, what comes out, how it ended."""
