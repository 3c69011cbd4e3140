"""The rights of each caller: what its roles leave of profiles and workspace, under the policy in effect.

Roles are those of ``glovebox_profiles.policy``. Without a policy all callers have the rights of the profiles. The
files of both, and of their lock, are checked each second, and a valid change takes effect without a restart:

Rule 1  An invalid change has no effect: what was in effect stays; a record and /health report it. Removing a file is
        such a change: without a policy, or with the shipped profile, callers could do more.
Rule 2  A change is recorded before it is in effect; if it cannot be recorded, it is not taken.
Rule 3  Files are read once two checks saw them unchanged: an in-place write has ended by then. It ends with an example,
        so a truncated one is invalid. A later write never has an mtime seen before it, on any clock's tick.
Rule 4  A call continues with the rights of its decision; the next one has those in effect then.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Final, Literal

import anyio
import anyio.to_thread

from glovebox_audit.event import Event
from glovebox_audit.events import PolicyChanged, PolicyRefused, ProfileLoaded, ProfilesRefused
from glovebox_audit.log import AuditLog
from glovebox_audit.place import AuditError
from glovebox_profiles.compile import ProfileSet
from glovebox_profiles.errors import ProfileError, nearest
from glovebox_profiles.model import Credential, Profile
from glovebox_profiles.order import diff_sets
from glovebox_profiles.policy.model import Approval, Budget, Lift, Policy, Rate, WatchAction, digest
from glovebox_profiles.policy.rights import combine_roles, order_conflicts, profiles_beyond, roles_in_force
from glovebox_sandboxes.contract.base import SandboxSpec
from glovebox_sandboxes.contract.errors import DiagnosedError, Refusal
from glovebox_sandboxes.runtime.environments import Environment
from glovebox_server.calls import Principal
from glovebox_server.tools.base import Tool

MAX_CALLERS: Final = 4096
"""Callers whose rights are cached; others are computed again. OAuth bounds no number of callers."""
MAX_KEYS: Final = 256
"""Keys whose tool lists are cached: more than a policy has roles; older ones are evicted."""
MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """The rights of one caller."""

    profiles: ProfileSet
    workspace: Path | None
    role: str | None = None
    """Role, or several joined by ``+``; None without a policy, empty without a role."""
    policy_digest: str | None = None
    turns: int | None = None
    """Concurrent calls, if fewer than the server's default."""
    artifact_bytes: int | None = None
    """Bytes of artifacts, if fewer than the server's default."""
    budgets: tuple[Budget, ...] = ()
    approvals: tuple[Approval, ...] = ()
    lifts: tuple[Lift, ...] = ()
    beyond: Mapping[str, Profile] = field(default_factory=dict)
    """Profiles of tools outside its role that an approval would grant; empty unless the policy lifts that."""
    rates: tuple[Rate, ...] = ()
    denial: Refusal | None = None

    specs: dict[str, tuple[Profile, SandboxSpec]] = field(default_factory=dict, compare=False, repr=False)
    """Sandboxes made for its profiles, by tool, each with the profile that it is of."""
    credentials: tuple[Credential, ...] = field(init=False)
    """Of all its profiles, ``beyond`` included: never shown to its caller."""

    def __post_init__(self) -> None:
        """Collect the credentials, once for all calls."""
        profiles = (*self.profiles.values(), *self.beyond.values())
        credentials = tuple(credential for profile in profiles for credential in profile.network.credential)
        object.__setattr__(self, "credentials", credentials)

    @property
    def key(self) -> tuple[object, ...]:
        """Return a key that is equal for all callers with equal rights under one policy."""
        return self.role, self.profiles.digest, self.policy_digest, self.workspace

    def refusal(self, tool: str) -> Refusal | None:
        """Return why the role does not have this tool; None if it does."""
        if self.denial is not None or self.role is None or tool in self.profiles:
            return self.denial
        return Refusal(
            rule="role.tools",
            reason=f"Your role, {self.role}, does not have {tool}.",
            hint=f"It has {', '.join(self.profiles) or 'none'}. The operator can add others in policy.toml.",
        )

    def offered(self, tools: Iterable[str]) -> tuple[str, ...]:
        """Return the tools offered to the caller."""
        return tuple(tools if self.role is None else (tool for tool in tools if tool in self.profiles))

    def shown(self, tools: Mapping[str, Tool]) -> tuple[str, ...]:
        """Return the tools in the caller's list; one that proposes changes needs a profile for that."""
        return tuple(name for name in self.offered(tools) if name in self.profiles or not tools[name].proposes)


RightsOf = Callable[[Principal], Rights]
"""Maps a caller to its rights; fast, and the same for the same caller."""


