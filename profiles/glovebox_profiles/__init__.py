"""Tool profiles: one TOML file per tool, and the strict loader, algebra and explanations for them.

May import ``sandboxes``; must never import ``server`` (enforced by tests/repo).
"""
