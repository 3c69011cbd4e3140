"""Opens the network that a profile grants, with the keys that it injects."""
