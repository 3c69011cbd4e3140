"""The gvisor driver: programs run on a user-space kernel of their own, and that kernel runs behind bwrap's wall."""

from glovebox_sandboxes.drivers.gvisor.driver import connect

__all__ = ["connect"]
