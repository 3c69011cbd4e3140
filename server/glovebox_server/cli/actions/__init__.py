"""What the commands do, apart from words and options."""
