"""No host path reaches a client in the words of a failure (M8)."""

import pytest

from glovebox_server.errors import PLACE, without_paths


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("use the log in /root/.local/state/glovebox/audit: No space left", f"use the log in {PLACE}: No space left"),
        ("[Errno 13] Permission denied: '/sys/fs/cgroup/g1-2/s3'", f"[Errno 13] Permission denied: {PLACE}"),
        ("in '/home/a b/My Data' and \"/x/y\".", f"in {PLACE} and {PLACE}."),
        ("Run `chmod go= /srv/state`.", f"Run `chmod go= {PLACE}`."),
        ("/var/lib is full; (/tmp/x) too", f"{PLACE} is full; ({PLACE}) too"),
        ("half a \udcff character", "half a ? character"),
    ],
)  # fmt: skip
def test_paths_are_replaced(text: str, wanted: str) -> None:
    """Plain, quoted, with spaces in quotes, at the beginning and in brackets."""
    assert without_paths(text) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "Run `glovebox doctor`.", "and/or", "text/html is not image/png", "sha256:ab/cd", "1 / 2", "https://a.example/b/c",
        "artifact://abc", "apt-get install bubblewrap", "Set it to unix:///run/docker.sock.", "pypi.org/simple/",
    ],
)  # fmt: skip
def test_everything_else_stays(text: str) -> None:
    """The control: addresses, media types and commands are what the reader needs."""
    assert without_paths(text) == text
