"""Inside bubblewrap: Glovebox works there as on a host, or says what the outer one forbids; no sandbox is root."""

import pytest
from tests.inside.place import Place, assert_reached, assert_refused, look

from glovebox_sandboxes.drivers.bubblewrap.wall import which

pytestmark = pytest.mark.driver("bubblewrap")

ANOTHER = ("--uid", "1000", "--gid", "1000")
OUTER = (str(which("bwrap")), "--bind", "/", "/", "--dev", "/dev", "--proc", "/proc")


@pytest.mark.parametrize(
    "options", [("--unshare-user",), ("--unshare-all",), ("--unshare-all", "--unshare-user", *ANOTHER)],
    ids=["a user namespace", "all namespaces", "as another user by name"],
)  # fmt: skip
async def test_it_works_inside_bubblewrap(place: Place, options: tuple[str, ...]) -> None:
    """With namespaces of its own below."""
    seen = await look(place, (*OUTER, *options))
    assert_reached(seen, "rlimit")
    assert {"bubblewrap", "user namespace"} <= set(seen.doctor["host"]["inside"])


async def test_an_outer_one_that_forbids_namespaces_is_named(place: Place) -> None:
    """By the option that has to go; the control is the test above, without it."""
    seen = await look(place, (*OUTER, "--unshare-all", "--unshare-user", "--disable-userns"))
    assert_refused(seen, "Creating new namespace failed", "as bwrap --disable-userns does. Start that one without it")


async def test_root_by_name_without_roots_rights_is_told_to_take_another_number(place: Place) -> None:
    """The kernel refuses it a user namespace; with the number that is named it works, see above."""
    seen = await look(place, (*OUTER, "--unshare-user", "--uid", "0", "--gid", "0"))
    assert_refused(seen, "setting up uid map", "Start that one with another number (bwrap --uid 1000 --gid 1000)")


async def test_root_by_name_with_rights_of_its_own_is_a_normal_user(place: Place) -> None:
    """As `unshare -r` makes it: nobody to become, and nothing to lose on the host."""
    seen = await look(place, ("/usr/bin/unshare", "--user", "--map-root-user"))
    assert_reached(seen, "rlimit")
    assert seen.doctor["host"]["inside"][-1:] != []


@pytest.mark.parametrize("options", [(), ANOTHER], ids=["as root", "under another name"])
async def test_the_kernels_root_in_a_namespace_of_its_own_is_refused(
    roots_place: Place, options: tuple[str, ...]
) -> None:
    """Every sandbox would be root to the kernel, whatever it is called inside. The control: root without it works."""
    seen = await look(roots_place, (*OUTER, "--unshare-user", *options))
    assert_refused(seen, "every sandbox would be the kernel's root", "Start Glovebox, or the sandbox around it, as")
