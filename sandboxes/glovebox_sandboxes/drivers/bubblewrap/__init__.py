"""The bubblewrap driver, the default: namespaces made by bwrap, and that wall for other drivers.

``driver`` is the driver, ``wall`` is shared with others behind bwrap, ``bwrap`` runs it.
"""

from glovebox_sandboxes.drivers.bubblewrap.driver import connect

__all__ = ["connect"]
