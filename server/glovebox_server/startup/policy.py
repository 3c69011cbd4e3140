"""Reads a server's policy from its file, decides its examples as calls, and finds its workspaces on this host."""

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from glovebox_profiles.compile import ProfileSet
from glovebox_profiles.errors import ProfileError
from glovebox_profiles.model import Effect, Profile
from glovebox_profiles.policy import load as loading
from glovebox_profiles.policy.load import PAGE, KnownNames
from glovebox_profiles.policy.model import Policy, PolicyExample, digest
from glovebox_server import workspace
from glovebox_server.calls import Decision, Principal, ToolCall
from glovebox_server.core.accept import decide, same_rights, validate_arguments
from glovebox_server.core.call import Inputs
from glovebox_server.core.rights import Governed, Rights, Roles
from glovebox_server.errors import InvalidArgumentsError
from glovebox_server.guards.approvals.lifting import considered
from glovebox_server.guards.approvals.rules import asked_about, with_lift
from glovebox_server.guards.proposal import Proposal
from glovebox_server.guards.watch.rules import RULES
from glovebox_server.settings import Settings
from glovebox_server.tools.base import Tool
from glovebox_server.upkeep.credentials import require_apart
from glovebox_server.upkeep.environments import required
from glovebox_server.workspace import Workspace

_NEVER = datetime.fromtimestamp(0, UTC)
"""When an example is called."""


def policy_file(settings: Settings) -> Path | None:
    """Return the operator's policy file; None if there is none and none was named."""
    if settings.policy is not None:
        return settings.policy
    beside = settings.profiles_dir.absolute().parent / "policy.toml"
    return beside if os.path.lexists(beside) else None


def governed(settings: Settings, profiles: ProfileSet, served: Workspace, tools: Mapping[str, Tool]) -> Governed:
    """Read the policy and derive each caller's rights.

    Raises ProfileError if the policy is invalid, or not safe, or a key lies in a workspace; MisnamedError if a role's
    workspace must not be served. Nothing was started then.
    """
    plain = Rights(profiles=profiles, workspace=served.path)
    path = policy_file(settings)
    sources = [(profiles.source(tool), profile) for tool, profile in profiles.items()]
    if path is None:
        _require_apart(sources, (plain,))
        return Governed(rights_of=same_rights(plain), every=(plain,))
    policy = load(path, profiles, tools)
    roles = Roles(policy, profiles, served.path, workspaces(policy, settings, path))
    every = tuple(roles.all())
    for rights in every:
        required(settings, rights.profiles)
    _require_apart(sources, (plain, *every))
    return Governed(rights_of=roles, policy=policy, digest=digest(policy), every=every)


def _require_apart(sources: Sequence[tuple[Path, Profile]], rights: Sequence[Rights]) -> None:
    require_apart(sources, [each.workspace for each in rights if each.workspace is not None])


def load(path: Path, profiles: ProfileSet, tools: Mapping[str, Tool]) -> Policy:
    """Read a policy, and decide its examples as calls. Raises ProfileError if it is invalid, or not safe."""
    known = KnownNames(profiles=profiles, watch=tuple(RULES))
    return loading.load(path, known, check_example=checker(profiles, tools))


def checker(profiles: ProfileSet, tools: Mapping[str, Tool]) -> Callable[[Policy, PolicyExample], tuple[Effect, str]]:
    """Return a function that decides an example like its principal's first call."""
    last: tuple[Policy, Roles] | None = None

    def roles_of(policy: Policy) -> Roles:
        nonlocal last
        if last is None or last[0] is not policy:  # once for all examples: its digest alone takes milliseconds
            # A role's folder is searched when a server starts; a decision only needs to know that it has one.
            named = {each.workspace: Path(each.workspace) for each in policy.roles.values() if each.workspace}
            last = policy, Roles(policy, profiles, Path("/"), named)
        return last[1]

    def check(policy: Policy, example: PolicyExample) -> tuple[Effect, str]:
        caller = Principal(
            id=example.principal,
            transport="cli",
            workflow=example.workflow,
            roles=tuple(dict.fromkeys(policy.scopes[each] for each in example.scopes if each in policy.scopes)),
        )
        rights, tool = roles_of(policy)(caller), tools[example.call.tool]
        try:
            arguments = validate_arguments(tool, example.call.arguments)
        except InvalidArgumentsError:
            return "deny", "arguments"
        call = ToolCall(id="", principal=caller, session=None, tool=tool.name, arguments=arguments, received=_NEVER)

        def decided(given: Rights) -> Decision:
            served, objection = given.workspace is not None, given.refusal(tool.name)
            return decide(tool, arguments, given.profiles.get(tool.name), workspace=served, objection=objection)

        decision, rights, lifted = considered(call, tool, rights, decided)
        if decision.effect == "deny":
            return decision.effect, decision.rule
        profile = rights.profiles[tool.name]
        proposal = Proposal(call=call, rights=rights, profile=profile, decision=decision, inputs=Inputs())
        asks = with_lift(asked_about(proposal), lifted, tool.name)
        return ("ask", asks.rules[0]) if asks else (decision.effect, decision.rule)

    return check


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
