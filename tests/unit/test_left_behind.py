"""What is left of a sandbox is told from what was begun since under the number of its namespace."""

import subprocess  # noqa: TID251 - a process in a namespace of its own is what is looked at
from collections.abc import Iterator

import pytest

from glovebox_sandboxes.conformance import trial

pytestmark = pytest.mark.driver("bubblewrap")


@pytest.fixture
def namespace() -> Iterator[int]:
    script = "readlink /proc/self/ns/pid; exec sleep 600"
    options = ["--unshare-pid", "--as-pid-1", "--die-with-parent", "--dev-bind", "/", "/"]
    with subprocess.Popen(["bwrap", *options, "sh", "-c", script], stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            yield int(running.stdout.readline().strip().removeprefix("pid:[").removesuffix("]"))
        finally:
            running.kill()


async def test_a_namespace_that_began_later_is_no_sandboxs(namespace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another server's sandbox got the number; the control is one that was there already."""
    monkeypatch.setattr(trial, "_GONE_SECONDS", 0.1)
    numbers = {"pid": namespace}
    assert len(await trial.left(numbers, "", trial.now())) == 1
    assert await trial.left(numbers, "", trial.now() - 3600) == ()
