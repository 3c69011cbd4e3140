"""Prepares sandboxes before the first call, after checking that what profiles preload can be imported."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import anyio

from glovebox_profiles.compile import ProfileSet, to_spec
from glovebox_profiles.errors import ProfileError
from glovebox_sandboxes.contract.base import Driver, Plan
from glovebox_sandboxes.contract.errors import SandboxError, UnsupportedSpecError
from glovebox_sandboxes.contract.spec import SandboxSpec
from glovebox_sandboxes.pool.pool import SandboxProvider
from glovebox_sandboxes.session.connection import attest
from glovebox_server.core.rights import Rights
from glovebox_server.guards.registry import GuardSet
from glovebox_server.tools import TOOLS

IMPORTS_AFTER_SECONDS = 1.0
"""After the start of a server: importing takes a processor for half a second, and the first call needs it more."""


MAX_PREPARED = 8
"""Kinds of sandboxes that are prepared before any call: each takes memory, and a processor for half a second."""


async def check_preloads(profiles: ProfileSet, sandboxes: SandboxProvider, state: Path) -> None:
    """Import each profile's modules in a sandbox of its own, unless that is known to work.

    Success is stored in the state directory by the plan's digest, which covers runtime and list. None of these
    sandboxes has a workspace: preloaded modules do not come from there.

    Raises:
        ProfileError: a module cannot be imported; quotes the import's error.
        SandboxError: no sandbox starts, whether it imports them or not.
    """
    known = state / "preloads"
    for tool, profile in profiles.items():
        if not profile.python.preload:
            continue
        spec = to_spec(profile, workspace=None)
        try:
            driver, plan = await sandboxes.choose(profile.isolation, spec)
        except UnsupportedSpecError:
            continue  # nothing can run under it here, and its calls report why
        mark = known / plan.digest.partition(":")[2]
        if mark.exists():
            continue
        try:
            await _attest(driver, plan)
        except SandboxError as problem:
            _, without = await sandboxes.choose((driver.name,), spec.without_preload())
            await _attest(driver, without)  # if this fails too, the modules are not to blame
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


async def _attest(driver: Driver, plan: Plan) -> None:
    async with driver.open(plan) as sandbox:
        await attest(sandbox, plan)


async def prepare_sandboxes(every: Sequence[Rights], guards: GuardSet) -> None:
    """Prepare sandboxes of profiles that preload: at once without the modules, which is quick, then with them.

    ``every`` has each role's profiles. Of many roles, the first are prepared for; the others once a call has come.
    """
    wanted: list[tuple[tuple[str, ...], SandboxSpec]] = []
    for rights in every:
        for profile in rights.profiles.values():
            if not profile.python.preload or len(wanted) == MAX_PREPARED:
                continue
            spec = to_spec(profile, workspace=rights.workspace)
            reveal = [each.path for each in profile.files.reveal]
            if guards.watch is not None and rights.workspace is not None:
                reveal += await guards.watch.planted(rights.workspace)
            with suppress(UnsupportedSpecError):  # as below
                one = profile.isolation, await guards.hiding.masked(spec, TOOLS[profile.tool], reveal)
                if one not in wanted:
                    wanted.append(one)

    async def prepare(change: Callable[[SandboxSpec], SandboxSpec]) -> None:
        for isolation, spec in wanted:
            with suppress(UnsupportedSpecError):  # its calls report it
                await guards.sandboxes.prepare(isolation, change(spec))

    await prepare(SandboxSpec.without_preload)
    await anyio.sleep(IMPORTS_AFTER_SECONDS)
    await prepare(lambda spec: spec)
