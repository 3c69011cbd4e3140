"""Every claim of ``glovebox_sandboxes.conformance`` holds for whole calls; without guards, they go through."""

from collections.abc import Iterator

import anyio.from_thread
import pytest
from tests.conformance.whole_calls import harness
from tests.conformance.whole_calls.case import CallCase, load
from tests.conformance.whole_calls.harness import CallHarness

from glovebox_sandboxes.conformance.host import Planted
from glovebox_sandboxes.drivers.registry import NAMES
from glovebox_server.settings import Settings

CASES = load()
TRIED = [
    pytest.param(case, name, id=f"{case.id}-{name}", marks=pytest.mark.driver(name))
    for name in NAMES
    for case in CASES
    if case.tried_on(name)
]


@pytest.fixture(scope="module")
def call_harness(portal: anyio.from_thread.BlockingPortal, planted: Planted) -> Iterator[CallHarness]:
    """A server's parts, at home on a host with something to lose."""
    with portal.wrap_async_context_manager(harness.opened(Settings().data_dir, planted)) as opened:
        yield opened


@pytest.mark.parametrize(("case", "driver"), TRIED)
def test_calls_end_as_they_must(
    case: CallCase, driver: str, call_harness: CallHarness, portal: anyio.from_thread.BlockingPortal
) -> None:
    """Result, text, records and artifacts are as the case says; no secret and no host path is in any of them."""
    found = portal.call(call_harness.judge, case, driver)
    gap = case.gaps.get(driver)
    if gap is None:
        assert not found.problems, "\n".join((case.claim, *found.problems))
    elif found.problems:
        pytest.xfail(f"{gap}: {found.problems[0]}")
    else:
        pytest.fail(f"the gap has closed, delete it from the case: {gap}")


@pytest.mark.driver("bubblewrap")
@pytest.mark.parametrize("case", [case for case in CASES if case.control], ids=lambda case: case.id)
def test_where_the_guard_does_not_apply_the_call_gets_through(
    case: CallCase, call_harness: CallHarness, portal: anyio.from_thread.BlockingPortal
) -> None:
    """The control: what differs is only what the profile or the caller says."""
    found = portal.call(call_harness.control, case, "bubblewrap")
    assert not found, "\n".join((case.claim, *found))
