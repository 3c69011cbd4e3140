"""What this run forbids to skip: ``GLOVEBOX_MUST_RUN``, names with commas between. The one reader of it."""

import os
from typing import NoReturn

import pytest

from glovebox_sandboxes.drivers import registry

#: gVisor as on a host where only the Docker Engine can start it: the gvisor driver's second way. It takes both.
GVISOR_DOCKER = "gvisor-docker"
#: Drivers; and network namespaces, clients in Node, a browser, Prometheus, Podman, engines without root, an index.
NAMES = {*registry.NAMES, "netns", "node", "browser", "prometheus", "podman", "rootless", "index"}
#: Everything: a test that is skipped has failed, whatever its reason (not root, no control groups, no small disk).
ALL = "all"


def forbidden_to_skip() -> set[str]:
    """The names."""
    return {name.strip() for name in os.environ.get("GLOVEBOX_MUST_RUN", "").split(",") if name.strip()}


def unusable(name: str, reason: str) -> NoReturn:
    """Skip what needs ``name``, or fail it where this run forbids that."""
    needed = {"gvisor", "docker"} if name == GVISOR_DOCKER else {name}
    if needed <= forbidden_to_skip():
        pytest.fail(f"GLOVEBOX_MUST_RUN names {name}, which is not usable here: {reason}", pytrace=False)
    pytest.skip(f"{name} is not usable here: {reason}")
