"""The hosts a sandbox may connect to: pure grammar and decisions, no sockets, no look-ups, no files.

The server's ``egress`` does the networking and asks here. Never import anything of ``server`` here.
"""
