"""The host's side: processes, control groups, mounts, users, and what the kernel says of them."""
