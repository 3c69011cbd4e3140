"""The jobs a guest can do. Each runs in a child process of its own: ``run(payload, emit)``."""
