"""The guest: the program inside every sandbox. Standard library and ``_glovebox_guest.wire`` only.

It starts in milliseconds because it imports little: no ``typing``, no ``dataclasses``, nothing a job does not need.
"""
