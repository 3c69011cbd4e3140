"""The workspace copy and ``/output``: what a program may write, and what is collected of it."""
