"""What only a secret looks like, and what stands in its place: for watch rules, results and records. Pure."""
