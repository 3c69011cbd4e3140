"""The way out for programs: an HTTP proxy on the sandbox's own loopback."""
