"""The gvisor driver: programs run on a user-space kernel of their own, and that kernel runs behind bwrap's wall."""
