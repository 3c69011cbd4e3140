"""The gvisor driver: programs run on a kernel of their own in user space, and that kernel runs behind bwrap's wall.

``plan`` says what is asked for, ``probe`` what can be had, ``driver`` does it. Nothing here may import a profile or the
server.
"""

from glovebox_sandboxes.drivers.gvisor.driver import connect

__all__ = ["connect"]
