"""The kinds of isolation, one folder each, and the registry of them."""
