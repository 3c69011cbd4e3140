"""The core of one call: a call, the chain that it goes through, and its sandbox. No guard by name."""