@dataclass(eq=False)
class Roles:
    """The rights of each caller under a policy, computed once for each combination of roles."""

    policy: Policy
    profiles: ProfileSet
    """Those that the policy was loaded with."""
    workspace: Path | None
    """The server's, as served."""
    workspaces: Mapping[str, Path]
    """Those of roles, as served."""

    def __post_init__(self) -> None:
        """Work nothing out yet."""
        self._digest = digest(self.policy)
        self._nothing = Rights(profiles=ProfileSet({}, {}), workspace=None, role="", policy_digest=self._digest)
        self._of_roles = lru_cache(maxsize=None)(self._worked_out)  # bounded by roles × workflows
        self._of_caller = lru_cache(maxsize=MAX_CALLERS)(self._found)

    def __call__(self, principal: Principal) -> Rights:
        """Return the rights of this caller."""
        return self._of_caller(principal.id, principal.roles, principal.workflow)

    def all(self) -> Iterator[Rights]:
        """Yield the rights of each role, alone and with the role of each workflow."""
        workflows = [None, *dict.fromkeys(self.policy.workflows.values())]
        for other, role in product(workflows, self.policy.roles):
            yield self._of_roles(tuple(dict.fromkeys((role, other) if other else (role,))))

    def _found(self, principal: str, granted: tuple[str, ...], workflow: str | None) -> Rights:
        names = roles_in_force(self.policy, principal, granted, workflow)
        return replace(self._nothing, denial=names) if isinstance(names, Refusal) else self._of_roles(names)

    def _worked_out(self, names: tuple[str, ...]) -> Rights:
        left = combine_roles(self.policy, names, self.profiles)
        lifts_tools = any(each.what == "tool" for each in left.lifts)
        served = self.workspaces[left.workspace] if left.workspace else self.workspace
        return Rights(
            profiles=self.profiles.with_narrower(left.profiles),
            workspace=None if left.conflict else served,
            role=left.role,
            policy_digest=self._digest,
            turns=left.turns,
            artifact_bytes=None if left.artifacts_mib is None else left.artifacts_mib * MIB,
            budgets=left.budgets,
            approvals=left.approvals,
            lifts=left.lifts,
            beyond=profiles_beyond(self.policy, names, self.profiles) if lifts_tools else {},
            rates=left.rates,
        )


SECONDS: Final = 1.0
_WORKFLOW: Final = "--workflow"
_Stamp = tuple[tuple[object, ...], ...]
OnWatch = Callable[[Mapping[str, WatchAction]], None]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Governed:
    """The profiles in effect, the policy, if any, and the rights that they give each caller."""

    rights_of: RightsOf
    profiles: ProfileSet = field(default_factory=lambda: ProfileSet({}, {}))
    environments: Mapping[str, Environment] = field(default_factory=dict)
    lock_digest: str | None = None
    """Of the lock that all of it agrees with, where one is required."""
    policy: Policy | None = None
    digest: str | None = None
    every: tuple[Rights, ...] = ()
    """Rights of each role; without a policy, of all callers."""

    @property
    def budgeted(self) -> bool:
        """Return whether any role has a budget or a rate."""
        return any(each.budgets or each.rates for each in self.every)


def same_rights(rights: Rights) -> Governed:
    """Return what a server without a policy does: these rights, for every caller."""
    return Governed(rights_of=lambda _: rights, every=(rights,))


async def _checks_nothing(_: Governed) -> None:
    pass


