"""Runs one Python program under bubblewrap, as nobody: for tests of one guard at a time, without a driver around it."""

import contextlib
import os
import subprocess  # noqa: TID251 - tests of a guard start the tool themselves, with nothing of ours in between
from collections.abc import Iterator, Sequence

#: A Python every user may execute. The tests' own interpreter may live in a home directory that nobody cannot enter.
PYTHON = "/usr/bin/python3"
NOBODY = 65534
SCRATCH = "/tmp"  # noqa: S108 - a tmpfs inside the sandbox
#: Far above what any of these programs needs (below 1 s); it only ends a test that hangs.
SECONDS = 60


@contextlib.contextmanager
def _readable(content: bytes) -> Iterator[int]:
    descriptor = os.memfd_create("glovebox-test")
    try:
        os.write(descriptor, content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def run(
    program: str, *, stdin: str = "", seccomp: bytes | None = None, options: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run ``program`` with all namespaces of its own and the host read-only; ``options`` go to ``bwrap``."""
    argv = ["bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/"]
    argv += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", SCRATCH, *options]
    with contextlib.ExitStack() as stack:
        descriptors = []
        if seccomp is not None:
            descriptors.append(stack.enter_context(_readable(seccomp)))
            argv += ["--seccomp", str(descriptors[0])]
        root = os.geteuid() == 0
        return subprocess.run(
            [*argv, PYTHON, "-I", "-X", "utf8", "-c", program],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
            pass_fds=descriptors,
            user=NOBODY if root else None,
            group=NOBODY if root else None,
            extra_groups=[] if root else None,
            cwd="/",
        )
