"""The policy reader: a policy whose parts have the promised types, or ValueError."""

import errno

from tests.fuzz.harness import bounded

from glovebox_sandboxes.seccomp.policy import parse


def check(data: bytes) -> None:
    """The whole input is the file."""
    with bounded():
        try:
            policy = parse(data)
        except ValueError:
            return
        assert policy.errno in errno.errorcode
        assert policy.newer_errno in errno.errorcode
        names = [name for allowed in policy.allow for name in allowed.syscalls]
        names += [name for refused in policy.refuse for name in refused.syscalls]
        assert all(isinstance(name, str) for name in (*names, *policy.architectures))
        for allow in policy.allow:
            assert all(0 <= condition.argument <= 5 for condition in allow.when)
            for condition in allow.when:
                assert 0 <= condition.mask < 1 << 64
                assert all(0 <= value < 1 << 64 for _, value in condition.values)
