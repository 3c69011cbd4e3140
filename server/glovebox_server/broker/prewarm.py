"""Which sandboxes a server has ready before its first call: those of profiles that preload modules."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import anyio

from glovebox_profiles.compile import to_spec
from glovebox_profiles.load.loader import ProfileSet
from glovebox_sandboxes.contract.errors import UnsupportedSpec
from glovebox_sandboxes.contract.spec import SandboxSpec
from glovebox_sandboxes.drivers.registry import Drivers
from glovebox_sandboxes.pool.pool import Pool

IMPORTS_AFTER_SECONDS = 1.0
"""After the start of a server: importing takes a processor for half a second, and the first call needs it more."""


async def prepare(profiles: ProfileSet, drivers: Drivers, pool: Pool, workspace: Path | None) -> None:
    """Have them ready: at once those without the modules, which take a moment, then those with them."""

    async def prepared(change: Callable[[SandboxSpec], SandboxSpec]) -> None:
        for profile in profiles.values():
            if profile.python.preload:
                with suppress(UnsupportedSpec):  # its calls will hear of it
                    spec = change(to_spec(profile, workspace=workspace))
                    pool.prepare(*await drivers.choose(profile.isolation, spec))

    await prepared(SandboxSpec.without_preload)
    await anyio.sleep(IMPORTS_AFTER_SECONDS)
    await prepared(lambda spec: spec)
