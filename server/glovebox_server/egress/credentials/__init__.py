"""Keys that the broker lends to a call's requests, and that no sandbox ever holds."""
