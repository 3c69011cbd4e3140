"""The workspace copy and ``/output``: writable places of a program, and the collection of their files."""
