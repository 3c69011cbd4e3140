"""What every suite of cases runs in: one event loop to a module, and a host with something to lose."""

from collections.abc import Iterator

import anyio.from_thread
import pytest

from glovebox_sandboxes.conformance import host
from glovebox_sandboxes.conformance.host import Planted


@pytest.fixture(scope="module")
def portal() -> Iterator[anyio.from_thread.BlockingPortal]:
    """One event loop for the whole module: drivers, servers and what is planted live in it."""
    with anyio.from_thread.start_blocking_portal() as running:
        yield running


@pytest.fixture(scope="module")
def planted(portal: anyio.from_thread.BlockingPortal) -> Iterator[Planted]:
    """A host with something to lose."""
    with portal.wrap_async_context_manager(host.planted()) as found:
        yield found
