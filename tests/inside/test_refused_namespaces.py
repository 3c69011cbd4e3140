"""Without user namespaces: nothing runs, and what is said names the cause and a fix that fits it."""

from pathlib import Path

import pytest
from tests.inside.place import PYTHON, Place, assert_reached, assert_refused, look

pytestmark = pytest.mark.driver("bubblewrap")

CANNOT = "it cannot make namespaces: bwrap: "
FILTER = "A filter of system calls around this process refuses them"
CONTAINER = "This container refuses user namespaces"
#: Test machines are containers themselves, by their marks.
CAUSE = CONTAINER if any(Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv")) else FILTER
APPARMOR = "kernel.apparmor_restrict_unprivileged_userns"


def filtered(kind: str) -> tuple[str, ...]:
    """What puts a filter on what comes after it."""
    return (PYTHON, "-m", "tests.inside.filtered", kind)


async def test_a_filter_that_refuses_user_namespaces_is_named(place: Place) -> None:
    """To a normal user; the control is the same user without it, in test_normal_user."""
    seen = await look(place, filtered("namespaces"))
    assert_refused(seen, f"{CANNOT}No permissions to create new namespace", CAUSE)
    assert "system-call filter" in seen.doctor["host"]["inside"]


async def test_root_is_refused_as_well(roots_place: Place) -> None:
    """Root becomes another user before bwrap starts, and starts nothing that would stay root instead."""
    assert_refused(await look(roots_place, filtered("namespaces")), CANNOT, CAUSE)


async def test_without_the_filter_root_reaches_control_groups(roots_place: Place) -> None:
    """The control, and the situation of a server on a plain host: limits by whichever version is mounted."""
    seen = await look(roots_place)
    assert seen.doctor["host"]["root"] is True
    groups = seen.doctor["host"]["control_groups"]
    assert_reached(seen, "rlimit" if groups == "none" else f"cgroup {groups}")


async def test_a_user_namespace_without_rights_is_refused(place: Place) -> None:
    """As AppArmor gives them on Ubuntu; here by a filter, which is then what is named."""
    assert_refused(await look(place, filtered("powers")), CANNOT, CAUSE.partition(" refuses")[0])


# The kernel's settings as they are, and Ubuntu's beside them: a file cannot be added to /proc/sys itself.
_UBUNTU = f"""
mount -t tmpfs none "$1"
mkdir "$1/kernel"
for name in overflowuid overflowgid osrelease cap_last_cap random pid_max; do
    cp -r "/proc/sys/kernel/$name" "$1/kernel/"
done
echo 1 > "$1/kernel/{APPARMOR.removeprefix("kernel.")}"
mount --rbind "$1/kernel" /proc/sys/kernel
shift
exec "$@"
"""


async def test_ubuntus_apparmor_is_named_with_both_fixes(place: Place, roots_place: Place) -> None:
    """The setting decides what is said, before any mark of a container or a filter: it is what really refuses there."""
    ubuntu = ("/usr/bin/unshare", "--mount", "/bin/sh", "-euc", _UBUNTU, "ubuntu", str(roots_place.root / "home"))
    there = Place(root=place.root, data=place.data, become=(*ubuntu, *place.become))
    seen = await look(there, filtered("powers"))
    assert_refused(seen, CANNOT, f"`sysctl -w {APPARMOR}=0`")
    assert "Give bwrap a profile (docs/operate/troubleshoot.md has it)" in seen.fatal[1]


async def test_a_limit_of_none_in_a_namespace_around_is_named(place: Place) -> None:
    """Root of the namespace, who is a normal user, cannot make more; nor would the host's sysctl help."""
    none = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"'
    seen = await look(place, ("/usr/bin/unshare", "--user", "--map-root-user", "/bin/sh", "-euc", none, "none"))
    assert_refused(seen, CANNOT, "The sandbox around this process forbids user namespaces inside it")
