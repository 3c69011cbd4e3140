"""Whether what profiles preload can be imported: tried once for each runtime and list, before the server serves.

What was found good is remembered in the state directory by the plan's digest, which covers the runtime and the list.
"""

from pathlib import Path

from glovebox_profiles.compile import to_spec
from glovebox_profiles.errors import ProfileError
from glovebox_profiles.load.loader import ProfileSet
from glovebox_sandboxes.contract.errors import SandboxUnavailable, UnsupportedSpec
from glovebox_sandboxes.drivers.registry import Drivers
from glovebox_sandboxes.session.run import prove


async def check(profiles: ProfileSet, drivers: Drivers, workspace: Path, state: Path) -> None:
    """Import each profile's modules in a sandbox of its own, unless that is known to work.

    Raises:
        ProfileError: a module cannot be imported; says what the import said.
    """
    known = state / "preloads"
    for tool, profile in profiles.items():
        if not profile.python.preload:
            continue
        try:
            driver, plan = await drivers.choose(profile.isolation, to_spec(profile, workspace=workspace))
        except UnsupportedSpec:
            continue  # nothing can run under it here, and its calls will hear why
        mark = known / plan.digest.partition(":")[2]
        if mark.exists():
            continue
        try:
            async with driver.open(plan) as sandbox:
                await prove(sandbox, plan)
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
