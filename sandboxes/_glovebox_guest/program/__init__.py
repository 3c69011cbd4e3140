"""The process untrusted code runs in, and its tools."""
