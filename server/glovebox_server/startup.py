"""Reads a server's policy from its file, decides its examples as calls, and prepares sandboxes."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import anyio

from glovebox_profiles.compile import ProfileSet, to_spec
from glovebox_profiles.errors import ProfileError
from glovebox_profiles.model import Effect
from glovebox_profiles.policy import load as loading
from glovebox_profiles.policy.load import PAGE
from glovebox_profiles.policy.model import Policy, PolicyExample, digest
from glovebox_sandboxes.contract.base import Driver, Plan, SandboxSpec
from glovebox_sandboxes.contract.errors import SandboxError, UnsupportedSpecError
from glovebox_sandboxes.pool.pool import SandboxProvider
from glovebox_sandboxes.session.connection import attest
from glovebox_server import workspace
from glovebox_server.calls import Principal, ToolCall
from glovebox_server.core.call import Attempt, decide_call, validate_arguments
from glovebox_server.core.rights import Governed, Rights, Roles, same_rights
from glovebox_server.errors import InvalidArgumentsError
from glovebox_server.guards.approvals.rules import asked_about, lift_denial, with_lift
from glovebox_server.guards.registry import GuardSet
from glovebox_server.guards.watch.watch import RULES
from glovebox_server.proof.lock import Lock
from glovebox_server.settings import Settings
from glovebox_server.tools import TOOLS
from glovebox_server.upkeep.keeping import require_apart, required
from glovebox_server.workspace import Workspace

_NEVER = datetime.fromtimestamp(0, UTC)
"""When an example is called."""


def policy_file(settings: Settings) -> Path | None:
    """Return the operator's policy file; None if there is none and none was named."""
    if settings.policy is not None:
        return settings.policy
    beside = settings.profiles_dir.absolute().parent / "policy.toml"
    return beside if os.path.lexists(beside) else None


def governed(settings: Settings, profiles: ProfileSet, served: Workspace, lock: Lock | None = None) -> Governed:
    """Read the policy and derive each caller's rights.

    Raises ProfileError if the policy is invalid, or not safe, or differs from the lock, or a key lies in a workspace;
    MisnamedError if a role's workspace must not be served. Nothing was started then.
    """
    plain = Rights(profiles=profiles, workspace=served.path)
    path = policy_file(settings)
    found = same_rights(plain)
    if path is not None:
        policy = load(path, profiles)
        roles = Roles(policy, profiles, served.path, workspaces(policy, settings, path))
        found = Governed(rights_of=roles, policy=policy, digest=digest(policy), every=tuple(roles.all()))
        for rights in found.every:
            required(settings, rights.profiles)
    sources = [(profiles.source(tool), profile) for tool, profile in profiles.items()]
    require_apart(sources, [each.workspace for each in (plain, *found.every) if each.workspace is not None])
    if lock is not None:
        lock.require_policy(found.policy, path)
    return found


def load(path: Path, profiles: ProfileSet) -> Policy:
    """Read a policy, and decide its examples as calls. Raises ProfileError if it is invalid, or not safe."""
    return loading.load(path, profiles, tuple(RULES), partial(decide_examples, profiles))


def decide_examples(profiles: ProfileSet, policy: Policy) -> Iterator[tuple[Effect, str]]:
    """Decide each example of a policy like its principal's first call."""
    # A role's folder is searched when a server starts; a decision only needs to know that it has one.
    named = {each.workspace: Path(each.workspace) for each in policy.roles.values() if each.workspace}
    return map(partial(_decide_example, Roles(policy, profiles, Path("/"), named)), policy.example)


def _decide_example(roles: Roles, example: PolicyExample) -> tuple[Effect, str]:
    scopes = roles.policy.scopes
    caller = Principal(
        id=example.principal,
        transport="cli",
        workflow=example.workflow,
        roles=tuple(dict.fromkeys(scopes[each] for each in example.scopes if each in scopes)),
    )
    rights, tool = roles(caller), TOOLS[example.call.tool]
    try:
        arguments = validate_arguments(tool, example.call.arguments)
    except InvalidArgumentsError:
        return "deny", "arguments"
    call = ToolCall(id="", principal=caller, session=None, tool=tool.name, arguments=arguments, received=_NEVER)
    decided = partial(decide_call, call, tool)
    now = Attempt(request=call, rights=rights, decision=decided(rights))
    lift_denial(now, tool, decided)
    if now.decision.effect == "deny":
        return now.decision.effect, now.decision.rule
    now.profile = now.rights.profiles[tool.name]
    asks = asked_about(now)
    asks = with_lift(now.escalation, tool.name, asks) if now.escalation else asks
    return ("ask", asks.rules[0]) if asks else (now.decision.effect, now.decision.rule)


def workspaces(policy: Policy, settings: Settings, path: Path) -> dict[str, Path]:
    """Return each role's folder, which may not be one of the server's own, as the one named on start.

    Raises ProfileError if one is missing, or cannot be used; MisnamedError if one must not be served.
    """
    found: dict[str, Path] = {}
    for name, role in policy.roles.items():
        if role.workspace is None:
            continue
        key = f"roles.{name}.workspace"
        if not Path(role.workspace).is_dir():
            reason = f"{role.workspace} is not a directory"
            raise ProfileError(path, None, key, reason, f"Make it, or name another; see {PAGE}.")
        try:
            one = workspace.named(Path(role.workspace), settings, f"{path}: {key}")
        except OSError as problem:
            raise ProfileError(path, None, key, f"cannot be used: {problem.strerror}", "Name another.") from None
        found[role.workspace] = one
    return found


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
            driver, plan = await sandboxes.drivers.choose(profile.isolation, spec)
        except UnsupportedSpecError:
            continue  # nothing can run under it here, and its calls report why
        mark = known / plan.digest.partition(":")[2]
        if mark.exists():
            continue
        try:
            await _attest(driver, plan)
        except SandboxError as problem:
            _, without = await sandboxes.drivers.choose((driver.name,), spec.without_preload())
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
