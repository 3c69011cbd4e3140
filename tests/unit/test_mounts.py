"""What is mounted inside a directory: found whatever its name, and told in one sentence."""

import pytest

from glovebox_sandboxes.contract.attestation import Field, describe
from glovebox_sandboxes.host.mounts import inside, named

TABLE = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:21 / /proc rw,nosuid - proc proc rw
24 22 0:22 / /sys rw - sysfs sysfs rw
25 22 0:30 / /home/me/data rw - nfs server:/data rw
26 25 0:31 / /home/me/data/deep rw - tmpfs none rw
27 22 0:32 / /home/me/my\\040disk\\134x rw - fuse.sshfs box: rw
28 22 0:33 / /home/mean rw - tmpfs none rw
29 22 0:34 / /srv/\\033[2J rw - tmpfs none rw
"""


@pytest.mark.parametrize(
    ("directory", "found"),
    [
        ("/home/me", ("data", "data/deep", "my disk\\x")),
        ("/home/me/data", ("deep",)),
        ("/home/mean", ()),
        ("/home/m", ()),
        ("/nowhere", ()),
        ("/home", ("me/data", "me/data/deep", "me/my disk\\x", "mean")),
    ],
)
def test_mounts_inside_a_directory_are_found(directory: str, found: tuple[str, ...]) -> None:
    """Below it and not beside it; the directory may itself be one; the kernel's escapes are undone."""
    assert inside(directory, TABLE) == found


def test_the_root_holds_every_mount_but_itself() -> None:
    """`--workspace /`: three are named, the others counted."""
    assert named(inside("/", TABLE)) == "home/me/data, home/me/data/deep, home/me/my disk\\\\x and 4 more"


def test_a_name_cannot_draw_on_the_terminal() -> None:
    """A mount point may hold any byte but a slash and NUL."""
    assert named(inside("/srv", TABLE)) == "\\x1b[2J"


def test_of_this_machine_the_root_holds_proc() -> None:
    """The real file has the columns that are read."""
    assert "proc" in inside("/")


def test_a_long_difference_is_cut_between_its_items() -> None:
    """No path ends in the middle; how many were left out is told. The control is a short one, whole."""
    paths = [f"/somewhere/a-mount-{number}" for number in range(40)]
    long = Field("mounts", ["/"], paths)
    words = describe((long,))
    shown = [word for word in words.removesuffix(" more").split("'") if word.startswith("/somewhere")]
    assert shown == paths[: len(shown)]
    assert words.endswith(f"… and {40 - len(shown)} more")
    short = Field("uid", 1, 0)
    assert describe((short,)) == "uid: planned 1, found 0"
    assert describe((short,) * 6) == "; ".join(["uid: planned 1, found 0"] * 4) + "; and 2 more differences"
