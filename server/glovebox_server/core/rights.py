"""What each caller may do: what its roles leave of profiles and workspace, and what they demand. No I/O.

The roles are ``glovebox_profiles.policy``'s. Without a policy everybody has the same rights: what the profiles say.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Final

from glovebox_profiles.compile import ProfileSet
from glovebox_profiles.model import Credential, Profile
from glovebox_profiles.policy.model import Approval, Budget, Lift, Policy, Rate, digest
from glovebox_profiles.policy.rights import RoleRights as Left
from glovebox_profiles.policy.rights import combine_roles, profiles_beyond, roles_in_force
from glovebox_sandboxes.contract.errors import Refusal
from glovebox_server.calls import Principal
from glovebox_server.tools.base import Tool

MAX_CALLERS: Final = 4096
"""Callers whose rights are remembered; another's are worked out anew. Over OAuth there may be any number."""
MAX_KEYS: Final = 256
"""Keys for which what callers are told is remembered: more than a policy has roles; those of earlier ones go."""
MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """What one caller may do."""

    profiles: ProfileSet
    """Of each tool its role has, narrowed by it."""
    workspace: Path | None
    """The directory its tools read."""
    role: str | None = None
    """Name of the role, of several all of them with ``+`` between; None without a policy, empty without a role."""
    policy_digest: str | None = None
    """``sha256:…`` of the policy; None without one."""
    turns: int | None = None
    """Calls at work at one time, if that is fewer than the server gives everybody."""
    artifact_bytes: int | None = None
    """Room among the artifacts, if that is less than the server gives everybody."""
    budgets: tuple[Budget, ...] = ()
    """What the caller may spend."""
    approvals: tuple[Approval, ...] = ()
    """Which of its calls wait for a yes."""
    lifts: tuple[Lift, ...] = ()
    """Which refusals may become a question."""
    beyond: Mapping[str, Profile] = field(default_factory=dict)
    """Profiles of the tools outside its role that a yes would give it; none unless the policy lifts that."""
    rates: tuple[Rate, ...] = ()
    """How often its calls may connect to a host."""
    denial: Refusal | None = None
    """Why it may call nothing at all; None where it has a role."""

    @property
    def key(self) -> tuple[object, ...]:
        """The same for all callers who may do the same under one policy."""
        return self.role, self.profiles.digest, self.policy_digest, self.workspace

    @property
    def credentials(self) -> tuple[Credential, ...]:
        """Return those of all its profiles, and of those that a yes would give it: what is kept from its caller."""
        profiles = (*self.profiles.values(), *self.beyond.values())
        return tuple(credential for profile in profiles for credential in profile.network.credential)

    def refusal(self, tool: str) -> Refusal | None:
        """Why the role does not have this tool; None where it has."""
        if self.denial is not None or self.role is None or tool in self.profiles:
            return self.denial
        return Refusal(
            rule="role.tools",
            reason=f"Your role, {self.role}, does not have {tool}.",
            hint=f"It has {', '.join(self.profiles) or 'none'}. The operator can add others in policy.toml.",
        )

    def offered(self, tools: Iterable[str]) -> tuple[str, ...]:
        """Of these tools, those that the caller is shown."""
        return tuple(tools if self.role is None else (tool for tool in tools if tool in self.profiles))

    def shown(self, tools: Mapping[str, Tool]) -> tuple[str, ...]:
        """Return the names of the tools in the caller's list: one that proposes changes needs a profile for that."""
        return tuple(name for name in self.offered(tools) if name in self.profiles or not tools[name].proposes)


RightsOf = Callable[[Principal], Rights]
"""What a caller may do; quick, and the same for the same caller."""


class Roles:
    """The rights of each caller under a policy; what one combination of roles leaves is worked out once."""

    def __init__(
        self, policy: Policy, profiles: ProfileSet, workspace: Path | None, workspaces: Mapping[str, Path]
    ) -> None:
        """Take what is in force.

        Args:
            policy: as it was loaded with these profiles.
            profiles: of all tools.
            workspace: the server's; None where it serves none.
            workspaces: those that roles name, as they are served.
        """
        self._policy = policy
        self._profiles = profiles
        self._digest = digest(policy)
        self._workspace = workspace
        self._workspaces = workspaces
        self._nothing = Rights(profiles=ProfileSet({}, {}), workspace=None, role="", policy_digest=self._digest)
        self._of_roles = lru_cache(maxsize=None)(self._worked_out)  # as many as roles with roles of workflows
        self._of_caller = lru_cache(maxsize=MAX_CALLERS)(self._found)

    def __call__(self, principal: Principal) -> Rights:
        """What this caller may do."""
        return self._of_caller(principal.id, principal.roles, principal.workflow)

    def all(self) -> Iterator[Rights]:
        """What each role leaves, alone and with that of each workflow."""
        workflows = [None, *dict.fromkeys(self._policy.workflows.values())]
        for other, role in product(workflows, self._policy.roles):
            yield self._of_roles(tuple(dict.fromkeys((role, other) if other else (role,))))

    def _found(self, principal: str, granted: tuple[str, ...], workflow: str | None) -> Rights:
        names = roles_in_force(self._policy, principal, granted, workflow)
        return replace(self._nothing, denial=names) if isinstance(names, Refusal) else self._of_roles(names)

    def _worked_out(self, names: tuple[str, ...]) -> Rights:
        left = combine_roles(self._policy, names, self._profiles)
        served = self._workspaces[left.workspace] if left.workspace else self._workspace
        return Rights(
            profiles=self._profiles.with_narrower(left.profiles),
            workspace=None if left.conflict else served,
            role=left.role,
            policy_digest=self._digest,
            turns=left.turns,
            artifact_bytes=None if left.artifacts_mib is None else left.artifacts_mib * MIB,
            budgets=left.budgets,
            approvals=left.approvals,
            lifts=left.lifts,
            beyond=self._beyond(left, names),
            rates=left.rates,
        )

    def _beyond(self, left: Left, names: tuple[str, ...]) -> Mapping[str, Profile]:
        if all(each.what != "tool" for each in left.lifts):
            return {}
        return profiles_beyond(self._policy, names, self._profiles)
