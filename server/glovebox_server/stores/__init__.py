"""Stores that all server processes of a state directory share: SQLite files, and folders of small files."""
