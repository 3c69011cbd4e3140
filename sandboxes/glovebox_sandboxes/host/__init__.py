"""The host's side: processes, control groups, mounts, users, and the kernel's view of them."""
