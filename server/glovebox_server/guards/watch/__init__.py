"""Watch rules: what they look for in what calls do, canaries, and what comes of finding something."""
