"""One call from its raw arguments to its answer."""
