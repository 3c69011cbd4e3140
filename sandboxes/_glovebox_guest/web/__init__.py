"""Web pages as text a model can read."""
