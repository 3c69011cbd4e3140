"""docs/operate/container-seccomp.json refuses what sandboxes are refused, but for what makes them."""

import json

from tests.repo.files import ROOT

from glovebox_sandboxes.seccomp import policy

#: Rules of the sandboxes' policy that hold around them, too.
OUTSIDE_TOO = {
    "aio", "bpf", "clock", "debugging", "fanotify", "handles", "hardware", "host", "io-uring", "kernel-image",
    "keyrings", "mounts", "namespaces", "numa", "perf", "secret-memory", "userfaultfd",
}  # fmt: skip
#: What bubblewrap makes a sandbox of.
BUBBLEWRAP = {"mount", "pivot_root", "sethostname", "setdomainname", "umount2", "unshare"}


def test_the_filter_around_a_container_is_the_policys() -> None:
    """A rule that the policy gets is one that this file gets, or not, on purpose."""
    (refused,) = json.loads((ROOT / "docs/operate/container-seccomp.json").read_text())["syscalls"]
    rules = {rule.id: rule for rule in policy.load().refuse}
    expected = {name for rule in OUTSIDE_TOO for name in rules[rule].syscalls} - BUBBLEWRAP
    assert refused["names"] == sorted(expected)
    assert not any(rules[rule].when for rule in OUTSIDE_TOO)
