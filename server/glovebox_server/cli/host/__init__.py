"""Commands about this machine: what it can enforce, what is built here, how clients reach it, what can be removed."""
