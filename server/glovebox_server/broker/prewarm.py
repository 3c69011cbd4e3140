"""Prepares sandboxes before the first call, after checking that what profiles preload can be imported."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import anyio

from glovebox_profiles.compile import to_spec
from glovebox_profiles.errors import ProfileError
from glovebox_profiles.load.loader import ProfileSet
from glovebox_sandboxes.contract.errors import SandboxUnavailable, UnsupportedSpec
from glovebox_sandboxes.contract.spec import SandboxSpec
from glovebox_sandboxes.pool.provider import SandboxProvider
from glovebox_sandboxes.session.run import attest

IMPORTS_AFTER_SECONDS = 1.0
"""After the start of a server: importing takes a processor for half a second, and the first call needs it more."""


async def check_preloads(profiles: ProfileSet, sandboxes: SandboxProvider, workspace: Path | None, state: Path) -> None:
    """Import each profile's modules in a sandbox of its own, unless that is known to work.

    What was found good is remembered in the state directory by the plan's digest, which covers runtime and list.

    Raises:
        ProfileError: a module cannot be imported; says what the import said.
    """
    known = state / "preloads"
    for tool, profile in profiles.items():
        if not profile.python.preload:
            continue
        try:
            driver, plan = await sandboxes.choose(profile.isolation, to_spec(profile, workspace=workspace))
        except UnsupportedSpec:
            continue  # nothing can run under it here, and its calls will hear why
        mark = known / plan.digest.partition(":")[2]
        if mark.exists():
            continue
        try:
            async with driver.open(plan) as sandbox:
                await attest(sandbox, plan)
        except SandboxUnavailable as problem:
            last = problem.reason.strip().splitlines()[-1]
            raise ProfileError(
                profiles.source(tool),
                None,
                "python.preload",
                f"a module cannot be imported in {driver.name}: {last}",
                "Take it out of the list, or install it in the sandboxes' Python.",
            ) from None
        known.mkdir(mode=0o700, exist_ok=True)
        mark.touch(mode=0o600)


async def prepare_sandboxes(profiles: ProfileSet, sandboxes: SandboxProvider, workspace: Path | None) -> None:
    """Have sandboxes of profiles that preload ready: at once without the modules, which is quick, then with them."""

    async def prepare(change: Callable[[SandboxSpec], SandboxSpec]) -> None:
        for profile in profiles.values():
            if profile.python.preload:
                with suppress(UnsupportedSpec):  # its calls will hear of it
                    await sandboxes.prepare(profile.isolation, change(to_spec(profile, workspace=workspace)))

    await prepare(SandboxSpec.without_preload)
    await anyio.sleep(IMPORTS_AFTER_SECONDS)
    await prepare(lambda spec: spec)
