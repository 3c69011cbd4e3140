"""The process untrusted code runs in, and what it may use."""
