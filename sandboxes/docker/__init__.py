"""The docker driver: sandboxes as containers of the local Docker Engine. Nothing here may import a profile or the server.

``plan`` says what is asked for, ``probe`` what can be had, ``engine`` speaks to the Engine, ``driver`` does it.
"""

from sandboxes.docker.driver import DockerDriver

__all__ = ["DockerDriver"]
