"""Commands about this machine: what it can enforce, what is built here, how clients connect, what can be removed."""
