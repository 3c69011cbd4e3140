"""What the commands do that lock and sign what is in force, and that prove what came of it."""
