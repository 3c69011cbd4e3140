"""What the commands that govern do."""
