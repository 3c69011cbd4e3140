"""Pictures: what their headers say, and smaller copies of those that are too large to be looked at."""
