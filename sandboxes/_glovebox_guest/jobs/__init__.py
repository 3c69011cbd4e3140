"""The jobs of a guest: the name of each module here is a kind of job that the host sends.

``run(payload, emit)`` does it, in the child. A job with requests to the host's egress policy has ``ask`` besides, which
runs in the guest and returns the payload; one whose program sends requests itself sets ``PROXY = True``.
"""
