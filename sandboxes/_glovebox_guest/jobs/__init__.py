"""The jobs a guest knows: each module here is one, and its name is the kind that the host asks for.

``run(payload, emit)`` does it, in the child. A job that asks the host's egress policy has ``ask`` besides, which runs
in the guest itself and makes the payload; one whose program may ask by itself says ``PROXY = True``.
"""
