"""``glovebox doctor --prove``: whole calls judged on this host, and the scorecard."""