class ActivePolicy:
    """Policy and profiles in effect; both reload when their files change. One per server."""

    def __init__(
        self, path: Path | None, read: Callable[[], Governed], others: Callable[[], Iterable[Path]] | None = None
    ) -> None:
        """Read the policy in ``path``, None for no policy, by ``read``, which also checks its examples.

        ``others`` returns the other files that ``read`` reads; None if there is none of the operator's among them.

        Raises:
            ProfileError: it is invalid.
            MisnamedError: a role's workspace must not be served.
        """
        self.now = read()
        self.changed = anyio.Event()
        self.problem: str | None = None
        self.unusable: Literal["policy", "profiles"] | None = None
        """Subject of the problem."""
        self.follows = path is not None or others is not None
        """True if anything may change."""
        self.check: Callable[[Governed], Awaitable[None]] = _checks_nothing
        """Tries other profiles before they are in effect; raises as ``read``."""
        self._path = path
        self._others = others or (lambda: ())
        self._read = read
        self._workflow: str | None = None
        self._budgeted = self.now.budgeted
        self._seen: _Stamp | None = None
        self._taken: _Stamp | None = None

    @property
    def policy(self) -> Policy | None:
        """Return the policy; None if there is none."""
        return self.now.policy

    @property
    def scopes(self) -> Mapping[str, str]:
        """Return the role of each scope."""
        return {} if self.policy is None else self.policy.scopes

    def rights_of(self, principal: Principal) -> Rights:
        """Return the rights of a caller."""
        if principal.scopes:  # the call may have waited, and the policy may have changed
            roles = (role for scope, role in self.scopes.items() if scope in principal.scopes)
            principal = replace(principal, roles=tuple(dict.fromkeys(roles)))
        return self.now.rights_of(principal)

    def require(self, workflow: str | None) -> None:
        """Accept only policies with this workflow, now and later; raise ``ProfileError`` if this one lacks it."""
        require_workflow(self.policy, workflow)
        self._workflow = workflow

    async def follow(self, audit: AuditLog, watch: OnWatch) -> None:
        """Check the files until cancelled; ``watch`` gets the watch rules' actions. Returns if nothing may change."""
        while self.follows:
            await anyio.sleep(SECONDS)
            await self.look(audit, watch)

    async def look(self, audit: AuditLog, watch: OnWatch) -> None:
        """Check the files once, and take or refuse a change."""
        before = self._seen
        self._seen = await anyio.to_thread.run_sync(self._stamps)
        if self._seen != before or self._seen == self._taken:
            return
        taken, self._taken = self._taken, self._seen
        try:
            found = await anyio.to_thread.run_sync(self._checked)
            events = _changes(self.now, found)
            if any(isinstance(each, ProfileLoaded) for each in events):
                await self.check(found)
            if events:
                await audit.append_all(events)
                self._take(found)
            for event in events:
                if isinstance(event, ProfileLoaded):
                    _log.warning("The profile of %s was changed, and is in effect: %s", event.tool, event.digest)
                elif found.policy is not None:
                    watch(found.policy.watch)
                    _log.warning("The policy was changed, and is in effect: %s", found.digest)
                    for warning in order_conflicts(found.policy):
                        _log.warning("%s", warning)
            self.problem = self.unusable = None
        except AuditError as problem:
            self._taken, self.problem, self.unusable = taken, str(problem), "policy"  # checked again in a second
        except Exception as problem:  # noqa: BLE001 - no content of a file may stop the server
            await self._refuse(problem, audit)

    def _checked(self) -> Governed:
        found = self._read()
        require_workflow(found.policy, self._workflow)
        if found.budgeted and not self._budgeted:
            reason = "has the first budget or rate, and their file is opened when a server starts"
            raise ProfileError(self._path or "", None, "roles", reason, "Restart the server.")
        for tool, source in ((tool, self.now.profiles.source(tool)) for tool in self.now.profiles):
            if tool not in found.profiles or (found.profiles.source(tool) != source and not source.exists()):
                reason = f"was removed, and calls of {tool} would be decided otherwise"
                raise ProfileError(source, None, "", reason, "Put it back, or restart the server.")
        return found

    def _stamps(self) -> _Stamp:
        return tuple(_stamp(each) for each in (*([self._path] if self._path else []), *self._others()))

    def _take(self, found: Governed) -> None:
        self.now, earlier, self.changed = found, self.changed, anyio.Event()
        earlier.set()

    async def _refuse(self, problem: Exception, audit: AuditLog) -> None:
        self.problem, where = str(problem), ""
        named = problem.path if isinstance(problem, ProfileError) else self._path
        self.unusable = "policy" if named in (self._path or "", Path(_WORKFLOW)) else "profiles"
        if isinstance(problem, ProfileError):  # without the reason, which may name paths of the host
            where = ": ".join(str(each) for each in (problem.line, problem.key) if each)
        elif not isinstance(problem, DiagnosedError):
            _log.error("The %s cannot be read", self.unusable, exc_info=problem)
        event: Event = PolicyRefused(where=where, policy_digest=self.now.digest or "")
        if self.unusable == "policy":
            _log.error("The policy was changed, and is not in effect; the one before stays: %s", problem)
        else:
            event = ProfilesRefused(where=where, profiles_digest=self.now.profiles.digest)
            _log.error("The profiles were changed, and are not in effect; those before stay: %s", problem)
        try:
            await audit.append(event)
        except AuditError as failure:
            _log.error("That is not recorded: %s", failure)


def _changes(before: Governed, found: Governed) -> list[Event]:
    """Return the events of what differs between two states."""
    events: list[Event] = [
        ProfileLoaded(
            tool=tool, digest=found.profiles.digests[tool], source="operator", lock_digest=found.lock_digest,
            changed={each.key: each.direction for each in keys},
        )
        for tool, keys in diff_sets(before.profiles, found.profiles).items()
    ]  # fmt: skip
    if found.digest != before.digest and found.policy is not None:
        events.append(PolicyChanged(policy_digest=found.digest or "", before=before.digest or ""))
    return events


def _stamp(path: Path) -> tuple[object, ...]:
    """Return values that change when a file does; its path alone if it is missing."""
    try:
        found = path.lstat()
    except OSError:
        return (path,)
    kind = found.st_dev, found.st_ino, found.st_mode, found.st_uid, found.st_size
    return path, *kind, found.st_mtime_ns, found.st_ctime_ns


def require_workflow(policy: Policy | None, workflow: str | None) -> None:
    """Raise ``ProfileError`` if the policy does not know the workflow, as it would deny every call."""
    if policy is None or workflow is None or workflow in policy.workflows:
        return
    fix = f"{nearest(workflow, policy.workflows)} Or add it to [workflows]."
    raise ProfileError(_WORKFLOW, None, "", f'the policy has no workflow "{workflow}"', fix)
