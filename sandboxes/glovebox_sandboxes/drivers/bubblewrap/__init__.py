"""The bubblewrap driver, the default: namespaces made by bwrap, and that wall for other drivers."""
