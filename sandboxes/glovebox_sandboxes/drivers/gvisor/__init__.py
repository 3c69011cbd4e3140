"""The gvisor driver: programs run on a user-space kernel of their own, and that kernel runs behind bwrap's wall.

``plan`` makes the command, ``driver`` probes and runs it.
"""

from glovebox_sandboxes.drivers.gvisor.driver import connect

__all__ = ["connect"]
