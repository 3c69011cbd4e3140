"""The drivers that make the plans of servers: connected in a portal, which the answering thread does not wait for."""

import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
from anyio.from_thread import BlockingPortal

from glovebox_sandboxes.contract.base import Driver, Limits, Mount, Plan, SandboxSpec
from glovebox_sandboxes.contract.errors import SandboxError, UnsupportedSpecError
from glovebox_sandboxes.drivers.registry import DRIVERS, RETRY_SECONDS, DriverEntry
from glovebox_sandboxes.host import owner
from glovebox_sandboxes.worker.messages import Message

_MOST_DRIVERS = 8
"""Of one name, each with what was installed when it was connected: servers keep what they began with."""
_MOST_STRANGE = 1024
_ENTRIES = {each.name: each for each in DRIVERS}
_STRANGE = SandboxError(
    "Preparing a sandbox",
    "its worker makes another plan of it",
    "Restart the servers of this state directory together.",
)

Found = Callable[[tuple[Driver, Plan] | SandboxError], None]


class PlanFinder:
    """Drivers by name. For the answering thread."""

    def __init__(self, data: Path, portal: BlockingPortal, tell: Callable[[Callable[[], None]], None]) -> None:
        self._data, self._portal, self._tell = data, portal, tell
        self._drivers: dict[str, list[Driver]] = {name: [] for name in _ENTRIES}
        """Those that are usable, the newest last."""
        self._connecting: dict[str, list[Callable[[], None]]] = {}
        """Searches that wait for a driver that is being connected."""
        self._strange: dict[str, float] = {}
        """Plans for which a driver was connected anew, and until when none is again."""

    def find(self, name: str, spec: SandboxSpec, digest: str, then: Found) -> None:
        """Call ``then`` with the driver that makes this plan, or why none does: now, or once one is connected anew."""
        drivers, now = self._drivers[name], time.monotonic()
        for driver in reversed(drivers):
            try:
                plan = driver.plan(spec)
            except (UnsupportedSpecError, SandboxError):
                continue
            if plan.digest == digest:
                then((driver, plan))
                return
        if now < self._strange.get(digest, now) or len(drivers) == _MOST_DRIVERS:
            then(_STRANGE)
            return
        if len(self._strange) == _MOST_STRANGE:
            self._strange.clear()
        self._strange[digest] = now + RETRY_SECONDS  # what is installed may have changed
        waiting = self._connecting.setdefault(name, [])
        waiting.append(partial(self.find, name, spec, digest, then))
        if len(waiting) == 1:
            self._portal.start_task_soon(self._hold, _ENTRIES[name])

    async def _hold(self, entry: DriverEntry) -> None:
        """Hold a driver as long as the worker lives, if it is usable."""
        try:
            async with entry.connect(self._data, owner.server_id()) as driver:
                if driver.capabilities.usable:
                    self._tell(partial(self._connected, entry.name, driver))
                    await anyio.sleep_forever()
        except Exception:  # noqa: BLE001 - of one driver; the others go on
            traceback.print_exc()
        self._tell(partial(self._connected, entry.name, None))

    def _connected(self, name: str, driver: Driver | None) -> None:
        if driver is not None:
            self._drivers[name].append(driver)
        for again in self._connecting.pop(name, ()):
            again()


def read_spec(told: Message) -> SandboxSpec:
    """Read a spec; no value is converted, or its plan would have another digest. Raises TypeError, LookupError."""
    mounts = tuple(Mount(**each) for each in told["mounts"])
    lists = {name: tuple(told[name]) for name in ("masks", "preload")}
    labels = tuple((name, value) for name, value in told["labels"])
    return SandboxSpec(**{**told, **lists, "limits": Limits(**told["limits"]), "mounts": mounts, "labels": labels})
