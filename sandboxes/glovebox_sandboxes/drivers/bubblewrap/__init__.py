"""The bubblewrap driver, the default: namespaces made by bwrap, and that wall for other drivers."""

from glovebox_sandboxes.drivers.bubblewrap.driver import connect

__all__ = ["connect"]
