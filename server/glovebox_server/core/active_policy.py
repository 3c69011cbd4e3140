"""The policy that is in force: its file is looked at each second, and a valid change is taken without a restart.

Rule 1  A change that is not valid changes nothing: what was in force stays; a record says so, as does /health.
        A file that is gone is such a change: without a policy everybody could do more.
Rule 2  It is recorded before it is in force; what cannot be recorded is not taken.
Rule 3  A file is read once two looks saw it the same: who writes it in place is done by then. It ends with an example,
        so one that was cut short is none. No later write has a time that was seen before it, on any clock's tick.
Rule 4  A call goes on with the rights it was decided with; the next one has what is in force then.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from glovebox_audit.events import PolicyChanged, PolicyRefused
from glovebox_audit.log import AuditLog
from glovebox_profiles.errors import ProfileError, nearest
from glovebox_profiles.policy.model import Policy, WatchAction
from glovebox_profiles.policy.rights import order_conflicts
from glovebox_server.calls import Principal
from glovebox_server.core.rights import Rights, RightsOf
from glovebox_server.errors import AuditUnavailable
from glovebox_server.workspace import WorkspaceRefused

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
            WorkspaceRefused: a role's workspace must not be served.
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
        except AuditUnavailable as problem:
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
        elif not isinstance(problem, WorkspaceRefused):
            _log.error("The policy cannot be read", exc_info=problem)
        _log.error("The policy was changed, and is not in force; the one before stays: %s", problem)
        try:
            await audit.append(PolicyRefused(where=where, policy_digest=self.now.digest or ""))
        except AuditUnavailable as failure:
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
