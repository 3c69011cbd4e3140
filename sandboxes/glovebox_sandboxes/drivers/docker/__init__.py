"""The docker driver: sandboxes as containers of the local Docker Engine.

``plan`` says what is asked for, ``probe`` what can be had, ``engine`` speaks to the Engine, ``driver`` does it.
Nothing here may import a profile or the server.
"""

from glovebox_sandboxes.drivers.docker.driver import DockerDriver, connect

__all__ = ["DockerDriver", "connect"]
