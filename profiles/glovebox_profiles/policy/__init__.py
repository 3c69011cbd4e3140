"""The operator's policy, ``policy.toml``: callers, their tools, budgets and approvals.

Pure except ``load``, which reads the file. Never import ``server``.
"""
