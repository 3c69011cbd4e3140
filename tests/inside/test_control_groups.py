"""Without control groups, root included: limits hold per process, and it is said what would make them hold for all.

With them, of whichever version this machine has: test_refused_namespaces. Version 2 for certain: tests/tools/in_vm.
"""

import re

import pytest
from tests.inside.place import Place, assert_reached, look

pytestmark = pytest.mark.driver("bubblewrap")

# In mounts of its own. The second is what containers have.
ABSENT = 'mount -t tmpfs none /sys/fs/cgroup; exec "$@"'
READ_ONLY = """
for place in $(sed -n 's|^[^ ]* \\(/sys/fs/cgroup[^ ]*\\) cgroup.*|\\1|p' /proc/self/mounts); do
    mount --bind -o ro "$place" "$place"
    mount -o remount,bind,ro "$place"
done
exec "$@"
"""


@pytest.mark.parametrize(("change", "named"), [(ABSENT, "none"), (READ_ONLY, "v[12]")], ids=["absent", "read-only"])
async def test_root_without_control_groups_reaches_limits_per_process(
    roots_place: Place, change: str, named: str
) -> None:
    """A whole call is made; the control is root with them, in test_refused_namespaces."""
    seen = await look(roots_place, ("/usr/bin/unshare", "--mount", "/bin/sh", "-euc", change, "change"))
    assert_reached(seen, "rlimit")
    (missing,) = seen.driver["missing"]
    assert missing["what"] == "no control groups: limits hold per process"
    assert missing["fix"].startswith("Control groups are absent or read-only here")
    assert re.fullmatch(named, seen.doctor["host"]["control_groups"])
