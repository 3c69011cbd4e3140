"""What every test may rely on: which sandbox drivers are here, and where the embedded runtime is.

A test marked ``driver("bubblewrap")`` or ``driver("docker")`` is skipped, with the reason, on a machine that cannot run
it. Where ``GLOVEBOX_MUST_RUN`` (names with commas between) names the driver, it fails instead. This comes before any
fixture: a skip that is raised inside of an event loop's portal would end the portal for the tests after it.
"""

import functools
import gc
import logging
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from unittest.mock import patch

import anyio
import pytest
import structlog
from hypothesis import HealthCheck, settings
from tests.fixtures.draws import draws
from tests.must_run import ALL, GVISOR_DOCKER, NAMES, forbidden_to_skip, unusable

from glovebox_sandboxes.drivers import registry
from glovebox_sandboxes.drivers.docker.driver import DockerDriver
from glovebox_sandboxes.runtime import runtime
from glovebox_server.settings import Settings
from glovebox_server.transport import processes

KILLS = 6
"""By default: a control beside the tests that inject a crash at each step. ``make soak`` kills 200."""

# Whatever else a machine does: a time would say nothing of what is tested.
settings.register_profile("any speed", draws(suppress_health_check=[HealthCheck.too_slow]))
settings.load_profile("any speed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--driver NAME``: leave out the tests that are marked for other drivers, and do not count them as skipped."""
    parser.addoption("--driver", action="append", choices=[*registry.NAMES, GVISOR_DOCKER], help="only these drivers")
    parser.addoption("--kills", type=int, default=KILLS, help="processes that a test kills at random moments")


def pytest_configure() -> None:
    """Refuse a name that nothing asks for: misspelt, it would forbid nothing. Ignore no signal, whoever started us."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:  # by `nohup`, or a shell's `&`: servers would inherit it
            signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
    unknown = forbidden_to_skip() - NAMES - {ALL}
    if unknown:
        known = ", ".join(sorted(NAMES | {ALL}))
        raise pytest.UsageError(f"GLOVEBOX_MUST_RUN names {', '.join(sorted(unknown))}; there are: {known}")


@pytest.fixture(autouse=True, scope="session")
def _one_process() -> Iterator[None]:
    """No test's own process becomes the parent of servers: they would go on with the tests."""
    with patch.object(processes, "usual", lambda: 1):
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip or fail a test whose driver is not usable here, before any of its fixtures."""
    for marker in item.iter_markers("driver"):
        name = marker.args[0]
        reason = why_unusable(name)
        if reason:
            unusable(name, reason)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out, and do not skip, what markers say of other engines or drivers than those that are to be tested."""
    left_out = [item for item in items for marker in item.iter_markers("engines") if _engine(item) not in marker.args]
    only = config.getoption("driver")
    if only:
        left_out += [item for item in items if not {mark.args[0] for mark in item.iter_markers("driver")} <= {*only}]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def _engine(item: pytest.Item) -> object:
    assert isinstance(item, pytest.Function)
    return item.callspec.params.get("started") or item.callspec.params["subject"]


def pytest_collection_finish() -> None:
    """Collect what importing the tests left."""
    _collect()


@pytest.fixture(scope="module", autouse=True)
def left_open() -> Iterator[None]:
    """Collect what a module's tests left open in a cycle: it fails the last of them, and no test of another module."""
    yield
    structlog.reset_defaults()  # a module's own fixture may have captured logs, after which nothing says where they go
    _collect()


@pytest.fixture(autouse=True)
def same_logging() -> Iterator[None]:
    """Undo what a test configured of logging, which a server in the same process would keep to."""
    configured, before, root = structlog.is_configured(), structlog.get_config(), logging.getLogger()
    handlers = [*root.handlers]
    yield
    root.handlers = handlers
    structlog.reset_defaults()
    if configured:
        structlog.configure(**before)


def _collect() -> None:
    gc.collect()
    gc.freeze()  # what is in use is not walked again: some milliseconds for each module, not a hundred


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A skip is a failure where this run forbids all of them."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and ALL in forbidden_to_skip():
        report.outcome = "failed"
        report.longrepr = f"GLOVEBOX_MUST_RUN forbids to skip: {report.longrepr}"
    return report


@functools.cache
def why_unusable(name: str) -> str:
    """What the driver's own probe misses on this machine; empty if it is usable. Asked once per run."""

    async def probe() -> str:
        data = Settings().data_dir
        if name == registry.NAMES[0] and runtime.find(data) is None:
            await runtime.build(data, lambda _: None)  # an upgrade of the packages is no reason to skip anything
        if name == GVISOR_DOCKER:
            async with DockerDriver.connect("runsc") as engine:
                found = engine.capabilities
        else:
            async with registry.opened(data, f"tests{os.getpid()}") as available:
                found = (await available.get(name)).capabilities
        missing = "; ".join(f"{need.what} ({need.fix})" for need in found.missing)
        return "" if found.usable else missing or "no reason given"

    return anyio.run(probe)


@pytest.fixture
def kills(pytestconfig: pytest.Config) -> int:
    """Return how many processes a test kills at random moments."""
    return int(pytestconfig.getoption("kills"))


@pytest.fixture(scope="session")
def runtime_dir() -> Path:
    """The data directory with the embedded runtime and this version's guest; built now if `make test` did not."""
    data = Settings().data_dir
    anyio.run(runtime.build, data, lambda _: None)
    return data
