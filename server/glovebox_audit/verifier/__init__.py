"""The check behind ``audit.verify``: what it finds, and how it goes through the lines of a log."""
