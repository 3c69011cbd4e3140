"""Glovebox's drivers, and nothing at all, behind the same adapter as the others."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from tests.comparison.getting import NotHereError
from tests.comparison.portable import Ended, Seen
from tests.comparison.systems import System

from glovebox_sandboxes.conformance import prove, trial
from glovebox_sandboxes.conformance.host import Planted
from glovebox_sandboxes.contract.base import Driver, Limits
from glovebox_sandboxes.drivers import registry
from glovebox_server.settings import Settings

#: What a guest's word for the end of a program is to a caller who only asks whether it was stopped.
_ENDED: Mapping[str, Ended] = {"exited": "ended", "signalled": "ended", "timed_out": "timed_out"}


class Glovebox(System):
    """One driver, with all that a profile can grant but network."""

    def __init__(self, driver: Driver) -> None:
        """Take a driver that is usable."""
        self.key = f"glovebox-{driver.name}"
        self.title = f"Glovebox, {driver.name}"
        self.version = driver.capabilities.version
        self.gaps = prove.gap_names(driver.capabilities)  # what it is called in the cases' gaps
        self._driver = driver

    def command(self) -> str:
        """What an operator runs for the same."""
        return f"glovebox doctor --prove --driver {self._driver.name}"

    async def run(self, text: str, limits: Limits, host: Planted, *, scratch: Path) -> Seen:  # noqa: ARG002 - it makes its own
        """Run it in a sandbox of its own."""
        seen = await trial.see(self._driver, text, limits, host)
        if seen.outcome is None:
            return Seen(ended="failed", note=seen.unavailable, left=seen.left)
        found = seen.outcome
        return Seen(
            ended=_ENDED.get(found.ended, "stopped"),
            stdout=found.stdout.text,
            stderr=found.stderr.text,
            note=found.reason,
            seconds=found.usage.wall_ms / 1000,
            left=seen.left,
        )


@asynccontextmanager
async def glovebox(name: str) -> AsyncIterator[Glovebox]:
    """One of our drivers; raises :class:`NotHereError` where it cannot be used."""
    async with registry.opened(Settings().data_dir, "comparison") as available:
        driver = await available.get(name)
        missing = "; ".join(f"{each.what} ({each.fix})" for each in driver.capabilities.missing if each.fatal)
        if not driver.capabilities.usable:
            raise NotHereError(f"it lacks {missing}")
        yield Glovebox(driver)
