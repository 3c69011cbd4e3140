"""The docker driver: sandboxes as containers of the local Docker Engine.

``plan`` makes the request, ``probe`` finds what is possible, ``engine`` speaks to the Engine, ``driver`` does the rest.
"""
