"""What each caller may do: what its roles leave of profiles and workspace; and the policy in effect that says so.

The roles are ``glovebox_profiles.policy``'s. Without a policy everybody has the same rights: what the profiles say. The
file of the policy is looked at each second, and a valid change is taken without a restart:

Rule 1  A change that is not valid changes nothing: what was in force stays; a record says so, as does /health.
        A file that is gone is such a change: without a policy everybody could do more.
Rule 2  It is recorded before it is in force; what cannot be recorded is not taken.
Rule 3  A file is read once two looks saw it the same: who writes it in place is done by then. It ends with an example,
        so one that was cut short is none. No later write has a time that was seen before it, on any clock's tick.
Rule 4  A call goes on with the rights it was decided with; the next one has what is in force then.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from glovebox_audit.events import PolicyChanged, PolicyRefused
from glovebox_audit.log import AuditLog
from glovebox_profiles.compile import ProfileSet
from glovebox_profiles.errors import ProfileError, nearest
from glovebox_profiles.model import Credential, Profile
from glovebox_profiles.policy.model import Approval, Budget, Lift, Policy, Rate, WatchAction, digest
from glovebox_profiles.policy.rights import RoleRights as Left
from glovebox_profiles.policy.rights import combine_roles, order_conflicts, profiles_beyond, roles_in_force
from glovebox_sandboxes.contract.errors import Refusal
from glovebox_server.calls import Principal
from glovebox_server.errors import AuditError
from glovebox_server.tools.base import Tool
from glovebox_server.workspace import WorkspaceError

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

    credentials: tuple[Credential, ...] = field(init=False)
    """Those of all its profiles, and of those that a yes would give it: what is kept from its caller."""

    def __post_init__(self) -> None:
        """Collect the credentials, once for all calls."""
        profiles = (*self.profiles.values(), *self.beyond.values())
        credentials = tuple(credential for profile in profiles for credential in profile.network.credential)
        object.__setattr__(self, "credentials", credentials)

    @property
    def key(self) -> tuple[object, ...]:
        """The same for all callers who may do the same under one policy."""
        return self.role, self.profiles.digest, self.policy_digest, self.workspace

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


def same_rights(rights: Rights) -> RightsOf:
    """Return what gives every caller the same."""
    return lambda _: rights


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


SECONDS: Final = 1.0
"""Between two looks, as at the files of tokens."""

_Stamp = tuple[int, ...]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Governed:
    """What is in force: the policy, if there is one, and what it leaves each caller."""

    rights_of: RightsOf
    policy: Policy | None = None
    digest: str | None = None
    every: tuple[Rights, ...] = ()
    """What each role leaves; without a policy, what everybody has."""

    @property
    def budgeted(self) -> bool:
        """Whether anybody has a budget or a rate."""
        return any(each.budgets or each.rates for each in self.every)


class ActivePolicy:
    """What is in force now. One per server."""

    def __init__(self, path: Path | None, read: Callable[[], Governed]) -> None:
        """Read it.

        Args:
            path: the policy's file; None where there is no policy, which stays so.
            read: reads it, and decides its examples.

        Raises:
            ProfileError: it is wrong.
            WorkspaceError: a role's workspace must not be served.
        """
        self.now = read()
        self.scopes: dict[str, str] = {}
        """Role by scope; the same object whatever the policy."""
        self.changed = anyio.Event()
        """Set once another policy is in force; there is a new one then, for the next."""
        self.problem: str | None = None
        """Why the file as it is now is not in force; None where it is."""
        self._path = path
        self._read = read
        self._workflow: str | None = None
        self._budgeted = self.now.budgeted
        self._seen: _Stamp | None = None
        self._taken: _Stamp | None = None
        self._take(self.now)

    @property
    def policy(self) -> Policy | None:
        """The policy; None where there is none."""
        return self.now.policy

    def rights_of(self, principal: Principal) -> Rights:
        """What a caller may do."""
        if principal.scopes:  # it may have waited since it came in, and the policy may be another
            roles = (self.scopes[scope] for scope in self.scopes if scope in principal.scopes)
            principal = replace(principal, roles=tuple(dict.fromkeys(roles)))
        return self.now.rights_of(principal)

    def require(self, workflow: str | None) -> None:
        """Have only policies in force, this one and later ones, that know the workflow of the server.

        Raises:
            ProfileError: this one does not.
        """
        require_workflow(self.policy, workflow)
        self._workflow = workflow

    async def follow(self, audit: AuditLog, watch: Callable[[Mapping[str, WatchAction]], None]) -> None:
        """Look at the file until cancelled; ``watch`` hears what watch rules do. Returns where there is no policy."""
        while self._path is not None:
            await anyio.sleep(SECONDS)
            await self.look(audit, watch)

    async def look(self, audit: AuditLog, watch: Callable[[Mapping[str, WatchAction]], None]) -> None:
        """Look at the file once, and take or refuse what changed."""
        before = self._seen
        self._seen = await anyio.to_thread.run_sync(_stamp, self._path)
        if self._seen != before or self._seen == self._taken:
            return
        taken, self._taken = self._taken, self._seen
        try:
            found = await anyio.to_thread.run_sync(self._checked)
            if found.digest != self.now.digest and found.policy is not None:
                await audit.append(PolicyChanged(policy_digest=found.digest or "", before=self.now.digest or ""))
                self._take(found)
                watch(found.policy.watch)
                _log.warning("The policy was changed, and is in force: %s", found.digest)
                for warning in order_conflicts(found.policy):
                    _log.warning("%s", warning)
            self.problem = None
        except AuditError as problem:
            self._taken, self.problem = taken, str(problem)  # looked at again in a second
        except Exception as problem:  # noqa: BLE001 - whatever a file holds ends no server
            await self._refuse(problem, audit)

    def _checked(self) -> Governed:
        found = self._read()
        require_workflow(found.policy, self._workflow)
        if found.budgeted and not self._budgeted:
            reason = "has the first budget or rate, and their file is opened when a server starts"
            raise ProfileError(self._path or "", None, "roles", reason, "Restart the server.")
        return found

    def _take(self, found: Governed) -> None:
        self.now = found
        self.scopes.clear()
        self.scopes.update({} if found.policy is None else found.policy.scopes)
        earlier, self.changed = self.changed, anyio.Event()
        earlier.set()

    async def _refuse(self, problem: Exception, audit: AuditLog) -> None:
        self.problem, where = str(problem), ""
        if isinstance(problem, ProfileError):  # without the reason: it may name paths of the host
            where = ": ".join(str(each) for each in (problem.line, problem.key) if each)
        elif not isinstance(problem, WorkspaceError):
            _log.error("The policy cannot be read", exc_info=problem)
        _log.error("The policy was changed, and is not in force; the one before stays: %s", problem)
        try:
            await audit.append(PolicyRefused(where=where, policy_digest=self.now.digest or ""))
        except AuditError as failure:
            _log.error("That is not recorded: %s", failure)


def _stamp(path: Path | None) -> _Stamp:
    """What changes when a file does; nothing for one that is not there."""
    if path is None:
        return ()
    try:
        found = path.lstat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_mode, found.st_uid, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def require_workflow(policy: Policy | None, workflow: str | None) -> None:
    """Refuse a workflow that the policy, where there is one, does not know: every call of it would be.

    Raises:
        ProfileError: it does not.
    """
    if policy is None or workflow is None or workflow in policy.workflows:
        return
    fix = f"{nearest(workflow, policy.workflows)} Or add it to [workflows]."
    raise ProfileError("--workflow", None, "", f'the policy has no workflow "{workflow}"', fix)
