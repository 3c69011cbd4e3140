"""The operator's policy, ``policy.toml``: who may call what, how much of it, and who is asked.

Pure but for ``load``, which reads the file. Never import ``server``.
"""
